"""What a method call of a remote object costs beside an endpoint call, in one session.

Both run the same addition in a process of their own, and take turns in small blocks, so that drift hits both.
``python -m tests.benchmarks.methods`` is the caller's process.
"""

# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from tests.benchmarks.budgets import BudgetReport, Figure
from tests.benchmarks.caller import seconds_each, serve
from tests.benchmarks.caller_process import CallerProcess
from tests.benchmarks.counter import counter_class
from tests.benchmarks.machine import describe_machine
from tests.benchmarks.report import Ratio

__all__ = ["MethodPlan", "measure"]

BUDGET = 1.1
"""How many times an endpoint call's latency a method call's may be."""

SUBJECTS = ("endpoint", "method")


@dataclass(frozen=True)
class MethodPlan:
    """How much is measured."""

    rounds: int = 5
    calls: int = 1000
    """Calls of each kind in a round, each after the reply to the last."""

    block: int = 20
    """Calls of one kind before it is the other's turn."""

    warm_up_calls: int = 300


def measure(plan: MethodPlan, command: str, say: Callable[[str], object]) -> BudgetReport:
    """Measure both in turns.

    Raises:
        CallerError: the caller failed.
    """
    medians: dict[str, list[float]] = {subject: [] for subject in SUBJECTS}
    with CallerProcess("Loom", "tests.benchmarks.methods") as caller:
        say("starting")
        caller.await_ready()
        for subject in SUBJECTS:
            caller.ask(subject, count=plan.warm_up_calls)
        for number in range(1, plan.rounds + 1):
            say(f"round {number} of {plan.rounds}")
            seconds: dict[str, list[float]] = {subject: [] for subject in SUBJECTS}
            for turn in range(plan.calls // plan.block):
                # Each goes first as often as the other.
                for subject in SUBJECTS[:: 1 if turn % 2 == 0 else -1]:
                    seconds[subject] += caller.ask(subject, count=plan.block)
            for subject in SUBJECTS:
                medians[subject].append(statistics.median(seconds[subject]))
    pairs = zip(medians["method"], medians["endpoint"], strict=True)
    ratio = Ratio(
        name="one method call, p50",
        formula="method / endpoint",
        bound="at most",
        budget=BUDGET,
        by_round=tuple(method / endpoint for method, endpoint in pairs),
    )
    figures = tuple(
        Figure(f"one {subject} call, p50", "ms", tuple(1e3 * each for each in medians[subject]))
        for subject in SUBJECTS
    )
    return BudgetReport("methods", command, describe_machine(), asdict(plan), (ratio,), figures)


class MethodCaller:
    """Makes both kinds of call."""

    def __init__(
        self, endpoint: Callable[[int], Any], method: Callable[[int], Any], close: Callable[[], None]
    ) -> None:
        self._endpoint = endpoint
        self._method = method
        self.close = close

    def endpoint(self, count: int) -> list[float]:
        return seconds_each(lambda: self._endpoint(1), count)

    def method(self, count: int) -> list[float]:
        return seconds_each(lambda: self._method(1), count)


def make_caller() -> MethodCaller:
    import loom
    from loom import Actor, endpoint

    class Plain:
        def __init__(self) -> None:
            self.number = 0

        def add(self, amount: int) -> int:
            self.number += amount
            return self.number

    job = loom.local(hosts=1)
    procs = job.hosts.slice(hosts=0).spawn_procs(name="procs")
    counter = procs.spawn("counters", counter_class(Actor, endpoint))
    remote = loom.cls(Plain).to(job)
    return MethodCaller(lambda amount: counter.add.call_one(amount).get(), remote.add, job.close)


if __name__ == "__main__":
    serve(make_caller)  # type: ignore[arg-type]
