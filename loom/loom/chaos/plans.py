"""Plans of faults: which fault strikes which target, when and for how long, and the expectations.

In Python a plan is a `Plan`; `read_plan` reads one from YAML, whose mistakes are reported with line and column, or
from a Python file with a ``plan``. pydantic refuses invalid plans.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from loom.chaos.durations import parse_rate, parse_time
from loom.chaos.targets import Target
from loom.control.fault_kinds import FaultKind, check_duration, check_params, fault_kind
from loom.errors import BadPlan, LoomError, WrongArguments, describe_error
from loom.extras import require

require({"pydantic": "pydantic", "yaml": "pyyaml"}, "a plan of faults", "chaos")

import yaml  # noqa: E402
from pydantic import (  # noqa: E402
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.dataclasses import dataclass  # noqa: E402

__all__ = ["Mark", "Plan", "PlannedFault", "Target", "When", "read_plan"]


class ExpectationKind(str, Enum):
    """The kind of an expectation."""

    RECOVERS = "recovers within"
    """The training recovers within this time after each fault."""
    DETECTED = "detected within"
    """Each fault is detected within this time."""
    STEPS_LOST = "steps lost at most"
    """Each fault loses at most this many steps."""
    LOST_ONCE = "no step lost twice"
    FALLS = "falls"
    RISES = "rises"
    AT_LEAST = "at least"
    AT_MOST = "at most"
    FINITE = "is finite"
    AGREE = "replicas agree"
    """Replicas that reported the hash of their parameters for the same step reported the same hash."""
    GOODPUT = "goodput at least"


OF_FAULTS = (ExpectationKind.RECOVERS, ExpectationKind.DETECTED, ExpectationKind.STEPS_LOST)
"""Expectations that a single fault may have; in a plan, they hold for each of its faults."""

_NUMBER = r"(?P<number>[-+]?\d+(\.\d+)?(e[-+]?\d+)?)\s*(?P<percent>%)?"
_METRIC = r"(?P<metric>[A-Za-z][\w./-]*)"

_FORMS = (
    ("recovers within 20 s", r"recovers? within (?P<time>.+)", ExpectationKind.RECOVERS),
    ("detected within 1 s", r"(is )?detected within (?P<time>.+)", ExpectationKind.DETECTED),
    ("at most 5 steps lost", rf"at most {_NUMBER} steps? lost", ExpectationKind.STEPS_LOST),
    ("steps lost at most 5", rf"steps lost at most {_NUMBER}", ExpectationKind.STEPS_LOST),
    ("no step lost twice", r"no step (is )?(lost|applied) twice", ExpectationKind.LOST_ONCE),
    ("replicas agree", r"(all )?replicas agree", ExpectationKind.AGREE),
    ("goodput at least 85 %", rf"goodput (is )?at least {_NUMBER}", ExpectationKind.GOODPUT),
    ("loss falls", rf"{_METRIC} falls", ExpectationKind.FALLS),
    ("accuracy rises", rf"{_METRIC} rises", ExpectationKind.RISES),
    ("loss is finite", rf"{_METRIC} is finite", ExpectationKind.FINITE),
    ("accuracy at least 0.97", rf"{_METRIC} (is )?at least {_NUMBER}", ExpectationKind.AT_LEAST),
    ("loss at most 0.2", rf"{_METRIC} (is )?at most {_NUMBER}", ExpectationKind.AT_MOST),
)

FORMS = tuple(example for example, _, _ in _FORMS)  # an example of each form


@dataclass(frozen=True)
class Expectation:
    """An expectation. ``value`` is in seconds, steps, or the unit of the metric."""

    text: str
    kind: ExpectationKind
    metric: str = ""
    value: float = 0.0

    @property
    def of_faults(self) -> bool:
        """True if the expectation is about single faults."""
        return self.kind in OF_FAULTS


def parse_expectation(value: Any) -> Expectation:
    """Parse an expectation."""
    if isinstance(value, Expectation):
        return value
    text = " ".join(value.split()) if isinstance(value, str) else ""
    for _, form, kind in _FORMS:
        if (match := re.fullmatch(form, text)) is not None:
            found = match.groupdict()
            number = parse_time(found["time"]) if found.get("time") else float(found.get("number") or 0.0)
            if found.get("percent"):
                number /= 100
            return Expectation(text, kind, found.get("metric") or "", number)
    raise WrongArguments(f"{value!r:.80} is nothing that can be expected: write such as {'; '.join(FORMS)}")


RECOVERED = "recovered"  # the event of the recovery from the fault before; all other events are the weaver's

V = TypeVar("V")

_CONFIG = ConfigDict(extra="forbid", populate_by_name=True, validate_default=True)


class Mark(NamedTuple):
    """A position in a file; lines and columns begin with 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


