"""Gateways of a test's own, which can be killed and started again on the same state folder and port."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

import loom
from loom.process.listen import free_ports
from loom_proxy.local import LocalCluster
from tests.support.processes import read_json, start, still_there

BOUND = 40.0
"""Seconds; far over what anything takes, so that only a hang fails."""

TOKEN = "a token of the tests"


class Gateway:
    """A gateway whose drivers may outlive it."""

    def __init__(self, workers: Sequence[str], *options: str) -> None:
        # Not pytest's folder: the path of a socket is short.
        self.folder = Path(tempfile.mkdtemp(prefix="loom-test-"))
        self.state = self.folder / "state"
        self._options = [arg for worker in workers for arg in ("--worker", worker)] + list(options)
        self._process: subprocess.Popen[str] | None = None
        self.token_file: Path | None = None  # with its own token
        self.before: Sequence[str] = ()  # the beginning of its command line
        self.url = ""
        self.announced: dict[str, Any] = {}  # what it printed when it listened

    def start(self) -> Gateway:
        """Start the gateway, on the port that it had before if there was one."""
        port = self.url.rpartition(":")[2] or str(*free_ports(1))
        with (self.folder / "output").open("a") as output:
            self._process = start(*self.command(port), before=self.before, stderr=output)
        try:
            self.announced = read_json(self._process)
        except AssertionError as error:
            raise AssertionError(f"{error}; its output:\n{(self.folder / 'output').read_text()}") from None
        self.url = self.announced["url"]
        return self

    def command(self, port: str = "0") -> list[str]:
        """How it is started, for this interpreter."""
        token = ["--token", TOKEN] if self.token_file is None else ["--token-file", str(self.token_file)]
        options = [*token, "--port", port, "--state-dir", str(self.state)]
        return ["-m", "loom_gateway", *options, *self._options]

    def end(self, number: int = signal.SIGKILL) -> None:
        """End the gateway with a signal and wait until it is gone."""
        assert self._process is not None
        self._process.send_signal(number)
        self._process.communicate(timeout=BOUND)
        self._process = None

    def connect(self, session: str | None = None, **options: Any) -> loom.Job:
        # The client before may have left so lately that the driver has not noticed.
        return loom.connect(self.url, TOKEN, session, take_over=session is not None, **options)

    def rest(self, path: str, method: str = "GET") -> Any:
        request = urllib.request.Request(self.url.replace("ws://", "http://") + "/api/v1" + path, method=method)
        request.add_header("Authorization", f"Bearer {TOKEN}")
        with urllib.request.urlopen(request, timeout=BOUND) as response:
            return json.load(response)

    def ready(self) -> tuple[int, dict[str, Any]]:
        """What a readiness probe sees: the status code and the answer."""
        try:
            with urllib.request.urlopen(
                self.url.replace("ws://", "http://") + "/readyz", timeout=BOUND
            ) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def session(self, name: str) -> dict[str, Any]:
        """What the gateway tells of a living session."""
        (found,) = [session for session in self.rest("/sessions")["sessions"] if session["name"] == name]
        return dict(found)

    def ended(self, name: str) -> dict[str, Any]:
        """What the gateway tells of a session that has ended, or does so now."""
        found: list[dict[str, Any]] = []

        def is_there() -> bool:
            found[:] = [ended for ended in self.rest("/sessions?ended=true")["ended"] if ended["name"] == name]
            return bool(found)

        await_true(is_there)
        return found[0]

    def drivers(self) -> list[psutil.Process]:
        """Every driver that any gateway has started in the folder."""
        return self._processes("loom_gateway.driver")

    def weavers(self) -> list[psutil.Process]:
        """Every weaver that any gateway has started in the folder."""
        return self._processes("loom.weaver")

    def _processes(self, module: str) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter(["cmdline"]):
            line = process.info["cmdline"] or []
            if module in line and any(arg.startswith(str(self.state)) for arg in line):
                found.append(process)
        return found

    def sockets(self) -> list[str]:
        """The sockets that there are in the folder."""
        return [path.name for path in self.state.glob("*.sock")]

    def socket(self, session: str) -> str:
        """The socket of a session's driver."""
        records = {path: json.loads(path.read_text()) for path in self.state.glob("driver-*.json")}
        (found,) = [path for path, record in records.items() if record["session"] == session]
        return str(found.with_suffix(".sock"))

    def close(self) -> None:
        """End everything; nothing may be left."""
        if self._process is None:
            self.start()
        self.end(signal.SIGINT)
        left = still_there(self.drivers() + self.weavers())
        sockets = self.sockets()
        output = (self.folder / "output").read_text()
        shutil.rmtree(self.folder)
        assert left == [], f"{left}; the gateway's output:\n{output}"
        assert sockets == []


def attach(cluster: LocalCluster, session: str) -> loom.Job:
    """Attach to a session as soon as its driver knows that the last client has left."""
    deadline = time.monotonic() + BOUND
    while True:
        try:
            return loom.connect(cluster.url, cluster.token, session=session)
        except loom.SessionInUse:
            if time.monotonic() > deadline:
                raise


@contextmanager
def gateway_of(cluster: LocalCluster, *options: str) -> Iterator[Gateway]:
    """A running gateway for the workers of a cluster."""
    gateway = Gateway(cluster.workers, *options)
    try:
        yield gateway.start()
    finally:
        gateway.close()


def run_gateway(gateway: Gateway) -> subprocess.CompletedProcess[str]:
    """Run another gateway on the state folder of one, to its end."""
    return subprocess.run(
        [sys.executable, *gateway.command()],
        capture_output=True,
        text=True,
        timeout=BOUND,
        stdin=subprocess.DEVNULL,
        env=dict(os.environ),
    )


def await_true(condition: Callable[[], bool], timeout: float = BOUND) -> None:
    """Wait until something is so that there is no event for."""
    until = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < until, "it never was so"
        time.sleep(0.05)


def await_end(pid: int) -> None:
    """Wait until a process is gone."""
    try:
        process = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return
    assert still_there([process], timeout=BOUND) == []
