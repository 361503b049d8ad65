"""A process without a threadlet, as it speaks NATS: in the test's own process, with nothing of Loom's."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from nats.aio.client import Client
from nats.aio.subscription import Subscription

from tests.integration.nats.nats_server import BOUND

__all__ = ["INTERVAL", "Outsider"]

INTERVAL = 0.2
"""Seconds between two heartbeats."""

PROMISED = 1.0
"""Seconds between two heartbeats, as the bridge is told: a busy machine is late."""


class Outsider:
    """A replica on one device. An asynchronous context manager, with heartbeats as long as it is open."""

    def __init__(self, client: Client, replica: str, device: str, prefix: str = "torchLoom", **more: Any) -> None:
        self.replica = replica
        self.step = 0
        self._client = client
        self._prefix = prefix
        self._about = {"replica_id": replica, "device_uuid": device, "heartbeat_interval": PROMISED, **more}
        self._beating: asyncio.Task[None] | None = None
        self._commands: Subscription

    async def say(self, subject: str, body: dict[str, Any]) -> None:
        """Publish a body."""
        await self._client.publish(f"{self._prefix}.{subject}", json.dumps(body).encode())

    async def ask(self, subject: str, body: dict[str, Any]) -> dict[str, Any]:
        """Publish a body; the bridge's reply."""
        message = await self._client.request(f"{self._prefix}.{subject}", json.dumps(body).encode(), timeout=BOUND)
        reply: dict[str, Any] = json.loads(message.data)["reply"]
        return reply

    async def register(self, **more: Any) -> dict[str, Any]:
        """Register; the bridge's reply."""
        return await self.ask("DRentry", {**self._about, **more})

    async def report(self, **more: Any) -> None:
        """Make a step, and report it."""
        self.step += 1
        about = {"replica_id": self.replica, "status_type": "batch_update", "current_step": self.step, **more}
        await self.say("training.status", about)

    async def command(self) -> tuple[dict[str, Any], str]:
        """The next command for this replica, and where to answer."""
        while True:
            message = await self._commands.next_msg(BOUND)
            command: dict[str, Any] = json.loads(message.data)["weaver_command"]
            if command.get("target_replica_id") == self.replica:
                return command, message.reply

    async def answer(self, command: dict[str, Any], subject: str, **more: Any) -> None:
        """Acknowledge a command."""
        about = {"replica_id": self.replica, "command_id": command["command_id"], "ok": True, **more}
        await self._client.publish(subject, json.dumps({"acknowledgement": about}).encode())

    async def fall_silent(self) -> None:
        """Stop the heartbeats."""
        if self._beating is not None:
            self._beating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._beating

    def beat(self) -> None:
        """Begin with heartbeats."""
        self._beating = asyncio.ensure_future(self._beat())

    async def _beat(self) -> None:
        while True:
            await self.say("heartbeat", {"replica_id": self.replica, "current_step": self.step})
            await asyncio.sleep(INTERVAL)

    async def __aenter__(self) -> Outsider:
        self._commands = await self._client.subscribe(f"{self._prefix}.weaver.commands")
        registered = await self.register()
        assert registered["ok"], registered
        self.beat()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.fall_silent()
        await self._commands.unsubscribe()
