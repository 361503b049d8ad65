"""Reading plans: from YAML, whose mistakes are reported with line and column, or from Python with a ``plan``."""

from __future__ import annotations

import dataclasses
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from loom.chaos.plans.plan import Mark, Plan, PlannedFault, When
from loom.chaos.targets import Target
from loom.errors import BadPlan, describe_error

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
