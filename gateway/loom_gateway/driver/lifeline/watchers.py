"""The driver's end of the connections on which processes watch others: it tells which are gone.

Monarch tells an actor that a mesh which it was sent has lost a process, unless the process dies in the moment in
which Monarch asks for its state (see `loom_gateway.driver.monarch.root_client`). So a process whose actors wait for
such a mesh asks the driver, which knows it from the lifelines.
"""

from __future__ import annotations

import asyncio

from loom.errors import ProtocolMismatch
from loom.proof.exchange import Exchange
from loom.wire.bodies import ProcessesGone, Watch
from loom.wire.framing import FrameSplitter
from loom.wire.messages import Kind
from loom_gateway.driver.lifeline.introduction import answer_of
from loom_gateway.driver.lifeline.line import MAX_GREETING, MOST_WATCHED, greeting, read_greeting

MOST_MESHES = 1000  # proc meshes with lost processes that are remembered, the last ones

_READ = 64 << 10


class Watchers:
    """Which processes of a driver are gone, and who watches for them. On the event loop."""

    def __init__(self) -> None:
        self._gone: dict[int, set[int]] = {}  # ranks by proc mesh, the mesh that lost one last at the end
        self._watched: dict[asyncio.StreamWriter, dict[int, None]] = {}  # proc meshes

    def gone(self, procs: int) -> list[int]:
        """Return the ranks of a proc mesh that are gone."""
        return sorted(self._gone.get(procs, ()))

    def lose(self, procs: int, rank: int, later: bool = True) -> None:
        """Tell those who watch a mesh that a process of it is gone, with ``later`` also those who do so later."""
        if later:
            self._gone[procs] = {*self._gone.pop(procs, ()), rank}
        if len(self._gone) > MOST_MESHES:
            del self._gone[next(iter(self._gone))]
        said = greeting(ProcessesGone("", procs, [rank]).message())
        for writer, watched in self._watched.items():
            if procs in watched:
                writer.write(said)

    async def serve(
        self, asked: Watch, exchange: Exchange, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer a process, which has shown the driver's key, until it goes away.

        Raises:
            ProtocolMismatch: it sends anything else than `Watch`.
        """
        watched = self._watched[writer] = {asked.procs: None}
        splitter = FrameSplitter(MAX_GREETING)
        try:
            writer.write(answer_of(exchange, self._answer(asked)))
            while data := await reader.read(_READ):
                for frame in splitter.feed(data):
                    message = read_greeting(frame)
                    if message.kind != Kind.WATCH:
                        raise ProtocolMismatch(f"a process that watches sends WATCH, not message {message.kind}")
                    another = Watch.from_body(message.body)
                    watched[another.procs] = None
                    if len(watched) > MOST_WATCHED:
                        del watched[next(iter(watched))]
                    writer.write(greeting(self._answer(another).message()))
        finally:
            del self._watched[writer]

    def close(self) -> None:
        """Cut off everyone."""
        for writer in list(self._watched):
            writer.transport.abort()

    def _answer(self, asked: Watch) -> ProcessesGone:
        return ProcessesGone("", asked.procs, self.gone(asked.procs))
