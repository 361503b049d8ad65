"""The handlers for a client's questions about clocks and spans."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from typing import Any, cast

from loom.errors import LimitReached, ProtocolMismatch
from loom.tracing import clock
from loom.tracing.collecting import LONGEST, MAX_BYTES, MAX_RECORDS, Collection, ProcessSpans, no_spans
from loom.wire.bodies import CollectSpans, SendSpans
from loom.wire.messages import Kind, Message
from loom_gateway.driver.monarch.mesh_table import MeshEntry
from loom_gateway.driver.monarch.span_actor import SpanActor
from loom_gateway.driver.remote_exec.process_actors import ProcessActors
from loom_gateway.driver.session.context import SessionContext
from loom_gateway.driver.session.replies import Handler, notice

ANSWERS_WITHIN = 10.0
"""Seconds that a process has for each answer, in addition to those of the collection."""
PREPARED_WITHIN = 20.0
"""Seconds that all wait for torch's profiler to start in each, before they begin to collect."""
PROFILES_WITHIN = 60.0
"""Seconds, instead of `ANSWERS_WITHIN`, for what that profiler has seen."""
MOST_PROCESSES = 64
"""Processes that are asked; of a larger session the first ones of each proc mesh."""
MOST_RECORDS = 100_000
"""Spans of all processes together, which have equal shares of it; and as many operators."""
EXCHANGES = 8
"""Looks at the clock of each process."""


class SpanCollector:
    """The collections of one session, one at a time. Its coroutines run on the event loop."""

    def __init__(self, context: SessionContext) -> None:
        self._context = context
        self._actors = ProcessActors("loom_spans", SpanActor)
        self._collecting = False
        self._numbers = itertools.count(1)
        self._laptops: dict[int, asyncio.Future[ProcessSpans]] = {}  # what the driving client was asked for
        context.on_retired.append(self._actors.retire)
        self.handlers: dict[int, Handler] = {
            Kind.CLOCK: self._read_clock,
            Kind.COLLECT_SPANS: self._collect,
            Kind.SPANS: self._take,
        }

    def _read_clock(self, message: Message, started: float) -> None:
        self._context.replies.succeed(message.id, started, clock.now())

    def _collect(self, message: Message, started: float) -> None:
        request = CollectSpans.from_body(message.body)
        if not 0 < request.seconds <= LONGEST:
            raise ProtocolMismatch(f"spans are collected for at most {LONGEST:g} seconds, not {request.seconds:g}")
        laptop = self._context.drives_for(message.id)
        self._context.replies.answer_with(message, started, self._spans(request, laptop))

    def _take(self, message: Message, started: float) -> None:
        request = SendSpans.from_body(message.body)
        if message.size <= 2 * MAX_BYTES:
            spans = _checked(json.loads(b"".join(message.parts)))
            self._context.loop.call_soon_threadsafe(self._came, request.collection, spans)

    def _came(self, collection: int, spans: ProcessSpans) -> None:
        waiting = self._laptops.get(collection)
        if waiting is not None and not waiting.done():
            waiting.set_result(spans)

    async def _spans(self, request: CollectSpans, laptop: bool) -> list[ProcessSpans]:
        if self._collecting:
            raise LimitReached("the spans of this session are being collected: ask again when that is done")
        self._collecting = True
        try:
            places = self._places()
            if request.kernels:
                await asyncio.gather(*(self._prepare(entry, rank) for entry, rank in places))
            own = Collection()
            try:
                asked = self._ask_laptop(request.seconds) if laptop else []
                most = MOST_RECORDS // max(1, len(places))
                processes = [self._process(entry, rank, request, most) for entry, rank in places]
                found = await asyncio.gather(*asked, *processes, asyncio.sleep(request.seconds))
            finally:
                driver = own.end("driver")
            return [driver, *(each for each in found if each is not None)]
        finally:
            self._collecting = False

    def _places(self) -> list[tuple[MeshEntry, int]]:
        """Return the processes to ask: one of each proc mesh, then the second of each, up to `MOST_PROCESSES`."""
        entries = [entry for _, entry in self._context.meshes.whole("procs") if not entry.stopped]
        longest = max((len(entry.ranks) for entry in entries), default=0)
        every = [(entry, rank) for rank in range(longest) for entry in entries if rank < len(entry.ranks)]
        return every[:MOST_PROCESSES]

    def _ask_laptop(self, seconds: float) -> list[Any]:
        number = next(self._numbers)
        waiting = self._laptops[number] = self._context.loop.create_future()
        self._context.send(notice("collect_spans", {"collection": number, "seconds": seconds}))
        return [self._laptop(number, waiting, seconds + ANSWERS_WITHIN)]

    async def _laptop(
        self, number: int, waiting: asyncio.Future[ProcessSpans], within: float
    ) -> ProcessSpans | None:
        try:
            return await asyncio.wait_for(waiting, within)
        except asyncio.TimeoutError:
            return no_spans("laptop", f"the program that drives the session did not answer in {within:g} s")
        finally:
            del self._laptops[number]

    async def _prepare(self, entry: MeshEntry, rank: int) -> None:
        with contextlib.suppress(Exception):  # whatever it is, it is told when the collection begins
            prepared = self._actors.of(entry, rank).prepare.call_one().as_asyncio()
            await asyncio.wait_for(prepared, PREPARED_WITHIN)

    async def _process(self, entry: MeshEntry, rank: int, request: CollectSpans, most: int) -> ProcessSpans | None:
        name = f"{entry.name}[{rank}]"
        within = PROFILES_WITHIN if request.kernels else ANSWERS_WITHIN
        try:
            actor = self._actors.of(entry, rank)
            await _begin(actor, request.kernels, most)
            await asyncio.sleep(request.seconds)
            end = actor.end.call_one(name).as_asyncio()
            return _checked(await asyncio.wait_for(end, within))
        except asyncio.TimeoutError:
            return no_spans(name, f"no answer in {within:g} s: the process is gone or its interpreter busy")
        except Exception as error:  # noqa: BLE001 - Monarch's errors about a dead process, which are of many kinds
            return no_spans(name, f"{type(error).__name__}: {error!s:.300}")


async def _begin(actor: Any, kernels: bool, most: int) -> None:
    """Compare a process's clock with this one, and have the process begin."""
    exchanges = []
    for _ in range(EXCHANGES):
        before = clock.now()
        there = await asyncio.wait_for(actor.clock.call_one().as_asyncio(), ANSWERS_WITHIN)
        # Seen from the process: what this clock shows is asked for between two looks at that one.
        exchanges.append(clock.ClockExchange(before, there, clock.now()))
    theirs = clock.measured(exchanges)
    begin = actor.begin.call_one(-theirs.seconds, theirs.error, kernels, most).as_asyncio()
    await asyncio.wait_for(begin, ANSWERS_WITHIN)


def _checked(spans: object) -> ProcessSpans:
    """Return the spans that another process sent, at most as many as one may send."""
    if not isinstance(spans, dict) or not isinstance(spans.get("records"), list):
        raise ProtocolMismatch("these are no spans of a process")
    spans["records"] = [record for record in spans["records"] if isinstance(record, dict)][: 2 * MAX_RECORDS]
    return cast(ProcessSpans, {**no_spans("", None), **spans})
