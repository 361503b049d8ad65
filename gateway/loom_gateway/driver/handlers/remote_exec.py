"""The handler for what people do in the process of a rank: commands, terminals, ports and files."""

from __future__ import annotations

import asyncio
import functools
import secrets
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from loom.control.operations import NoteReached
from loom.errors import LimitReached, NoSuchRank, NotFound, ProtocolMismatch, SupervisionError, WrongArguments
from loom.file_access import METHODS
from loom.process import tasks
from loom.wire.bodies import AskRank
from loom.wire.messages import Kind, Message
from loom_gateway.driver.monarch.mesh_table import MeshEntry
from loom_gateway.driver.monarch.receiver import Receiver, open_for_messages
from loom_gateway.driver.remote_exec.agent import FileAgent, RankAgent
from loom_gateway.driver.remote_exec.command import Spec
from loom_gateway.driver.remote_exec.leases import HeldConduit, HeldResource
from loom_gateway.driver.remote_exec.process_actors import ProcessActors
from loom_gateway.driver.session.context import SessionContext
from loom_gateway.driver.session.replies import Handler

MOST_HELD = 4096  # commands, connections and copies of all clients at a time

LONGEST_WAIT = 20.0  # seconds that a request for output, or for room for input, waits

LONGEST_AWAY = 86400.0  # seconds of silence after which a client counts as gone, at most


class _Target(NamedTuple):
    """The process that an operation is about."""

    procs: MeshEntry
    rank: int  # in the proc mesh
    mesh: str  # the name of the mesh that the client named
    guest: str | None  # the user who asks, if the session is another user's

    @property
    def process(self) -> MeshEntry:
        """The proc mesh with this one process."""
        return replace(self.procs, ranks=(self.rank,))

    @property
    def key(self) -> tuple[int, int]:
        return self.procs.root, self.rank

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.mesh!r}"