NOWHERE = Mark("plan", 0, 0)


def _raising_value_errors(check: Callable[..., V]) -> Callable[..., V]:
    """Return a function that raises `WrongArguments` as ValueError, for which pydantic reports the place."""

    @functools.wraps(check)
    def checked(*given: Any) -> V:
        try:
            return check(*given)
        except WrongArguments as error:
            raise ValueError(str(error)) from error

    return checked


def _check_expected(expected: Expectation) -> Expectation:
    if not expected.of_faults:
        raise ValueError(f"{expected.text!r} is about the whole run: expect it of the plan, not of a fault")
    return expected


def _check_target(target: Target) -> Target:
    if target.random is not None and target.random < 1:
        raise ValueError(f"random is how many are chosen, at least 1, and not {target.random}")
    if target.rank is not None and target.rank < 0:
        raise ValueError(f"a rank is not negative, and not {target.rank}")
    return target


def _named(target: Any) -> Any:
    return {"replica": target} if isinstance(target, str) else target


Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(strict=True, ge=0)]
Seconds = Annotated[float, BeforeValidator(_raising_value_errors(parse_time))]
Rate = Annotated[float, BeforeValidator(_raising_value_errors(parse_rate))]
Expected = Annotated[Expectation, BeforeValidator(_raising_value_errors(parse_expectation))]


@dataclass(frozen=True, config=_CONFIG)
class When:
    """The moment of a fault: one of ``step``, ``time``, ``event`` and ``rate``."""

    step: Count | None = None
    """The step that a targeted replica has to reach."""
    time: Seconds | None = None
    """Seconds after the beginning of the run."""
    event: Text | None = None
    """The kind of a weaver's event since the fault before, or `RECOVERED`."""
    after: Seconds = 0.0
    """Seconds after the event."""
    rate: Rate | None = None
    """Faults per second, at random."""
    times: Annotated[int, Field(strict=True, ge=1, le=10_000)] = 1
    """The number of faults, with a rate."""

    @model_validator(mode="after")
    def _check(self) -> When:
        given = [name for name in ("step", "time", "event", "rate") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"a fault strikes at a step, a time, an event or a rate, and not {given or 'never'}")
        if self.times > 1 and self.rate is None:
            raise ValueError("times is how often a fault with a rate strikes")
        if self.after and self.event is None:
            raise ValueError("after is the time after an event")
        return self

    def __str__(self) -> str:
        if self.step is not None:
            return f"step {self.step}"
        if self.time is not None:
            return f"{self.time:g} s"
        if self.event is not None:
            return self.event + (f" + {self.after:g} s" if self.after else "")
        return f"{self.times} times by chance"


@dataclass(frozen=True, config=_CONFIG)
class PlannedFault:
    """A fault of a plan."""

    fault: str
    when: When
    target: Annotated[Target, BeforeValidator(_named), AfterValidator(_check_target)] = Target()
    duration: float | None = Field(default=None, validation_alias="for")
    """Seconds; None: the default of the fault's kind."""
    params: Mapping[str, Any] = Field(default={}, validation_alias="with")
    expect: tuple[Annotated[Expected, AfterValidator(_check_expected)], ...] = ()
    mark: Mark = NOWHERE

    @field_validator("fault", mode="before")
    @classmethod
    def _check_fault(cls, fault: Any) -> str:
        return _raising_value_errors(fault_kind)(fault).name

    @field_validator("duration", mode="before")
    @classmethod
    def _check_duration(cls, duration: Any, before: ValidationInfo) -> float | None:
        if "fault" not in before.data:  # the name of the fault was refused
            return None
        seconds = None if duration is None else _raising_value_errors(parse_time)(duration)
        return _raising_value_errors(check_duration)(fault_kind(before.data["fault"]), seconds)

    @field_validator("params", mode="before")
    @classmethod
    def _check_params(cls, params: Any, before: ValidationInfo) -> Mapping[str, Any]:
        if "fault" not in before.data:
            return {}
        return _raising_value_errors(check_params)(fault_kind(before.data["fault"]), params)

    @property
    def kind(self) -> FaultKind:
        return fault_kind(self.fault)


