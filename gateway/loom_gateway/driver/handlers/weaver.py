"""What a client asks of the weaver: anything, or new configuration for the replicas in actors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loom.control.commands import Acknowledgement, CommandKind
from loom.wire.bodies import AskWeaver, ReconfigureActors
from loom.wire.messages import Kind, Message
from loom_gateway.driver.monarch.mesh_table import Entry
from loom_gateway.driver.session.context import Context
from loom_gateway.driver.session.replies import Handler

__all__ = ["WeaverOperations"]

ASK_FOR = 30.0
"""Seconds that the weaver is asked to wait for acknowledgements at once."""

REGISTERS_WITHIN = 2.0
"""Seconds that a threadlet has to register after its actor was made."""


class WeaverOperations:
    """The operations of one session that the weaver answers."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.handlers: dict[int, Handler] = {Kind.ASK_WEAVER: self._ask, Kind.RECONFIGURE: self._reconfigure}

    def _ask(self, message: Message, started: float) -> None:
        request = AskWeaver.from_body(message.body)
        asking = self._context.weaver.ask(request.operation, dict(request.arguments), request.timeout)
        self._context.replies.answer_with(message, started, asking)

    def _reconfigure(self, message: Message, started: float) -> None:
        request = ReconfigureActors.from_body(message.body)
        entry = self._context.meshes.entry(request.mesh)
        self._context.replies.answer_with(message, started, self._acknowledgements(entry, request.config))

    async def _acknowledgements(self, entry: Entry, config: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What each process' replica has made of it, in the order of the ranks."""
        weaver = self._context.weaver
        await entry.mesh.initialized.as_asyncio()
        wanted = {"session": weaver.session, "procs": entry.procs, "ranks": entry.ranks}
        replicas = dict(await weaver.ask("replicas_in", {**wanted, "timeout": REGISTERS_WITHIN}))
        target = [replicas[rank] for rank in entry.ranks if rank in replicas]
        outcomes: dict[str, dict[str, Any]] = {}
        if target:
            wanted = {"kind": CommandKind.UPDATE_CONFIG.value, "target": target, "params": dict(config)}
            command = await weaver.ask("command", {**wanted, "by": weaver.session})
            waiting = {"id": command["id"], "timeout": ASK_FOR}
            while True:
                state = await weaver.ask("command_state", waiting)
                outcomes = state["outcomes"]
                if state["done"]:
                    break
        return [outcomes.get(replicas.get(rank, ""), _no_replica(entry, rank)) for rank in entry.ranks]


def _no_replica(entry: Entry, rank: int) -> dict[str, Any]:
    reason = f"no threadlet has registered in process {rank} of {entry.name!r}: make a loom.Threadlet there"
    return Acknowledgement.failed(reason).to_body()
