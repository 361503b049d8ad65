"""Small calls while a large argument moves over a narrow line: with a connection for bulk, and with one for all.

The line is `tests.support.network.narrow_proxy`: each of its connections has a queue of its own, as in the kernels
and proxies on the way; where all share one queue, as in a router without fair queueing, a second connection does
not help. Both subjects run in processes of their own, ``python -m tests.benchmarks.lanes two``, and take turns.
"""

# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

import loom
from loom import Actor, endpoint
from tests.benchmarks.caller import serve
from tests.benchmarks.caller_process import CallerProcess
from tests.benchmarks.machine import Machine, describe_machine
from tests.benchmarks.report import Ratio, percentile
from tests.support.network.narrow_proxy import NarrowProxy

__all__ = ["LanesFigures", "LanesPlan", "measure"]

RATE, QUEUE = 4 << 20, 2 << 20
"""Bytes a second that the line carries, and bytes that a connection queues each way."""

PACE = 0.05
"""Seconds between the small calls while the argument moves, however long each takes."""

SUBJECTS = {"two": "two connections", "one": "one connection"}


@dataclass(frozen=True)
class LanesPlan:
    """How much is measured."""

    rounds: int = 3
    size: int = 32 << 20
    """Bytes of the argument."""
    idle_calls: int = 200
    """Small calls a round while nothing moves."""


@dataclass(frozen=True)
class LanesFigures:
    """What was measured: seconds of each small call of each round, by subject."""

    command: str
    machine: Machine
    plan: LanesPlan
    idle_s: Sequence[Mapping[str, Sequence[float]]]
    busy_s: Sequence[Mapping[str, Sequence[float]]]

    @property
    def ratios(self) -> list[Ratio]:
        """What a small call takes with two connections in what it takes with one, while the argument moves."""
        return [
            Ratio(
                f"small call, p{percent}",
                "two connections / one",
                "at most",
                0.5,
                tuple(percentile(one["two"], percent) / percentile(one["one"], percent) for one in self.busy_s),
            )
            for percent in (50, 99)
        ]

    @property
    def within_budgets(self) -> bool:
        return all(ratio.met for ratio in self.ratios)

    def as_json(self) -> dict[str, Any]:
        return {
            "benchmark": "lanes",
            "command": self.command,
            "machine": asdict(self.machine),
            "plan": asdict(self.plan),
            "rounds": [
                {
                    subject: {
                        f"{name}_p{percent}_ms": percentile(found[subject], percent) * 1e3
                        for name, found in (("idle", idle), ("busy", busy))
                        for percent in (50, 99)
                    }
                    for subject in SUBJECTS
                }
                for idle, busy in zip(self.idle_s, self.busy_s, strict=True)
            ],
            "ratios": [ratio.as_json() for ratio in self.ratios],
            "within_budgets": self.within_budgets,
        }

    def as_table(self) -> RenderableType:
        title = (
            f"small calls over a line of {RATE >> 20} MiB/s while {self.plan.size >> 20} MiB move, "
            f"all of {len(self.busy_s)} round(s)"
        )
        table = Table("", "idle p50, ms", "idle p99", "moving p50, ms", "moving p99", "calls", title=title)
        for subject, name in SUBJECTS.items():
            idle, busy = (
                [each for one in rounds for each in one[subject]] for rounds in (self.idle_s, self.busy_s)
            )
            shown = [f"{percentile(of, percent) * 1e3:.1f}" for of in (idle, busy) for percent in (50, 99)]
            table.add_row(name, *shown, str(len(busy)))
        lines = [
            *(
                f"{ratio.name}: {ratio.median:.3f} ({ratio.formula}; {ratio.bound} {ratio.budget:g})"
                for ratio in self.ratios
            ),
            str(self.machine),
            self.command,
        ]
        return Group(table, *(Text(line, style="dim") for line in lines))


def measure(plan: LanesPlan, command: str, say: Callable[[str], object] = lambda text: None) -> LanesFigures:
    """Measure both subjects in turns.

    Raises:
        CallerError: one of them failed.
    """
    idle, busy = [], []
    with ExitStack() as stack:
        callers = {
            subject: stack.enter_context(CallerProcess(title, "tests.benchmarks.lanes", (subject,)))
            for subject, title in SUBJECTS.items()
        }
        for caller in callers.values():
            caller.await_ready()
            caller.ask("idle", count=plan.idle_calls // 3)  # to warm up
        for number in range(1, plan.rounds + 1):
            say(f"round {number} of {plan.rounds}")
            idle.append({name: caller.ask("idle", count=plan.idle_calls) for name, caller in callers.items()})
            busy.append({name: caller.ask("meanwhile", size=plan.size) for name, caller in callers.items()})
    return LanesFigures(command, describe_machine(), plan, idle, busy)


class Store(Actor):
    """Takes large arguments, and answers small calls."""

    @endpoint
    def take(self, value: bytes) -> int:
        return len(value)


class LanesCaller:
    """Calls two actors over the narrow line: one takes what is large, the other answers small calls."""

    def __init__(self) -> None:
        from loom_proxy.local import LocalCluster

        self._stack = ExitStack()
        cluster = self._stack.enter_context(LocalCluster(hosts=1))
        port = urlsplit(cluster.url).port
        assert port is not None
        proxy = self._stack.enter_context(NarrowProxy(port, RATE, QUEUE))
        job = self._stack.enter_context(loom.connect(f"ws://127.0.0.1:{proxy.port}", cluster.token))
        procs = job.hosts.spawn_procs(per_host={"gpus": 2}, name="procs")
        # Not slices of one mesh: what goes to one mesh keeps its order.
        self._large, self._small = (procs.slice(gpus=gpu).spawn(f"store{gpu}", Store) for gpu in (0, 1))
        for store in (self._large, self._small):
            store.take.call_one(b"").get()
        self.close = self._stack.close

    def idle(self, count: int) -> list[float]:
        """Seconds of ``count`` small calls, one after the other, while nothing else moves."""
        return [self._small_call() for _ in range(count)]

    def meanwhile(self, size: int) -> list[float]:
        """Seconds of small calls made every `PACE` seconds while an argument of ``size`` bytes is on its way."""
        moving = self._large.take.call_one(bytes(size))
        calls = []
        while not moving.done():
            call = self._small.take.call_one(b"")
            call.add_done_callback(lambda call: None)  # so that it leaves at once
            calls.append(call)
            time.sleep(PACE)
        for call in (moving, *calls):
            call.get()
        return [call.timing.wall_ms / 1e3 for call in calls]

    def _small_call(self) -> float:
        start = time.perf_counter()
        self._small.take.call_one(b"").get()
        return time.perf_counter() - start


if __name__ == "__main__":
    os.environ["LOOM_LANES"] = "2" if sys.argv[1] == "two" else "1"
    serve(LanesCaller)  # type: ignore[arg-type]
