"""A real ``nats-server``, which can be killed and started again on the same port."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import nats
from nats.aio.client import Client
from nats.aio.subscription import Subscription

from loom.nats.nats_link import flush
from loom.nats.subjects import HEADER, SOURCE, EnvelopeKind, Format, decode
from tests.support.needs import skip_because

__all__ = ["NatsServer", "Said", "require_nats_server"]

BOUND = 40.0
"""Seconds; far over what anything takes, so that only a hang fails."""


def require_nats_server() -> None:
    """Skip the test where there is no ``nats-server``, but fail it with ``LOOM_TEST_ALL``."""
    if shutil.which("nats-server") is None:
        skip_because("the program nats-server (Debian package nats-server) is not installed")


class NatsServer:
    """A server on this machine. A context manager; it does not outlive this process.

    Args:
        options: more options of its command line.
    """

    def __init__(self, *options: str) -> None:
        self._options = options
        self._process: subprocess.Popen[str] | None = None
        self._port = "-1"

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start it, on the port that it had before if it had one."""
        command = ["setpriv", "--pdeathsig", "KILL", "nats-server", "--addr", "127.0.0.1", "--port", self._port]
        self._process = subprocess.Popen([*command, *self._options], stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        said = ""
        for line in self._process.stderr:
            said += line
            if "Listening for client connections on" in line:
                self._port = line.rstrip().rpartition(":")[2]
            if "Server is ready" in line:
                return
        raise AssertionError(f"nats-server ended with code {self._process.wait(BOUND)}: {said}")

    def kill(self) -> None:
        """End it as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate(timeout=BOUND)
            self._process = None

    def __enter__(self) -> NatsServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Said:
    """What is said on a subject, as a monitor reads it."""

    def __init__(self, kind: EnvelopeKind, subscription: Subscription, format: Format) -> None:
        self.kind = kind
        self._subscription = subscription
        self._format = format

    @classmethod
    async def on(
        cls, client: Client, kind: EnvelopeKind, prefix: str = "torchLoom", format: Format = Format.JSON
    ) -> Said:
        """Begin to read."""
        said = cls(kind, await client.subscribe(f"{prefix}.{kind.value[1]}"), format)
        await flush(client, 10)
        return said

    async def next(self, **wanted: Any) -> dict[str, Any]:
        """The next body from a bridge of which this holds."""
        seen = []
        try:
            while True:
                message = await self._subscription.next_msg(BOUND)
                if HEADER not in (message.headers or {}):
                    continue
                assert Format.of(message.data) is self._format
                envelope = decode(self.kind, message.data)
                assert envelope.source == SOURCE + message.headers[HEADER]
                body = envelope.body
                if all(body.get(name) == value for name, value in wanted.items()):
                    return body
                seen.append(body)
        except nats.errors.TimeoutError:
            raise AssertionError(f"nothing like {wanted} in {seen[-20:]}") from None

    async def next_event(self, kind: str) -> dict[str, Any]:
        """The next event of a kind, of those on ``ui.update``."""
        while True:
            body = await self.next(type="event")
            if body["data"]["kind"] == kind:
                event: dict[str, Any] = body["data"]
                return event


def with_configuration(folder: Path, text: str) -> NatsServer:
    """A server with a configuration."""
    path = folder / "nats.conf"
    path.write_text(text)
    return NatsServer("--config", str(path))


CONFIGURATION = 'authorization {{ user: {user}, password: "{password}" }}\n'


def with_password(folder: Path, user: str, password: str) -> NatsServer:
    """A server that wants to know who comes."""
    return with_configuration(folder, CONFIGURATION.format(user=user, password=password))