@dataclass(frozen=True, config=_CONFIG)
class Plan:
    """Faults, and the expectations of the run."""

    faults: tuple[PlannedFault, ...]
    seed: Count = 0
    name: Text = "plan"
    expect: tuple[Expected, ...] = ()
    watch: Text = "*"
    """The replicas that the expectations are about: a glob over ids and groups."""
    until: Literal["recovered", "finished"] = "recovered"
    """The end of the run: all faults are ``recovered`` from, or all replicas have ``finished``."""
    settle: Seconds = 2.0
    """Seconds that the run goes on after the last recovery."""
    recovery: Seconds = 60.0
    """Seconds after which the run stops waiting for a recovery."""
    within: Seconds = 3600.0
    """Seconds that the whole run may take."""
    text: str = ""
    """The text of the plan as written."""

    @field_validator("faults")
    @classmethod
    def _check_faults(cls, faults: tuple[PlannedFault, ...]) -> tuple[PlannedFault, ...]:
        if not faults:
            raise ValueError("a plan has at least one fault")
        if faults[0].when.event == RECOVERED:
            raise ValueError("the first fault cannot strike once the one before is recovered from: it is the first")
        return faults

    def problem(self, fault: PlannedFault, error: LoomError | str) -> BadPlan:
        """Return the error for an impossible fault."""
        return BadPlan(f"{fault.mark}: {fault.fault}: {error}")


Place = tuple[int | str, ...]
"""The names and numbers that lead to a value in a plan."""

_MOST = 50_000
"""Values of a plan."""

_PARTS = {
    "": ("a plan", Plan),
    "faults": ("a fault", PlannedFault),
    "when": ("when", When),
    "target": ("a target", Target),
}
"""The parts that have names and values, by the name under which each stands."""

_WRITTEN = {"duration": "for", "params": "with", "mark": "", "text": ""}
"""Fields that a file has under another name, or not at all."""


def read_plan(path: str | Path) -> Plan:
    """Read a plan from a file: YAML, or Python if the name ends with ``.py``.

    Raises:
        BadPlan: the file cannot be read or makes no sense; the text begins with file, line and column.
    """
    path = Path(path)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadPlan(f"{path}:1:1: the plan cannot be read: {error}") from error
    return _from_python(path, text) if path.suffix == ".py" else parse_plan(text, str(path))


