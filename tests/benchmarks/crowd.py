"""Many simulated threadlets in one process: ``python -m tests.benchmarks.crowd ADDRESS`` for a weaver's address.

Each has a connection of its own, says what a real threadlet says as often as that does, and acknowledges commands
as soon as they come. Their turns are spread evenly over time.
"""

from __future__ import annotations

import asyncio
import math
import random
import resource
import sys
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar, cast

from loom.control.address import WeaverAddress, parse_weaver_address
from loom.control.frame import MAX_FRAME, pack, unpack_all
from loom.threadlet.link import SHOWN_BY_REPORT
from loom.threadlet.reporting import DEVICES_INTERVAL
from loom.wire.length_prefix import FrameSplitter
from tests.benchmarks.caller import serve
from tests.unit.loom.weaver.raw_threadlet import GPU, hello_of

__all__ = ["Crowd"]

TURN = 0.005
"""Seconds between two looks at who is due."""

AT_ONCE = 100
"""Connections that are made at the same time."""

AHEAD = 100_000
"""Reports of a long run that are sent before the weaver has stored them."""

TOGETHER = 1000
"""Reports of a long run in one frame."""

STORED_WITHIN = 30.0
"""Seconds that the last reports may take to be stored."""

NOT_FINITE = 1000
"""One of so many has a loss that is not finite."""

NO_PROCESS = (1 << 22) + 1
"""A process id that Linux gives to none: to the weaver, the crowd is on other hosts."""

BEAT = 1.0
"""Seconds between two heartbeats."""

V = TypeVar("V")


