"""The handlers for questions to the weaver and to the actors' debugger, and for new configuration of replicas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loom.control.commands import Acknowledgement, CommandKind
from loom.control.operations import GetReplicasIn
from loom.errors import ProtocolMismatch
from loom.wire.bodies import AskWeaver, Debug, ReconfigureActors
from loom.wire.messages import Kind, Message
from loom_gateway.driver.monarch.debugger import OPERATIONS, find_debugger
from loom_gateway.driver.monarch.mesh_table import MeshEntry
from loom_gateway.driver.session.context import SessionContext
from loom_gateway.driver.session.replies import Handler


class Debugging:
    """The operations of one session that its debugger answers."""

    def __init__(self, context: SessionContext) -> None:
        self._context = context
        self.handlers: dict[int, Handler] = {Kind.DEBUG: self._ask}

    def _ask(self, message: Message, started: float) -> None:
        request = Debug.from_body(message.body)
        if request.operation not in OPERATIONS:
            raise ProtocolMismatch(f"this driver's debugger knows no operation {request.operation!r:.40}")
        self._context.replies.answer_with(message, started, self._answer(request))

    async def _answer(self, request: Debug) -> Any:
        debugger = await find_debugger()
        return await getattr(debugger, request.operation).call_one(*request.arguments).as_asyncio()


ASK_FOR = 30.0  # seconds that the weaver waits for acknowledgements in one request
REGISTERS_WITHIN = 2.0  # seconds that a threadlet has to register after its actor was made


class WeaverOperations:
    """The operations of one session that the weaver answers."""

    def __init__(self, context: SessionContext) -> None:
        self._context = context
        self.handlers: dict[int, Handler] = {Kind.ASK_WEAVER: self._ask, Kind.RECONFIGURE: self._reconfigure}

    def _ask(self, message: Message, started: float) -> None:
        request = AskWeaver.from_body(message.body)
        answer = self._context.weaver.answer(request.operation, request.arguments, request.timeout)
        self._context.replies.answer_with(message, started, answer)

    def _reconfigure(self, message: Message, started: float) -> None:
        request = ReconfigureActors.from_body(message.body)
        entry = self._context.meshes.entry(request.mesh)
        self._context.replies.answer_with(message, started, self._acknowledgements(entry, request.config))

    async def _acknowledgements(self, entry: MeshEntry, config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return the acknowledgement of each process's replica, in the order of the ranks."""
        await entry.mesh.initialized.as_asyncio()
        session, weaver = self._context.weaver.session, self._context.weaver.client
        wanted = GetReplicasIn(session, entry.procs, list(entry.ranks), REGISTERS_WITHIN)
        replicas = dict(await weaver.ask_for(wanted))
        target = [replicas[rank] for rank in entry.ranks if rank in replicas]
        outcomes: Mapping[str, Mapping[str, Any]] = {}
        if target:
            kind = CommandKind.UPDATE_CONFIG.value
            state = await weaver.do("command", session, kind=kind, target=target, params=dict(config), wait=ASK_FOR)
            while not state["done"]:
                state = await weaver.do("command_state", session, id=state["id"], wait=ASK_FOR)
            outcomes = state["outcomes"]
        return [outcomes.get(replicas.get(rank, ""), _no_replica(entry, rank)) for rank in entry.ranks]


def _no_replica(entry: MeshEntry, rank: int) -> Mapping[str, Any]:
    reason = f"no threadlet has registered in process {rank} of {entry.name!r}: make a loom.Threadlet there"
    return Acknowledgement.failed(reason).to_body()
