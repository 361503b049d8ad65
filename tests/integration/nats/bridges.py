"""``loom bridge`` as tests run it, and what the weaver knows."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nats.aio.client import Client

from loom_proxy.weaver.client import WeaverProxy
from tests.integration.nats.nats_server import BOUND
from tests.support.gateways import await_true
from tests.support.processes import LOOM, read_json, run_loom, start

__all__ = ["LOOM", "Bridge", "counts_of", "group_of", "run_bridge", "states", "until"]


class Bridge:
    """``loom bridge``, run as a user runs it. A context manager."""

    def __init__(self, url: str, token: str, nats_url: str, *options: str) -> None:
        descriptor, self._log = tempfile.mkstemp(suffix=".log")
        environment = {**os.environ, "LOOM_URL": url, "LOOM_TOKEN": token}
        command = ["-c", LOOM, "bridge", nats_url, "--exit-with-parent", *options]
        self.url = url
        self.id = ""
        """The bridge's own id, once it is ready."""
        self.process: subprocess.Popen[str] = start(*command, env=environment, stderr=descriptor)
        os.close(descriptor)

    def await_ready(self) -> Bridge:
        """Wait until it is connected to both sides."""
        try:
            listening = read_json(self.process)
            assert listening["event"] == "listening"
            self.id = listening["bridge"]
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.log()}") from None
        return self

    def log(self) -> str:
        """What it has said."""
        return Path(self._log).read_text()

    def await_log(self, text: str) -> None:
        """Wait until it has said something."""
        await_true(lambda: text in self.log())

    def end(self, number: int = signal.SIGTERM) -> int:
        """End it with a signal; its exit code."""
        self.process.send_signal(number)
        self.process.wait(timeout=20)  # with its standard input open: to close that is a signal, too
        self.process.communicate()
        return self.process.returncode

    def __enter__(self) -> Bridge:
        return self.await_ready()

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        print(self.log())
        os.unlink(self._log)


def run_bridge(url: str, token: str, nats_url: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run ``loom bridge`` until it ends."""
    return run_loom("bridge", nats_url, "--url", url, "--token", token, *options)


def group_of(test: str) -> str:
    """The group of a test's processes, by the test's name."""
    return test.removeprefix("test_").partition("[")[0]


def states(weaver: WeaverProxy) -> dict[str, str]:
    """The state of each replica."""
    return {id: replica.state for id, replica in weaver.replicas().items()}


async def until(holds: Callable[[], bool]) -> None:
    """Wait for something that the weaver knows."""
    await asyncio.to_thread(await_true, holds)


async def counts_of(client: Client) -> dict[str, Any]:
    """What the bridge has counted."""
    message = await client.request("torchLoom.bridge.metrics", b"", timeout=BOUND)
    counts: dict[str, Any] = json.loads(message.data)["bridge_metrics"]
    return counts
