"""Kubetorch's own pod server as a child process, serving one class or function without a controller."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from loom.process.listen import free_ports
from tests.support.paths import ROOT

__all__ = ["pod_server"]


READY_WITHIN = 60.0
"""Seconds, on a machine that does other things too."""


@contextmanager
def pod_server(called: str, init_args: dict[str, Any] | None = None) -> Iterator[str]:
    """Serve a name of `tests.support.ordinary_classes` and give the URL; the environment says the rest."""
    (port,) = free_ports(1)
    told = {
        "KT_MODULE_NAME": "tests.support.ordinary_classes",
        "KT_CLS_OR_FN_NAME": called,
        "KT_FILE_PATH": str(ROOT),
        "KT_PROJECT_ROOT": str(ROOT),
        "KT_INIT_ARGS": json.dumps(init_args),
        "KT_ALLOWED_SERIALIZATION": "json,pickle",
        "KT_LOG_STREAMING_ENABLED": "False",
        "KT_METRICS_ENABLED": "False",
        "KT_SERVER_PORT": str(port),
        "POD_NAME": "pod-0",
        "POD_NAMESPACE": "default",
        "POD_IP": "127.0.0.1",
    }
    command = [sys.executable, "-m", "uvicorn", "kubetorch.serving.http_server:app", "--port", str(port)]
    server = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **told},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _await_ready(server, url)
        yield url
    finally:
        _end(server)
        assert server.stdout
        server.stdout.close()


def _end(server: subprocess.Popen[bytes]) -> None:
    # By force, and its workers too: one may be in a call that never ends.
    workers = psutil.Process(server.pid).children(recursive=True) if server.poll() is None else []
    server.kill()
    server.wait()
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()
    psutil.wait_procs(workers, 10)


def _await_ready(server: subprocess.Popen[bytes], url: str) -> None:
    until = time.monotonic() + READY_WITHIN
    while True:
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=5).close()
            return
        except OSError as error:
            if server.poll() is not None or time.monotonic() > until:
                server.kill()
                output = server.communicate()[0].decode(errors="replace")
                raise AssertionError(f"the pod server does not serve ({error}):\n{output}") from error
            time.sleep(0.05)  # it tells nobody when it listens
