"""Finds events in blocks of lines: the log lines of `loom.tracing.lines`, and JSON lines of `loom.tracing`.

Most lines are no event, and most events are written as `format_line` writes them. One regular expression, made
from the table of forms, finds those in a block at once. If it finds only the beginning of an event,
`parse_line` reads the line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import compress
from math import isfinite
from typing import Any

from loom.rl.diagnosis.evidence import COLOURS, Evidence, Problem, Problems, readable
from loom.rl.diagnosis.sources import Block
from loom.tracing.lines import FORMS, Field, LineForm, parse_line

Columns = list[Sequence[Any]]
"""The events of a name: their positions in the block, their trace ids, and their `KEPT` fields.

A field that an event lacks is None. A number may be text.
"""

_UNUSED = ("url", "path", "step", "target_step", "target_batch")
"""Fields that are unused, except the barrier's."""
KEPT = {
    name: [each for each in form.fields if name == "barrier" or each.name not in _UNUSED] or [form.fields[0]]
    for name, form in FORMS.items()
}
"""The fields of each event that are taken from its lines: one or more."""

_BEGINNING = (
    r"\[(?:weights|ckpt|gen|rollout|train)\][^\n]*|\bStep \d+ (?:begins|complete)[^\n]*|\bHit async barrier[^\n]*"
)
"""The beginning of an event's line, up to its end."""
_CUT = re.compile(r"^\[\w+\](?:\[[^\]\s]*\]?)? *(?:[a-z]+\.[a-z.]*[^a-z.=]*(?:\w+=.*)?)?$")
"""A line with the beginning of an event's, and with no other words."""


@dataclass
class EventBlock:
    """The events of a block, by name, and their order."""

    file: str
    block: Block
    columns: dict[str, Columns] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    """The names of all events, in the order of their lines."""
    times: dict[int, float] = field(default_factory=dict)
    """Times of events by position, in seconds, as far as their lines say them for all hosts alike."""

    positions: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in FORMS})
    rows: dict[str, list[tuple[Any, ...]]] = field(default_factory=lambda: {name: [] for name in FORMS})
    """The trace id and the fields of each event, until `finish` makes columns of them."""
    _counted: tuple[int, int] = (0, 0)
    """A position, and the number of line ends before it."""

    def line_at(self, position: int) -> tuple[int, bytes]:
        """Return the number of the line at a position, and the line. Positions that ascend are quickest."""
        data = self.block.data
        begin = data.rfind(b"\n", 0, position) + 1
        end = data.find(b"\n", position)
        at, ends = self._counted if self._counted[0] <= begin else (0, 0)
        ends += data.count(b"\n", at, begin)
        self._counted = (begin, ends)
        return self.block.line + ends, data[begin : end if end >= 0 else None]

    def add(self, name: str, position: int, row: tuple[Any, ...]) -> None:
        self.order.append(name)
        self.positions[name].append(position)
        self.rows[name].append(row)

    def finish(self) -> None:
        """Make columns of the events; none is added after that."""
        names = [name for name in FORMS if self.positions[name]]
        for name in sorted(names, key=lambda name: self.positions[name][0]):
            self.columns[name] = [self.positions[name], *zip(*self.rows[name], strict=True)]
        self.rows.clear()

    def keep(self, name: str, good: list[bool]) -> None:
        """Take out the events of a name that are not good."""
        self.columns[name] = [list(compress(column, good)) for column in self.columns[name]]
        each = iter(good)
        self.order = [one for one in self.order if one != name or next(each)]

    def evidence(self, name: str, index: int) -> Evidence:
        """Return the line of an event, by its index among the events of its name."""
        positions, traces, *_ = self.columns[name]
        number, line = self.line_at(positions[index])
        return Evidence(self.file, number, readable(line), as_text(traces[index]))


class Scanner:
    """Finds events, and names broken lines.

    Args:
        problems: where broken lines go.
    """

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self.async_level: int | None = None
        """The level that the last line of the orchestrator's progress says."""

    def scan(self, file: str, block: Block) -> tuple[EventBlock, EventBlock]:
        """Return a block's (events of log lines, events of JSON lines)."""
        if b"\x1b" in block.data:
            block = Block(COLOURS.sub(b"", block.data), block.line)
        lines, records = EventBlock(file, block), EventBlock(file, block)
        pattern, heads = _pattern()
        take = {
            last: (name, groups, lines.positions[name].append, lines.rows[name].append)
            for last, (name, groups) in heads.items()
        }
        for match in pattern.finditer(block.data):
            if (found := take.get(match.lastindex)) is not None:
                name, groups, place, add = found
                lines.order.append(name)
                place(match.start())
                add(match.group(*groups))
            elif match["json"] is not None:
                self._json(match[0], match.start(), lines, records)
            elif (level := match["level"]) is not None:
                self.async_level = int(level)
            else:
                self._parse(match[0], match.start(), lines)
        lines.finish()
        records.finish()
        return lines, records

    def broken(self, batch: EventBlock, position: int, why: str) -> None:
        """Name a line as broken."""
        self._problems.add(lambda: problem(batch, position, why))

    def _parse(self, text: bytes, position: int, lines: EventBlock) -> None:
        said = text.decode(errors="replace").rstrip("\r")
        try:
            line = parse_line(said)
        except ValueError as error:
            return self.broken(lines, position, str(error))
        if line is not None:
            given = (line.fields.get(each.name) for each in KEPT[line.name])
            lines.add(line.name, position, (line.trace, *given))
        elif _CUT.match(said):
            self.broken(lines, position, "no such event, or a line that was cut off")

    def _json(self, text: bytes, position: int, lines: EventBlock, records: EventBlock) -> None:
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            if text.startswith(b'{"name"'):
                self.broken(records, position, "this is no JSON")
            return
        if not isinstance(record, dict):
            return
        if isinstance(said := record.get("text"), str):  # a line of `loom logs --json`
            for found in re.finditer(_BEGINNING, COLOURS.sub(b"", said.encode()).decode()):
                self._parse(found[0].encode(), position, lines)
            return
        name = record.get("name")
        if not isinstance(name, str) or name not in FORMS:
            return
        for each in FORMS[name].fields:
            value = record.get(each.name)
            if each.digits is not None and not is_number(value) and (each.required or value is not None):
                why = f"without {each.name}" if value is None else f"with {each.name}={value!r:.40}"
                return self.broken(records, position, f"{name} {why}")
        time = record.get("t")
        if isinstance(time, (int, float)):
            records.times[position] = float(time)
        records.add(name, position, (record.get("trace"), *(record.get(each.name) for each in KEPT[name])))


