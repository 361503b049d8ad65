"""What a call costs, by subject, measured in rounds that take turns.

Machines drift: a neighbour wakes, a clock slows. So each round measures every subject once, ratios are taken
within a round, and what is reported is the median over rounds.

Who comes before a subject matters as well: with one fixed order, the same Loom measured twice differed by 6 % in
calls to a mesh of 8. So each turn has an order of its own, drawn by a seed. And two starts of the same Loom differ
by up to 5 % for as long as they run. So each round starts its subjects anew.
"""

from __future__ import annotations

import enum
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from tests.benchmarks.caller_process import CallerProcess

__all__ = ["DEFAULT_SUBJECTS", "SUBJECTS", "Figures", "Measured", "Plan", "Subject", "SubjectName", "measure"]


PAYLOADS = ("bytes", "array")

PIPELINES = ("one", "many", "mesh")
"""What pipelined calls go to: one actor, many in turn, or all actors of a mesh; see `caller.MeshCaller`."""

CROWDS = PIPELINES[1:]


class SubjectName(str, enum.Enum):
    RAW_ASYNCIO = "raw-asyncio"
    RAW_SYNC = "raw-sync"
    NATIVE = "native"
    NATIVE_TUNED = "native-tuned"
    LOOM = "loom"
    LOOM_HTTP = "loom-http"
    LOOM_BEFORE = "loom-before"
    RAY = "ray"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Subject:
    """A way to call, and the module that knows how."""

    name: SubjectName
    title: str
    module: str
    arguments: tuple[str, ...] = ()
    python: str | None = None
    """The interpreter; this one if None."""

    payloads: tuple[str, ...] = PAYLOADS
    """What its echo can carry."""

    pipelines: tuple[str, ...] = PIPELINES
    """What its pipelined calls can go to."""


SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject(
            SubjectName.RAW_ASYNCIO,
            "raw echo, asyncio",
            "tests.benchmarks.raw_caller",
            ("asyncio",),
            payloads=("bytes",),
            pipelines=("one",),
        ),
        Subject(
            SubjectName.RAW_SYNC,
            "raw echo, sync",
            "tests.benchmarks.raw_caller",
            ("sync",),
            payloads=("bytes",),
            pipelines=("one",),
        ),
        Subject(SubjectName.NATIVE, "native Monarch", "tests.benchmarks.native_caller"),
        Subject(SubjectName.NATIVE_TUNED, "native, Loom's settings", "tests.benchmarks.native_caller", ("tuned",)),
        Subject(SubjectName.LOOM, "Loom", "tests.benchmarks.loom_caller"),
        Subject(SubjectName.LOOM_HTTP, "Loom over HTTP", "tests.benchmarks.loom_caller", ("http",)),
    )
}

ORDERS = random.Random(8)
"""Shuffles the order of each turn; the same in every run."""

DEFAULT_SUBJECTS = (SubjectName.RAW_ASYNCIO, SubjectName.RAW_SYNC, SubjectName.NATIVE, SubjectName.LOOM)


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    rounds: int = 5
    turns: int = 5
    """Times that the subjects take turns with small calls in a round, so that seconds of drift hit all of them."""

    one_calls: int = 200
    """Calls a turn, each after the reply to the last."""

    pipelined: int = 1000
    """Calls a turn, issued without waiting."""

    pipelined_turns: int = 15
    """Turns with these: how many there are in a second differs more from one to the next."""

    pipelined_mesh: int = 250
    """Calls a turn to the mesh; each is a call to every actor of it."""

    echo_size: int = 64 * 2**20
    """Bytes."""

    echoes: int = 3
    """Echoes a round of each payload."""

    warm_up_calls: int = 300
    idle_seconds: float = 1.0
    """For how long all subjects' CPU time is watched while none is called."""


@dataclass(frozen=True)
class Figures:
    """What one subject did in one round."""

    p50_ms: float
    p99_ms: float
    """Of one call at a time."""

    pipelined_per_s: Mapping[str, float]
    """Calls a second, by what they go to (`PIPELINES`)."""
    pipelined_cpu_ms: float
    """CPU time of a pipelined call to one actor, summed over all processes of the subject."""

    echo_s: Mapping[str, float]
    """Median seconds of an echo, by payload."""


@dataclass(frozen=True)
class Measured:
    """All rounds of one run."""

    plan: Plan
    subjects: tuple[Subject, ...]
    rounds: tuple[Mapping[SubjectName, Figures], ...]
    idle_cpu: Mapping[SubjectName, float] = field(default_factory=dict)
    """Share of a core that the subject uses while nobody calls it."""

    def median(self, subject: SubjectName, figure: Callable[[Figures], float]) -> float:
        return statistics.median(figure(figures[subject]) for figures in self.rounds)


def measure(subjects: Sequence[Subject], plan: Plan, say: Callable[[str], object] = lambda text: None) -> Measured:
    """Set all subjects up in each round, warm them, and measure them in turns.

    Args:
        subjects: in the order in which a round takes them.
        plan: how much to measure.
        say: is told what is going on.

    Raises:
        CallerError: a subject could not be set up, or failed.
    """
    rounds, idle_cpu = [], []
    for number in range(1, plan.rounds + 1):
        say(f"round {number} of {plan.rounds}")
        with _callers(subjects, say) as callers:
            for subject in subjects:
                _warm_up(callers[subject.name], subject, plan)
            idle_cpu.append(_idle_cpu(callers, plan.idle_seconds))
            rounds.append(_measure_round(callers, subjects, plan))
    crowds = _measure_crowds(subjects, plan, say)
    together = tuple(
        {
            name: replace(figures, pipelined_per_s={**figures.pipelined_per_s, **crowd.get(name, {})})
            for name, figures in one.items()
        }
        for one, crowd in zip(rounds, crowds, strict=True)
    )
    idle = {subject.name: statistics.median(one[subject.name] for one in idle_cpu) for subject in subjects}
    return Measured(plan, tuple(subjects), together, idle)


