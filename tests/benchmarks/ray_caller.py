"""The same calls through Ray Client, to a Ray head that is started for them.

Runs in Ray's own environment, so it imports nothing of Loom.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.benchmarks.caller import MeshCaller, serve

STARTED = "Ray runtime started"

ADDRESS = "127.0.0.2"
"""Of this machine only. Ray would take 127.0.0.1 for a mistake and listen where others can connect."""


class Head:
    """``ray start --head`` under a guard that ends it when this process ends."""

    def __init__(self) -> None:
        ports = {name: _free_port() for name in ("--port", "--ray-client-server-port")}
        command = [
            str(Path(sys.executable).with_name("ray")),
            "start",
            "--head",
            "--block",
            f"--node-ip-address={ADDRESS}",
            "--include-dashboard=false",
            "--disable-usage-stats",
            "--num-cpus=2",
            *(f"{option}={port}" for option, port in ports.items()),
        ]
        self.address = f"ray://{ADDRESS}:{ports['--ray-client-server-port']}"
        self._guard = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.guard", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        assert self._guard.stdout
        for line in self._guard.stdout:
            print(line, end="")
            if STARTED in line:
                return
        raise RuntimeError("ray start ended before it had started a head")

    def close(self) -> None:
        assert self._guard.stdin
        self._guard.stdin.close()
        self._guard.wait()


def make_caller() -> MeshCaller:
    # Some of Ray's processes listen on every address: nobody else is to run code through them.
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    import ray  # type: ignore[import-not-found]

    head = Head()
    ray.init(head.address, logging_level="warning")

    class Counter:
        def __init__(self) -> None:
            self.number = 0

        def add(self, amount: int) -> int:
            self.number += amount
            return self.number

        def echo(self, value: Any) -> Any:
            return value

    counter = ray.remote(Counter).remote()

    def close() -> None:
        ray.shutdown()
        head.close()

    return MeshCaller(counter.add.remote, counter.echo.remote, ray.get, close)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind((ADDRESS, 0))
        return int(sock.getsockname()[1])


if __name__ == "__main__":
    serve(make_caller)
