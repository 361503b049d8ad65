"""Reading plans: YAML, whose mistakes are found with line and column; or Python, which has a ``plan``."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from loom.chaos.faults import FaultKind, check_duration, check_fault, fault_kind
from loom.chaos.plans.durations import parse_rate, parse_time
from loom.chaos.plans.expectations import Expectation, parse_expectation
from loom.chaos.plans.plan import Mark, Plan, PlannedFault, Target, When
from loom.errors import BadPlan, LoomError
from loom.extras import require

__all__ = ["parse_plan", "read_plan"]

V = TypeVar("V")

_OF_PLAN = ("name", "seed", "faults", "expect", "watch", "until", "settle", "recovery", "within")
_OF_FAULT = ("fault", "when", "target", "for", "with", "expect")


def read_plan(path: str | Path) -> Plan:
    """Read a plan from a file: YAML, or Python where the name ends with ``.py``.

    Raises:
        BadPlan: it cannot be read or makes no sense; the text begins with file, line and column.
        MissingDependency: PyYAML is not installed.
    """
    path = Path(path)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadPlan(f"{path}:1:1: the plan cannot be read: {error}") from error
    return _from_python(path, text) if path.suffix == ".py" else parse_plan(text, str(path))


def parse_plan(text: str, file: str = "plan") -> Plan:
    """Read a plan from YAML.

    Raises:
        BadPlan: it is none; the text begins with file, line and column.
        MissingDependency: PyYAML is not installed.
    """
    require({"yaml": "pyyaml"}, "a plan in YAML", "chaos")
    import yaml

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise BadPlan(f"{Mark(file, line, column)}: this is no YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise BadPlan(f"{Mark(file, 1, 1)}: this is no YAML: {error}") from error
    if root is None:
        raise BadPlan(f"{Mark(file, 1, 1)}: the plan is empty: it has at least `faults:`")
    return _Reader(file).plan(root, text)


class _Node:
    """A value with its place."""

    def __init__(self, reader: _Reader, node: Any) -> None:
        self._reader = reader
        self.node = node
        self.mark = Mark(reader.file, node.start_mark.line + 1, node.start_mark.column + 1)

    @property
    def value(self) -> Any:
        """As plain data."""
        return self._reader.construct(self.node)

    def fields(self, what: str, known: tuple[str, ...], needed: tuple[str, ...] = ()) -> dict[str, _Node]:
        """The values of a mapping, by their names."""
        import yaml

        if not isinstance(self.node, yaml.MappingNode):
            raise self.bad(f"{what} has names and values: {', '.join(known)}; this is {self.value!r:.80}")
        found: dict[str, _Node] = {}
        for key, value in self.node.value:
            name = _Node(self._reader, key)
            if name.value not in known:
                raise name.bad(f"{what} has no {name.value!r:.80}; it has {', '.join(known)}")
            if name.value in found:
                raise name.bad(f"{name.value} is there twice")
            found[name.value] = _Node(self._reader, value)
        for one in needed:
            if one not in found:
                raise self.bad(f"{what} needs `{one}:`")
        return found

    def items(self) -> Iterator[_Node]:
        """The values of a list; the value itself where it is none."""
        import yaml

        values = self.node.value if isinstance(self.node, yaml.SequenceNode) else [self.node]
        return (_Node(self._reader, value) for value in values)

    def read(self, parse: Callable[[Any], V]) -> V:
        """What a function makes of the value; its errors are told with the place."""
        try:
            return parse(self.value)
        except BadPlan:
            raise
        except LoomError as error:
            raise self.bad(str(error)) from error

    def bad(self, text: str) -> BadPlan:
        return BadPlan(f"{self.mark}: {text}")


class _Reader:
    def __init__(self, file: str) -> None:
        self.file = file

    def construct(self, node: Any) -> Any:
        import yaml

        loader = yaml.SafeLoader("")
        try:
            return loader.construct_document(node)
        except (yaml.YAMLError, ValueError) as error:
            mark = Mark(self.file, node.start_mark.line + 1, node.start_mark.column + 1)
            raise BadPlan(f"{mark}: {error}") from error

    def plan(self, root: Any, text: str) -> Plan:
        whole = _Node(self, root)
        fields = whole.fields("a plan", _OF_PLAN, ("faults",))
        given: dict[str, Any] = {"text": text}
        for name, parse in _PLAN_VALUES.items():
            if name in fields:
                given[name] = fields[name].read(parse)
        given["faults"] = tuple(self.fault(one) for one in fields["faults"].items())
        given["expect"] = tuple(self.expectations(fields.get("expect")))
        given.setdefault("name", Path(self.file).stem)
        return whole.read(lambda _: Plan(**given))

    def fault(self, node: _Node) -> PlannedFault:
        fields = node.fields("a fault", _OF_FAULT, ("fault", "when"))
        kind: FaultKind = fields["fault"].read(fault_kind)
        duration = None
        if "for" in fields:
            duration = fields["for"].read(lambda value: check_duration(kind, parse_time(value)))
        params = (
            fields["with"].read(lambda value: check_fault(kind.name, value, None)[1]) if "with" in fields else {}
        )
        when = self.when(fields["when"])
        target = self.target(fields["target"]) if "target" in fields else Target()
        expect = tuple(self.expectations(fields.get("expect"), of_fault=True))
        return node.read(lambda _: PlannedFault(kind.name, when, target, duration, params, expect, node.mark))

    def when(self, node: _Node) -> When:
        fields = node.fields("when", ("step", "time", "event", "after", "rate", "times"))
        given = {name: fields[name].read(parse) for name, parse in _WHEN_VALUES.items() if name in fields}
        return node.read(lambda _: When(**given))

    def target(self, node: _Node) -> Target:
        if isinstance(node.value, str):  # a glob of replicas
            return Target(replica=node.value)
        fields = node.fields("a target", ("replica", "mesh", "rank", "host", "session", "random"))
        given = {name: fields[name].read(parse) for name, parse in _TARGET_VALUES.items() if name in fields}
        return node.read(lambda _: Target(**given))

    def expectations(self, node: _Node | None, of_fault: bool = False) -> Iterator[Expectation]:
        for one in node.items() if node is not None else ():
            found = one.read(parse_expectation)
            if of_fault and not found.of_faults:
                raise one.bad(f"{found.text!r} is about the whole run: expect it of the plan, not of a fault")
            yield found


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise BadPlanValue(f"{value!r:.80} is no whole number")
    if value < 0:
        raise BadPlanValue(f"it is not negative, and not {value}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise BadPlanValue(f"{value!r:.80} is no text")
    return value


class BadPlanValue(LoomError):
    """A value of the wrong type, which `_Node.read` tells with its place."""


_PLAN_VALUES: dict[str, Callable[[Any], Any]] = {
    "name": _text, "seed": _whole, "watch": _text, "until": _text, "settle": parse_time, "recovery": parse_time,
    "within": parse_time,
}  # fmt: skip
_WHEN_VALUES: dict[str, Callable[[Any], Any]] = {
    "step": _whole, "time": parse_time, "event": _text, "after": parse_time, "rate": parse_rate, "times": _whole,
}  # fmt: skip
_TARGET_VALUES: dict[str, Callable[[Any], Any]] = {
    "replica": _text, "mesh": _text, "rank": _whole, "host": _text, "session": _text, "random": _whole,
}  # fmt: skip


# -- Python ---------------------------------------------------------------------------------------------------


def _from_python(path: Path, text: str) -> Plan:
    try:
        names = runpy.run_path(str(path))
    except SyntaxError as error:
        mark = Mark(str(path), error.lineno or 1, error.offset or 1)
        raise BadPlan(f"{mark}: this is no Python: {error.msg}") from error
    except Exception as error:
        raise BadPlan(f"{_where(path, error)}: {type(error).__name__}: {error}") from error
    plan = names.get("plan")
    if not isinstance(plan, Plan):
        raise BadPlan(f"{Mark(str(path), 1, 1)}: the file has no `plan`, a loom.chaos.plans.Plan")
    object.__setattr__(plan, "text", text)
    return plan


def _where(path: Path, error: Exception) -> Mark:
    """Where in a file an error came from."""
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    if not ours:
        return Mark(str(path), 1, 1)
    column = getattr(ours[-1], "colno", None) if sys.version_info >= (3, 11) else None
    return Mark(str(path), ours[-1].lineno or 1, (column or 0) + 1)