class Crowd:
    """The threadlets, and the loop in which they live.

    Args:
        address: of the weaver.
    """

    def __init__(self, address: str) -> None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._address = parse_weaver_address(address)
        self._members: list[_Member] = []
        self._loop = _new_loop()
        threading.Thread(target=self._loop.run_forever, name="crowd", daemon=True).start()
        self._do(self._begin())

    def _do(self, work: Coroutine[Any, Any, V]) -> V:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _begin(self) -> None:
        self._background = [
            asyncio.create_task(self._take_turns(BEAT / 4, _Member.look)),
        ]

    def join(self, count: int, group_size: int | None = None) -> float:
        """Have so many more register; seconds until all are welcome.

        Args:
            count: how many.
            group_size: members of a group; one group for all if None.
        """
        start = time.monotonic()
        self._do(self._join(count, group_size))
        return time.monotonic() - start

    async def _join(self, count: int, group_size: int | None) -> None:
        for first in range(0, count, AT_ONCE):
            numbers = range(len(self._members), len(self._members) + min(AT_ONCE, count - first))
            members = [_Member(one, one // group_size if group_size else None) for one in numbers]
            await asyncio.gather(*(member.connect(self._address) for member in members))
            self._members += members

    def report(self, seconds: float, per_second: float, together: int) -> dict[str, float]:
        """Report for some time, and wait until all is stored.

        Args:
            seconds: how long.
            per_second: reports of all threadlets together.
            together: reports in one frame; a real threadlet sends those of 50 ms together.

        Returns:
            ``reports`` sent, ``seconds`` until the last was sent, ``until_stored`` and, of this process,
            ``cpu_seconds``.
        """
        return self._do(self._report(seconds, per_second, together))

    async def _report(self, seconds: float, per_second: float, together: int) -> dict[str, float]:
        start, cpu = time.monotonic(), time.process_time()
        frames_per_second, total = per_second / together, round(seconds * per_second / together)
        sent = 0
        while sent < total:
            await asyncio.sleep(TURN)
            due = min(total, int((time.monotonic() - start) * frames_per_second))
            for number in range(sent, due):
                self._members[number % len(self._members)].report(together)
            sent = due
        last = time.monotonic()
        self._all_connected()
        while any(member.stored < member.seq for member in self._members):
            assert time.monotonic() < last + STORED_WITHIN, "the weaver does not store what it is told"
            await asyncio.sleep(TURN)
        return {
            "reports": sent * together,
            "seconds": last - start,
            "until_stored": time.monotonic() - start,
            "cpu_seconds": time.process_time() - cpu,
        }

    def _all_connected(self) -> None:
        lost = sum(member.lost for member in self._members)
        assert not lost, f"the weaver gave up {lost} of {len(self._members)} threadlets"

    def leave_runs(self, count: int, steps: int) -> None:
        """Have so many trainings of a user begin, report so many steps, and complete."""
        self._do(self._leave_runs(count, steps))

    async def _leave_runs(self, count: int, steps: int) -> None:
        for first in range(0, count, AT_ONCE):
            numbers = range(first, min(first + AT_ONCE, count))
            members = [_Member(number, None, name=f"past_{number}") for number in numbers]
            await asyncio.gather(*(member.connect(self._address) for member in members))
            for member in members:
                member.report(steps)
                member.leave()
            await asyncio.gather(*(member.left for member in members))

    def run_long(self, points: int) -> None:
        """Have a training, which goes on, report so many points of its loss."""
        self._do(self._run_long(points))

    async def _run_long(self, points: int) -> None:
        long = _Member(0, None, name="long")
        await long.connect(self._address)
        while long.stored < points:
            if long.seq < min(points, long.stored + AHEAD):
                long.report(min(TOGETHER, points - long.seq), learning_rate=False)
            else:
                await asyncio.sleep(TURN)
            assert not long.lost, "the weaver gave up the long run"
        self._members.append(long)

    def keep_reporting(self) -> None:
        """Have each report once a second from now on, in a frame of its own."""
        self._do(self._keep_reporting())

    async def _keep_reporting(self) -> None:
        self._background.append(asyncio.create_task(self._take_turns(1.0, _Member.report)))

    def stored(self) -> int:
        """Return how many reports the weaver has stored so far."""
        self._all_connected()
        return sum(member.stored for member in self._members)

    def sent(self) -> int:
        """Return how many bytes the weaver has been sent so far."""
        return sum(member.sent for member in self._members)

    async def _take_turns(self, every: float, say: Any) -> None:
        """Have each say something once in so many seconds."""
        due, place, before = 0.0, 0, time.monotonic()
        while True:
            await asyncio.sleep(TURN)
            now = time.monotonic()
            due, before = due + (now - before) / every * len(self._members), now
            while due >= 1.0:
                due -= 1.0
                # No counting modulo their number, which grows: somebody would be left out for too long.
                place = place + 1 if place + 1 < len(self._members) else 0
                say(self._members[place])

    def close(self) -> None:
        """End nothing: the process ends, and its connections with it."""


class _Member(asyncio.Protocol):
    """A threadlet. What it reports depends on its number and on how often it did.

    Args:
        number: which decides what it reports.
        group: number of its group; None for the one group.
        name: of which there is one only, also as the name of its group; None for one by its number.
    """

    def __init__(self, number: int, group: int | None, name: str | None = None) -> None:
        self.seq = 0
        self.stored = 0
        self.sent = 0  # bytes
        self.lost = False
        self._began = now = time.monotonic()
        self._beat_at = self._account_at = self._device_at = now
        self._account_pause = BEAT
        self._random = random.Random(number)
        self._step = self._random.randrange(50)
        self._diverged = number % NOT_FINITE == NOT_FINITE - 1
        self._group = name or ("train" if group is None else f"train{group}")
        self._name = name or f"train_{number}"
        self._device = {**GPU, "uuid": f"GPU-{name or number}", "server": f"node-{name or number // 8}"}
        self._splitter = FrameSplitter(MAX_FRAME)
        self._transport: asyncio.Transport
        self._welcome = asyncio.get_running_loop().create_future()
        self.left = asyncio.get_running_loop().create_future()

    async def connect(self, address: WeaverAddress) -> None:
        await asyncio.get_running_loop().create_connection(lambda: self, address.host, address.port)
        instance = f"instance of {self._name}"
        hello = hello_of(
            address.key,
            self._name,
            instance,
            pid=NO_PROCESS,
            devices=[self._device],
            group=self._group,
            patient=True,
        )
        self._send("hello", hello)
        await self._welcome

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for frame in unpack_all(self._splitter.feed(data)):
            kind = frame[0]
            if kind == "stored":
                self.stored = frame[1]
            elif kind == "command":
                changes = {key: {"old": None, "new": value} for key, value in frame[3].items()}
                answer = {"ok": True, "reason": None, "changes": changes, "refused": {}}
                self._send("ack", frame[1], self._step, answer)
            elif kind == "account_pause":
                self._account_pause = max(BEAT, frame[1])
            elif kind == "welcome":
                self._welcome.set_result(None)
            elif kind == "goodbye_stored":
                self.left.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._welcome.done():
            self._welcome.set_exception(ConnectionError(f"the weaver refused {self._name}"))
        if not self.left.done():
            self.left.cancel()
        self.lost = True

    def leave(self) -> None:
        """Say that the training is complete."""
        self._send("bye", "finished", "finished")

    def report(self, count: int = 1, learning_rate: bool = True) -> None:
        """Report the next steps, in one frame; with the learning rate or with the loss alone."""
        now, rows = time.time(), []
        for _ in range(count):
            self.seq += 1
            self._step += 1
            loss = 4.0 / (1.0 + self._step / 100.0) + self._random.uniform(-0.1, 0.1)
            metrics = {
                "loss": math.nan if self._diverged else loss,
                **({"learning_rate": 0.1} if learning_rate else {}),
            }
            rows.append([self.seq, now, self._step, None, None, metrics, None])
        self._beat_at = time.monotonic() + SHOWN_BY_REPORT * BEAT
        self._send("status", rows)
        self._add_what_is_due()

    def look(self) -> None:
        """Send a heartbeat, if one is due."""
        now = time.monotonic()
        if now >= self._beat_at:
            self._beat_at = now + BEAT
            self._send("beat", time.time(), self._step or None, "step")
            self._add_what_is_due()

    def _add_what_is_due(self) -> None:
        now = time.monotonic()
        if now >= self._account_at:
            self._account_at = now + self._account_pause
            lived = now - self._began
            spent = {"waiting": 0.1, "compute": 0.9 * lived, "lost": 0.0, "checkpoint": 0.05 * lived}
            self._send("spent", [lived, 0.1, 1, self._step, 0.01, spent])
        if now >= self._device_at:
            self._device_at = now + DEVICES_INTERVAL
            self._tell_device()

    def _tell_device(self) -> None:
        load = self._random.random()
        use = {
            "utilization": load,
            "memory_used": 1 << 30,
            "temperature": 40.0 + 40.0 * load,
            "power": 700.0 * load,
        }
        self._send("devices", time.time(), {self._device["uuid"]: use})

    def _send(self, *frame: Any) -> None:
        if not self.lost:
            packed = pack(frame)
            self.sent += len(packed)
            self._transport.write(packed)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()  # type: ignore[no-any-return]


if __name__ == "__main__":
    serve(lambda: Crowd(sys.argv[1]))  # type: ignore[arg-type, return-value]