class RankOperations:
    """The operations of one session in the processes of its ranks. Its coroutines run on the event loop."""

    def __init__(self, context: SessionContext) -> None:
        self._context = context
        self._agents = ProcessActors("loom_rank", RankAgent)
        self._file_agents = ProcessActors("loom_rank_files", FileAgent)
        self._ports: dict[tuple[int, int], tuple[Receiver, asyncio.Task[Any]]] = {}  # of agents, by their target
        self._held: dict[str, HeldResource] = {}  # by the handle, a secret between the driver and its client
        self._forwards: dict[str, tuple[_Target, int]] = {}  # ports that clients forward, by the handle
        context.on_retired.append(self._retire)
        context.failures.on_process_gone.append(self._process_gone)
        self.handlers: dict[int, Handler] = {Kind.RANK: self._ask}
        self._beginning: dict[str, Callable[..., Any]] = {
            "exec": self._exec,
            "shell": self._shell,
            "forward": self._forward,
            "copy_to": functools.partial(self._copy, "copy_to"),
            "copy_from": functools.partial(self._copy, "copy_from"),
        }
        self._going_on: dict[str, Callable[..., Any]] = {
            "connect": self._connect,
            "hear": self._hear,
            "write": self._write,
            "signal": self._signal,
            "resize": self._resize,
            "file": self._file,
            "end": self._end,
        }

    def _ask(self, message: Message, started: float) -> None:
        request = AskRank.from_body(message.body)
        arguments = self._context.decoder.loads(message.parts, f"an argument of {request.operation!r:.40}")
        if (go_on := self._going_on.get(request.operation)) is not None:
            held = self._held.get(arguments[0])
            one = None if held is None else held.process
            self._context.replies.answer_with(message, started, go_on(*arguments), one)
            return
        begin = self._beginning.get(request.operation)
        if begin is None:
            raise ProtocolMismatch(f"this driver knows no operation {request.operation!r:.40} on ranks")
        target = self._target(request, self._context.guest_of(message.id))
        self._context.replies.answer_with(message, started, begin(target, *arguments), target.process)

    def _target(self, request: AskRank, guest: str | None) -> _Target:
        entry = self._context.meshes.entry(request.mesh)
        if entry.procs < 0:
            raise WrongArguments(f"{entry.name!r} is no mesh of processes or actors, which have ranks")
        if request.rank not in entry.ranks:
            raise NoSuchRank(f"{entry.name!r} has no rank {request.rank}")
        procs = self._context.meshes.entry(entry.procs)
        return _Target(procs, request.rank, entry.name, guest)

    async def _write_down(self, does: str, target: _Target, what: str) -> None:
        await self._context.weaver.write_down(NoteReached(does, target.mesh, target.rank, what, target.guest))

    # -- what begins ----------------------------------------------------------------------------------------

    async def _exec(
        self, target: _Target, command: Sequence[str], variables: Mapping[str, str], away: float
    ) -> str:
        return await self._run("exec", target, Spec(command, None, variables), away)

    async def _shell(
        self,
        target: _Target,
        command: Sequence[str],
        variables: Mapping[str, str],
        size: tuple[int, int],
        away: float,
    ) -> str:
        return await self._run("shell", target, Spec(command, size, variables), away)

    async def _run(self, does: str, target: _Target, spec: Spec, away: float) -> str:
        await self._write_down(does, target, shlex.join(spec.command))
        handle, agent = self._hold_conduit(target, away)
        return await self._begun(handle, target, agent.run.call_one(handle, spec))

    async def _forward(self, target: _Target, number: int) -> str:
        await self._write_down("forward", target, str(number))
        self._check_room()
        handle = secrets.token_hex(16)
        self._forwards[handle] = target, number
        return handle

    async def _connect(self, forward: str, away: float) -> str:
        if forward not in self._forwards:
            raise NotFound("this port is not forwarded any more: forward it again")
        target, number = self._forwards[forward]
        handle, agent = self._hold_conduit(target, away)
        return await self._begun(handle, target, agent.connect.call_one(handle, number))

    async def _copy(self, does: str, target: _Target, path: str, away: float) -> str:
        await self._write_down(does, target, path)
        self._check_room()
        handle = secrets.token_hex(16)
        actor = self._file_agents.of(target.procs, target.rank)
        held = self._held[handle] = HeldResource(
            target.process, actor, _seconds(away), lambda: self._let_go(handle)
        )
        with held.asked():
            await actor.begin.call_one(handle).as_asyncio()
        return handle

    def _hold_conduit(self, target: _Target, away: float) -> tuple[str, Any]:
        self._check_room()
        handle = secrets.token_hex(16)
        agent = self._agent(target)
        self._held[handle] = HeldConduit(target.process, agent, _seconds(away), lambda: self._let_go(handle))
        return handle, agent

    async def _begun(self, handle: str, target: _Target, beginning: Any) -> str:
        held = self._held[handle]
        with held.asked():
            try:
                problem = await beginning.as_asyncio()
            except BaseException:
                self._let_go(handle)
                raise
        if problem:
            self._drop(handle)
            raise NotFound(f"{target}: {problem}")
        return handle

    def _agent(self, target: _Target) -> Any:
        if target.key not in self._ports:
            receiver = open_for_messages(once=False)
            self._ports[target.key] = receiver, tasks.keep_running("read a rank", lambda: self._read(receiver))
        return self._agents.of(target.procs, target.rank, self._ports[target.key][0].port)

    async def _read(self, receiver: Receiver) -> None:
        while True:
            handle, event = receiver.unpickle(await receiver.wait_on_loop())
            held = self._held.get(handle)
            if isinstance(held, HeldConduit):
                held.take(*event)

    def _check_room(self) -> None:
        if len(self._held) + len(self._forwards) >= MOST_HELD:
            raise LimitReached(
                f"{MOST_HELD} commands, connections and copies of this session go on: end some first"
            )

    # -- what goes on ---------------------------------------------------------------------------------------

    async def _hear(self, handle: str) -> tuple[list[tuple[str, bytes]], tuple[int | None, str] | None]:
        held = self._conduit(handle)
        with held.asked():
            # At most half of the time, so that a client is not kept for much longer than it wants.
            pieces, end = await held.hear(min(LONGEST_WAIT, held.away / 2))
            if pieces and end is None:
                held.actor.grant.broadcast(handle, sum(len(data) for _, data in pieces))
        if end is not None:
            self._drop(handle)
        return pieces, end

    async def _write(self, handle: str, data: bytes | None) -> bool:
        """Return whether there was room for the input; None closes it."""
        held = self._conduit(handle)
        with held.asked():
            taken = await held.room(len(data or b""), LONGEST_WAIT)
            if taken:
                await held.actor.write.call_one(handle, data).as_asyncio()
        return taken

    async def _signal(self, handle: str, number: int) -> None:
        held = self._conduit(handle)
        with held.asked():
            await held.actor.signal.call_one(handle, number).as_asyncio()

    async def _resize(self, handle: str, rows: int, columns: int) -> None:
        held = self._conduit(handle)
        with held.asked():
            await held.actor.resize.call_one(handle, rows, columns).as_asyncio()

    async def _file(self, handle: str, method: str, *arguments: Any) -> Any:
        held = self._held.get(handle)
        if held is None:
            raise _gone()
        if method not in METHODS:
            raise ProtocolMismatch(f"this driver knows no operation {method!r:.40} on files")
        with held.asked():
            return await held.actor.do.call_one(handle, method, arguments).as_asyncio()

    async def _end(self, handle: str) -> None:
        self._forwards.pop(handle, None)
        held = self._drop(handle)
        if held is not None:
            await held.actor.end.call_one(handle).as_asyncio()

    def _conduit(self, handle: str) -> HeldConduit:
        held = self._held.get(handle)
        if not isinstance(held, HeldConduit):
            raise _gone()
        return held

    def _drop(self, handle: str) -> HeldResource | None:
        held = self._held.pop(handle, None)
        if held is not None:
            held.forget()
        return held

    # -- ends -----------------------------------------------------------------------------------------------

    def _let_go(self, handle: str) -> None:
        held = self._drop(handle)
        if held is not None:
            held.actor.end.broadcast(handle)

    def _process_gone(self, procs: int, rank: int) -> None:
        error = SupervisionError("the process of the rank is gone: it died, or its host did, or was stopped")
        for held in list(self._held.values()):
            if held.place == (procs, rank):
                held.lose(error)
        _, reading = self._ports.pop((procs, rank), (None, None))
        if reading is not None:
            reading.cancel()

    def _retire(self, procs: int) -> None:
        for place in [place for place in self._ports if place[0] == procs]:
            self._process_gone(*place)
        self._forwards = {handle: one for handle, one in self._forwards.items() if one[0].key[0] != procs}
        self._agents.retire(procs)
        self._file_agents.retire(procs)


def _seconds(away: float) -> float:
    return min(max(float(away), 0.0), LONGEST_AWAY)


def _gone() -> NotFound:
    return NotFound("this has ended in the cluster, because its program was silent for too long")