def parse_plan(text: str, file: str = "plan") -> Plan:
    """Parse a plan from YAML.

    Raises:
        BadPlan: the text is no plan; the error begins with file, line and column.
    """
    source = _Source(file)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        written = None if root is None else source.read(root)
    except yaml.MarkedYAMLError as error:
        raise BadPlan(f"{source.mark(error.problem_mark)}: this is no YAML: {error.problem}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise BadPlan(f"{Mark(file, 1, 1)}: this is no YAML: {error}") from error
    if written is None:
        raise BadPlan(f"{Mark(file, 1, 1)}: the plan is empty: it has at least `faults:`")
    if isinstance(written, dict):
        written = {"name": Path(file).stem, **written, "text": text}
        for number, fault in enumerate(written.get("faults", ())):
            if isinstance(fault, dict):
                fault["mark"] = source.values["faults", number]
    try:
        return TypeAdapter(Plan).validate_python(written)
    except ValidationError as error:
        raise source.problem(error) from error


class _Source:
    """A YAML file: its values, and the positions of the values and their names."""

    def __init__(self, file: str) -> None:
        self._file = file
        self.values: dict[Place, Mark] = {}
        self._names: dict[Place, Mark] = {}
        self._read = 0

    def mark(self, at: yaml.Mark | None) -> Mark:
        return Mark(self._file, at.line + 1, at.column + 1) if at else Mark(self._file, 1, 1)

    def read(self, node: yaml.Node, place: Place = ()) -> Any:
        """Return a node as plain data."""
        self._read += 1
        if self._read > _MOST:  # names of YAML may stand for more than the text has
            raise BadPlan(f"{self.mark(node.start_mark)}: the plan has more than {_MOST} values")
        self.values[place] = self.mark(node.start_mark)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(one, (*place, number)) for number, one in enumerate(node.value)]
        if place[-1:] in (("faults",), ("expect",)):  # a single one may stand without a list
            return [self.read(node, (*place, 0))]
        if not isinstance(node, yaml.MappingNode):
            return self._plain(node)
        values: dict[Any, Any] = {}
        for key, value in node.value:
            name, mark = self._plain(key), self.mark(key.start_mark)
            if name in values:
                raise BadPlan(f"{mark}: {name} is there twice")
            within = (*place, name)
            self._names[within] = mark
            values[name] = self.read(value, within)
        return values

    def _plain(self, node: yaml.Node) -> Any:
        try:
            return yaml.SafeLoader("").construct_document(node)
        except (yaml.YAMLError, ValueError) as error:
            raise BadPlan(f"{self.mark(node.start_mark)}: {error}") from error

    def problem(self, error: ValidationError) -> BadPlan:
        """Return the first mistake in the file; an unknown name comes before everything else."""

        def order(one: Any) -> tuple[bool, Mark]:
            return one["type"] != "unexpected_keyword_argument", self._nearest(one["loc"])

        found = min(error.errors(), key=order)
        place = found["loc"]
        what, part = _PARTS[next((name for name in reversed(place[:-1]) if name in _PARTS), "")]
        match found["type"]:
            case "unexpected_keyword_argument":
                known = [_WRITTEN.get(field.name, field.name) for field in dataclasses.fields(part)]
                text = f"{what} has no {place[-1]!r:.80}; it has {', '.join(filter(None, known))}"
                return BadPlan(f"{self._names[place]}: {text}")
            case "missing":
                return BadPlan(f"{self._nearest(place)}: {what} needs `{place[-1]}:`")
        return BadPlan(f"{self._nearest(place)}: {_text(found)}")

    def _nearest(self, place: Place) -> Mark:
        """Return the position of a value, or of the part that lacks it."""
        return self.values.get(place) or self._nearest(place[:-1])


def _text(found: Any) -> str:
    """Return the description of a mistake, in Loom's words or pydantic's."""
    if found["type"] == "value_error":
        return str(found["ctx"]["error"])
    return f"{found['msg']}, not {found['input']!r:.80}"


def _from_python(path: Path, text: str) -> Plan:
    try:
        names = runpy.run_path(str(path))
    except SyntaxError as error:
        mark = Mark(str(path), error.lineno or 1, error.offset or 1)
        raise BadPlan(f"{mark}: this is no Python: {error.msg}") from error
    except ValidationError as error:
        raise BadPlan(f"{_where(path, error)}: {_text(error.errors()[0])}") from error
    except Exception as error:
        raise BadPlan(f"{_where(path, error)}: {describe_error(error)}") from error
    plan = names.get("plan")
    if not isinstance(plan, Plan):
        raise BadPlan(f"{Mark(str(path), 1, 1)}: the file has no `plan`, a loom.chaos.Plan")
    return dataclasses.replace(plan, text=text)


def _where(path: Path, error: Exception) -> Mark:
    """Return the position in a file that an error came from."""
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    if not ours:
        return Mark(str(path), 1, 1)
    column = getattr(ours[-1], "colno", None) if sys.version_info >= (3, 11) else None
    return Mark(str(path), ours[-1].lineno or 1, (column or 0) + 1)