def problem(batch: EventBlock, position: int, why: str) -> Problem:
    """Return the fault of a line."""
    number, line = batch.line_at(position)
    return Problem(batch.file, number, why, readable(line))


def is_own(data: bytes) -> bool:
    """Return whether lines have events of Loom's own pipeline, or of the seed's."""
    return any(text in data for text in _OWN)


_OWN = (
    b"[gen] batch.",
    b"[ckpt] w",
    b"[train] ",
    b"[rollout] trunc_pct",
    b"client.done wall_ms",
    b"complete (wall=",
    b'{"name":',
)


def is_number(value: object) -> bool:
    """Return whether a value of JSON is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)


def as_text(value: object) -> str | None:
    """Return a text that may be bytes, or None if it is missing; ``-`` stands for a missing one."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    return None if text is None or text == "-" else str(text)


@cache
def _pattern() -> tuple[re.Pattern[bytes], dict[int | None, tuple[str, tuple[int, ...]]]]:
    """Return the expression, and by the number of its last group the name of an event and the groups of its row.

    Each alternative begins with a literal character, for which Python's expressions look quickly. For speed also no
    group begins before a literal, what may be missing is an alternative and not a repetition, and sets have no
    classes such as that of all spaces.
    """
    heads: dict[int | None, tuple[str, tuple[int, ...]]] = {}
    tagged: dict[str, list[str]] = {}
    sentences: list[str] = []
    group = 1  # the trace id's, which has to come first
    for name, form in sorted(FORMS.items(), key=lambda each: _place(each[1])):
        groups = range(group + 2, group + 2 + len(KEPT[name]))
        heads[group + 1] = (name, (1, *groups))
        group += 1 + len(groups)
        if form.sentence:
            sentences.append(_sentence(name, form))
        else:
            tagged.setdefault(_tag(form), []).append(_fields(name, form))
    tags = [f"{tag}{_TRACE if tag == _WEIGHTS else ''} *(?:{'|'.join(events)})" for tag, events in tagged.items()]
    other = [
        rf"(?:{'|'.join(tagged)})[^\n]*)",
        *sentences,
        r"S(?<=\bS)tep \d+ (?:begins|complete)[^\n]*",
        r"H(?<=\bH)it async barrier[^\n]*",
        r"progress\.step=\d+, *ckpt_step=\d+, *async_level=(?P<level>\d+)",
        r"\{(?<=^\{)(?P<json>[^\n]*)",
    ]
    text = rf"\[(?:{'|'.join(tags)}|{'|'.join(other)}"
    return re.compile(text.encode(), re.MULTILINE), heads


_WEIGHTS = r"weights\]"
_TRACE = r"\[([A-Za-z0-9_.-]+)\]"
_BETWEEN = r"(?:\ |\)?\ +\(?)"
"""The text before a field: most often one space."""
_END = r"(?=\n|\)?[ \t]*\r?$)"


def _place(form: LineForm) -> tuple[bool, bool, str]:
    """Return what orders the forms: those with a trace id, those with another tag, and sentences."""
    return bool(form.sentence), _tag(form) != _WEIGHTS, _tag(form)


def _tag(form: LineForm) -> str:
    return re.escape(form.head[1:].partition("]")[0]) + r"\]"


def _sentence(name: str, form: LineForm) -> str:
    assert form.sentence is not None
    text = re.escape(form.sentence[1:])
    for each in form.fields:
        text = text.replace(rf"\{{{each.name}\}}", _value(name, each))
    first = form.sentence[0]
    return rf"{first}(?<=\b{first})({text}{_END})"


def _fields(name: str, form: LineForm) -> str:
    fields = ""
    for each in form.fields:
        part = f"{_BETWEEN}{each.name}={_value(name, each)}"
        fields += part if each.required else f"(?:{part}|)"
    return f"{re.escape(form.head.removeprefix('[weights][ID]').rpartition(']')[2].strip())}({fields}{_END})"


def _value(name: str, each: Field) -> str:
    text = (
        r"[^ \t\n\r\f\v\"()]+" if each.digits is None else "-?[0-9]+" if each.digits == 0 else r"-?[0-9]+\.?[0-9]*"
    )
    return f"({text})" if each in KEPT[name] else text
