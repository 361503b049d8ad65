"""A plan of faults: what strikes whom, when and for how long, and what has to hold.

In Python a plan is a `Plan`; `loom.chaos.plans.files` reads one from YAML, or from a Python file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from loom.chaos.faults import FaultKind, check_fault, fault_kind
from loom.chaos.plans.expectations import Expectation, parse_expectation
from loom.errors import BadPlan, LoomError, WrongArguments

__all__ = ["Mark", "Plan", "PlannedFault", "Target", "When"]

RECOVERED = "recovered"
"""The event that the fault before has been recovered from; all others are the weaver's."""


class Mark(NamedTuple):
    """Where something stands in a file; lines and columns begin with 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


NOWHERE = Mark("plan", 0, 0)


@dataclass(frozen=True)
class When:
    """When a fault strikes: one of ``step``, ``time``, ``event`` and ``rate``.

    Raises:
        WrongArguments: none of them is given, or several, or something is negative.
    """

    step: int | None = None
    """Once a replica that is struck has reached it."""
    time: float | None = None
    """Seconds after the run has begun."""
    event: str | None = None
    """Once the weaver has logged an event of this kind since the fault before; or `RECOVERED`."""
    after: float = 0.0
    """Seconds after the event."""
    rate: float | None = None
    """So often a second, by chance."""
    times: int = 1
    """How often, with a rate."""

    def __post_init__(self) -> None:
        given = [name for name in ("step", "time", "event", "rate") if getattr(self, name) is not None]
        if len(given) != 1:
            raise WrongArguments(
                f"a fault strikes at a step, a time, an event or a rate, and not {given or 'never'}"
            )
        if min(self.step or 0, self.time or 0.0, self.after) < 0:
            raise WrongArguments("a fault does not strike before the beginning: a step and a time are not negative")
        if self.rate is not None and self.rate <= 0:
            raise WrongArguments(f"a rate is more than none, and not {self.rate!r}")
        if not 1 <= self.times <= 10_000 or (self.times > 1 and self.rate is None):
            raise WrongArguments("times is how often a fault with a rate strikes: from 1 to 10000")
        if self.after and self.event is None:
            raise WrongArguments("after is the time after an event")

    def __str__(self) -> str:
        if self.step is not None:
            return f"step {self.step}"
        if self.time is not None:
            return f"{self.time:g} s"
        if self.event is not None:
            return self.event + (f" + {self.after:g} s" if self.after else "")
        return f"{self.times} times by chance"


@dataclass(frozen=True)
class Target:
    """Whom a fault strikes: living replicas for which all holds that is given."""

    replica: str | None = None
    """An id, a short name, or a glob."""
    mesh: str | None = None
    """The name of the proc mesh, which is the group of its replicas; or a glob."""
    rank: int | None = None
    """In the mesh."""
    host: str | None = None
    """The name of the host, or a glob."""
    session: str | None = None
    random: int | None = None
    """How many of them, chosen by the plan's seed; None: all."""

    def __post_init__(self) -> None:
        if self.random is not None and self.random < 1:
            raise WrongArguments(f"random is how many are chosen, at least 1, and not {self.random}")
        if self.rank is not None and self.rank < 0:
            raise WrongArguments(f"a rank is not negative, and not {self.rank}")

    def __str__(self) -> str:
        names = ("replica", "mesh", "rank", "host", "session")
        said = [f"{name} {value}" for name in names if (value := getattr(self, name)) is not None]
        chosen = [] if self.random is None else [f"{self.random} at random"]
        return ", ".join(chosen + said) or "all"


@dataclass(frozen=True)
class PlannedFault:
    """A fault of a plan.

    Raises:
        WrongArguments: there is no such fault, it has no such parameters, or it lasts no such time.
    """

    fault: str
    when: When
    target: Target = field(default_factory=Target)
    duration: float | None = None
    """Seconds; None: as long as its kind lasts."""
    params: Mapping[str, Any] = field(default_factory=dict)
    expect: tuple[Expectation, ...] = ()
    mark: Mark = NOWHERE

    def __post_init__(self) -> None:
        _, params, duration = check_fault(self.fault, dict(self.params), self.duration)
        object.__setattr__(self, "params", params)
        object.__setattr__(self, "duration", duration)
        object.__setattr__(self, "expect", tuple(map(_expectation, self.expect)))
        for one in self.expect:
            if not one.of_faults:
                raise WrongArguments(f"{one.text!r} is about the whole run: expect it of the plan, not of a fault")

    @property
    def kind(self) -> FaultKind:
        return fault_kind(self.fault)


@dataclass(frozen=True)
class Plan:
    """Faults, and what has to hold.

    Raises:
        WrongArguments: something makes no sense.
    """

    faults: tuple[PlannedFault, ...]
    seed: int = 0
    name: str = "plan"
    expect: tuple[Expectation, ...] = ()
    watch: str = "*"
    """The replicas that the expectations are about: a glob over ids and groups."""
    until: str = "recovered"
    """When the run ends: once all faults are ``recovered`` from, or all replicas have ``finished``."""
    settle: float = 2.0
    """Seconds that it goes on after the last recovery."""
    recovery: float = 60.0
    """Seconds after which a fault that was not recovered from is given up."""
    within: float = 3600.0
    """Seconds that all of it may take."""
    text: str = ""
    """As it was written."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "faults", tuple(self.faults))
        object.__setattr__(self, "expect", tuple(map(_expectation, self.expect)))
        if not self.faults:
            raise WrongArguments("a plan has at least one fault")
        if self.until not in ("recovered", "finished"):
            raise WrongArguments(f"until is recovered or finished, and not {self.until!r:.80}")
        if self.faults[0].when.event == RECOVERED:
            raise WrongArguments(
                "the first fault cannot strike once the one before is recovered from: it is the first"
            )

    def problem(self, fault: PlannedFault, error: LoomError | str) -> BadPlan:
        """The error for a fault that cannot be."""
        return BadPlan(f"{fault.mark}: {fault.fault}: {error}")


def _expectation(value: Any) -> Expectation:
    return value if isinstance(value, Expectation) else parse_expectation(value)