@contextmanager
def _callers(
    subjects: Sequence[Subject], say: Callable[[str], object], *more: str
) -> Iterator[dict[SubjectName, CallerProcess]]:
    """The process of each subject, ready to call, with more arguments of its command line."""
    with ExitStack() as stack:
        say("starting " + ", ".join(subject.name for subject in subjects))
        callers = {
            subject.name: stack.enter_context(
                CallerProcess(subject.name, subject.module, (*subject.arguments, *more), subject.python)
            )
            for subject in subjects
        }
        for caller in callers.values():
            caller.await_ready()
        yield callers


def _measure_crowds(
    subjects: Sequence[Subject], plan: Plan, say: Callable[[str], object]
) -> list[dict[SubjectName, dict[str, float]]]:
    """Pipelined calls to many actors and to a mesh, in each round: in processes of their own, after all else.

    So many actors take CPU time while nobody calls them, which would slow the other figures.
    """
    crowded = [subject for subject in subjects if len(subject.pipelines) > 1]
    if not crowded:
        return [{} for _ in range(plan.rounds)]
    rounds = []
    for number in range(1, plan.rounds + 1):
        say(f"round {number} of {plan.rounds}, many actors")
        with _callers(crowded, say, "crowd") as callers:
            for subject in crowded:
                for pipeline in CROWDS:
                    _pipelined(callers[subject.name], pipeline, plan.warm_up_calls)
            measured = _measure_pipelined(callers, CROWDS, plan)
        rounds.append({name: {to: measured[to][name].per_s for to in CROWDS} for name in measured[CROWDS[0]]})
    return rounds


def _measure_pipelined(
    callers: Mapping[SubjectName, CallerProcess], pipelines: Sequence[str], plan: Plan
) -> dict[str, dict[SubjectName, _Pipelined]]:
    pipelined = {pipeline: {name: _Pipelined() for name in callers} for pipeline in pipelines}
    for pipeline, by_subject in pipelined.items():
        count = plan.pipelined_mesh if pipeline == "mesh" else plan.pipelined
        for _ in range(plan.pipelined_turns):
            for name in _shuffled(by_subject):
                by_subject[name].add(callers[name], pipeline, count)
    return pipelined


def _warm_up(caller: CallerProcess, subject: Subject, plan: Plan) -> None:
    caller.ask("one_call", count=plan.warm_up_calls)
    _pipelined(caller, "one", plan.warm_up_calls)
    for payload in subject.payloads:
        caller.ask("echo", payload=payload, size=plan.echo_size, count=1)


def _idle_cpu(callers: Mapping[SubjectName, CallerProcess], seconds: float) -> dict[SubjectName, float]:
    before = {name: caller.cpu_seconds() for name, caller in callers.items()}
    time.sleep(seconds)
    return {name: (caller.cpu_seconds() - before[name]) / seconds for name, caller in callers.items()}


def _measure_round(
    callers: Mapping[SubjectName, CallerProcess], subjects: Sequence[Subject], plan: Plan
) -> dict[SubjectName, Figures]:
    # One kind of call after the other, and for each all subjects in turns: what is compared is close in time.
    one_calls: dict[SubjectName, list[float]] = {name: [] for name in callers}
    for _ in range(plan.turns):
        for name in _shuffled(callers):
            one_calls[name] += callers[name].ask("one_call", count=plan.one_calls)
    for latencies in one_calls.values():
        latencies.sort()
    pipelined = _measure_pipelined(callers, ("one",), plan)["one"]
    echoes: dict[SubjectName, dict[str, float]] = {name: {} for name in callers}
    for payload in PAYLOADS:
        able = [subject.name for subject in subjects if payload in subject.payloads]
        seconds: dict[SubjectName, list[float]] = {name: [] for name in able}
        for _ in range(plan.echoes):
            for name in _shuffled(able):
                seconds[name] += callers[name].ask("echo", payload=payload, size=plan.echo_size, count=1)
        for name in able:
            echoes[name][payload] = statistics.median(seconds[name])
    return {
        name: Figures(
            p50_ms=statistics.median(one_calls[name]) * 1e3,
            p99_ms=one_calls[name][len(one_calls[name]) * 99 // 100] * 1e3,
            pipelined_per_s={"one": pipelined[name].per_s},
            pipelined_cpu_ms=pipelined[name].cpu_ms,
            echo_s=echoes[name],
        )
        for name in callers
    }


def _shuffled(names: Iterable[SubjectName]) -> list[SubjectName]:
    among = list(names)
    return ORDERS.sample(among, len(among))


def _pipelined(caller: CallerProcess, pipeline: str, count: int) -> float:
    return float(caller.ask("pipelined" if pipeline == "one" else f"pipelined_{pipeline}", count=count))


@dataclass
class _Pipelined:
    """The pipelined calls of a round, over its turns."""

    calls: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    def add(self, caller: CallerProcess, pipeline: str, count: int) -> None:
        cpu = caller.cpu_seconds()
        self.seconds += _pipelined(caller, pipeline, count)
        self.cpu_seconds += caller.cpu_seconds() - cpu
        self.calls += count

    @property
    def per_s(self) -> float:
        return self.calls / self.seconds

    @property
    def cpu_ms(self) -> float:
        return self.cpu_seconds / self.calls * 1e3
