"""How fast messages of one actor come to a receiver: natively, and through Loom to the laptop.

Rounds take turns, as in `tests.benchmarks.calls`. The receiver takes the messages one by one with
``receiver.recv().get()``. Each subject runs in a process of its own: ``python -m tests.benchmarks.ports native``.
"""

# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tests.benchmarks.caller import serve
from tests.benchmarks.caller_process import CallerProcess
from tests.benchmarks.machine import Machine, describe_machine

__all__ = ["BUDGET", "PortFigures", "PortPlan", "measure"]

BUDGET = 20_000
"""Messages a second that have to come to the laptop at least."""

SUBJECTS = {"native": "native Monarch", "loom": "Loom"}


@dataclass(frozen=True)
class PortPlan:
    """How much is measured."""

    rounds: int = 5
    messages: int = 10_000


@dataclass(frozen=True)
class PortFigures:
    """What was measured: messages a second, of each round."""

    command: str
    machine: Machine
    plan: PortPlan
    per_second: dict[str, tuple[float, ...]]

    def median(self, subject: str) -> float:
        return statistics.median(self.per_second[subject])

    @property
    def ratio(self) -> float:
        """Loom's rate in native Monarch's, the median over rounds."""
        pairs = zip(self.per_second["loom"], self.per_second["native"], strict=True)
        return statistics.median(loom / native for loom, native in pairs)

    @property
    def within_budgets(self) -> bool:
        return self.median("loom") >= BUDGET

    def as_json(self) -> dict[str, Any]:
        return {
            "benchmark": "ports",
            "command": self.command,
            "machine": asdict(self.machine),
            "plan": asdict(self.plan),
            "median_per_s": {subject: self.median(subject) for subject in SUBJECTS},
            "ratio": self.ratio,
            "budget_per_s": BUDGET,
            "within_budgets": self.within_budgets,
            "rounds": [dict(zip(SUBJECTS, rates, strict=True)) for rates in self._rounds()],
        }

    def _rounds(self) -> Sequence[tuple[float, ...]]:
        return list(zip(*(self.per_second[subject] for subject in SUBJECTS), strict=True))

    def as_table(self) -> RenderableType:
        table = Table(title=f"{self.plan.messages:,} messages of one actor to a receiver", title_justify="left")
        table.add_column("")
        for heading in ("median/s", "min", "max", "budget"):
            table.add_column(heading, justify="right")
        for subject, title in SUBJECTS.items():
            rates = self.per_second[subject]
            budget = Text("")
            if subject == "loom":
                style = "green" if self.within_budgets else "bold red"
                budget = Text(f"at least {BUDGET:,}", style=style)
            table.add_row(title, f"{self.median(subject):,.0f}", f"{min(rates):,.0f}", f"{max(rates):,.0f}", budget)
        lines = [f"{self.ratio:.2f} times native", str(self.machine), self.command]
        return Group(table, *(Text(line, style="dim") for line in lines))


def measure(plan: PortPlan, command: str, progress: Callable[[str], object]) -> PortFigures:
    """Measure both subjects in turns.

    Raises:
        CallerError: one of them failed.
    """
    rates: dict[str, list[float]] = {subject: [] for subject in SUBJECTS}
    with ExitStack() as stack:
        callers = {
            subject: stack.enter_context(CallerProcess(title, "tests.benchmarks.ports", (subject,)))
            for subject, title in SUBJECTS.items()
        }
        for caller in callers.values():
            caller.await_ready()
            caller.ask("receive", count=plan.messages // 10)  # to warm up
        for number in range(plan.rounds):
            # Each goes first as often as the other.
            for subject in list(SUBJECTS)[:: 1 if number % 2 == 0 else -1]:
                progress(f"round {number + 1} of {plan.rounds}: {SUBJECTS[subject]}")
                seconds = callers[subject].ask("receive", count=plan.messages)
                rates[subject].append(plan.messages / seconds)
    per_second = {subject: tuple(each) for subject, each in rates.items()}
    return PortFigures(command, describe_machine(), plan, per_second)


class PortCaller:
    """Has an actor send to a port, and receives; the same code for native Monarch and for Loom."""

    def __init__(
        self, send: Callable[[Any, int], Any], channel: tuple[Any, Any], close: Callable[[], None]
    ) -> None:
        self._send = send
        self._port, self._receiver = channel
        self.close = close

    def receive(self, count: int) -> float:
        """Seconds from asking an actor for ``count`` messages to the last of them."""
        receiver = self._receiver
        start = time.perf_counter()
        sent = self._send(self._port, count)
        numbers = [receiver.recv().get() for _ in range(count)]
        seconds = time.perf_counter() - start
        assert numbers == list(range(count)), "the messages did not come once each, in order"
        sent.get()
        return seconds


def _native() -> PortCaller:
    from loom_gateway.workers.monarch_env import set_monarch_environment
    from tests.benchmarks.native_procs import native_procs

    set_monarch_environment()
    from monarch.actor import Actor, Channel, endpoint

    class Sender(Actor):
        @endpoint
        def send(self, port: Any, count: int) -> None:
            for number in range(count):
                port.send(number)

    procs, close = native_procs(gpus=1)
    sender = procs.spawn("senders", Sender).slice(hosts=0, gpus=0)
    return PortCaller(sender.send.call_one, Channel.open(), close)


def _loom() -> PortCaller:
    import loom
    from loom import Actor, endpoint

    class Sender(Actor):
        @endpoint
        def send(self, port: Any, count: int) -> None:
            for number in range(count):
                port.send(number)

    job = loom.local(hosts=1)
    procs = job.hosts.spawn_procs(per_host={"gpus": 1}, name="procs")
    sender = procs.spawn("senders", Sender).slice(hosts=0, gpus=0)
    return PortCaller(sender.send.call_one, loom.Channel[int].open(), job.close)


if __name__ == "__main__":
    serve({"native": _native, "loom": _loom}[sys.argv[1]])  # type: ignore[arg-type]
