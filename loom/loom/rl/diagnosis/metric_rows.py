"""Rows of metrics in the logs of other frameworks: one reader for all of them, made from a framework's table."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from math import isfinite

from loom.rl.diagnosis.evidence import COLOURS
from loom.rl.diagnosis.frameworks import ENGINE_LINE, FRAMEWORKS, Framework, LineForms, WaitLine
from loom.rl.diagnosis.signals import Signal
from loom.rl.diagnosis.sources import Block

LONGEST_ROW = 1 << 16
"""Characters of a row that goes over several lines."""
_DATE_TIME = re.compile(r"(?<![\d-])(?:(\d{4})-)?(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:[.,](\d+))?")
_DAY_TIME = re.compile(r"(?:\([^)]*\) *)?\W{0,3}(\d\d):(\d\d):(\d\d)\b")
_UNITS = {"ms": 0.001, "m": 60.0, "h": 3600.0}
_DAY = 86_400.0


@dataclass(frozen=True)
class Moment:
    """A time by one kind of clock: those of two kinds cannot be compared."""

    clock: str
    """``unix``, ``year`` (since its beginning, in an unknown time zone), or ``day`` (without the date)."""
    seconds: float


@dataclass(frozen=True)
class MetricRow:
    """The metrics of one line, or of one record, by the names that the framework gives them."""

    file: str
    line: int
    step: int | None
    moment: Moment | None
    values: Mapping[str, float]


@dataclass(frozen=True)
class EngineLook:
    """The state of an engine, as its own log line says it."""

    file: str
    line: int
    moment: Moment | None
    values: Mapping[Signal, float]
    text: str


@dataclass(frozen=True)
class WaitSaid:
    """A line by which a side says that it waits."""

    file: str
    line: int
    moment: Moment | None
    wait: WaitLine
    text: str


@dataclass
class _Place:
    """The state of reading one source."""

    rows: int = 0
    moment: Moment | None = None
    open_row: tuple[LineForms, int | None, int, str] | None = None
    """The form, step, line and text of a row that goes on in the next block."""


@dataclass
class RowReader:
    """Finds rows, looks at engines and waits in blocks of lines."""

    framework: Framework
    ends: dict[str, Moment] = field(default_factory=dict)
    """The newest time in each source."""
    _places: dict[str, _Place] = field(default_factory=dict)

    def __post_init__(self) -> None:
        waits = [re.escape(each.text) for each in self.framework.waits]
        heads = [each.head for each in self.framework.lines]
        groups = [f"(?P<head{index}>{head.replace('?P<step>', '?:')})" for index, head in enumerate(heads)]
        groups += [f"(?P<wait{index}>{text})" for index, text in enumerate(waits)]
        other = [r"(?P<json>^[ \t]*\{)", r"(?P<engine>generation throughput: |Decode batch)"]
        self._pattern = re.compile("|".join([*groups, *other]).encode(), re.MULTILINE)

    def read(self, file: str, block: Block) -> Iterator[MetricRow | EngineLook | WaitSaid]:
        """Yield what a block has, in its order."""
        if b"\x1b" in block.data:
            block = Block(COLOURS.sub(b"", block.data), block.line)
        place = self._places.setdefault(file, _Place())
        data, counted, number, after = block.data, 0, block.line, 0
        if place.open_row is not None:
            form, step, line, text = place.open_row
            after = data.find(b"}") + 1 or len(data)
            yield from self._several(file, place, form, step, line, text + data[:after].decode(errors="replace"))
        for match in self._pattern.finditer(data):
            if match.start() < after:
                continue
            begin = data.rfind(b"\n", 0, match.start()) + 1
            end = data.find(b"\n", match.end())
            end = len(data) if end < 0 else end
            number += data.count(b"\n", counted, begin)
            counted, after = begin, end
            text = data[begin:end].decode(errors="replace").rstrip("\r")
            kind = match.lastgroup or ""
            if kind == "json":
                yield from self._json(file, place, number, text)
                continue
            place.moment = _moment(text, place.moment) or place.moment
            if kind == "engine":
                if (values := _engine(text)) is not None:
                    yield EngineLook(file, number, place.moment, values, text)
            elif kind.startswith("wait"):
                wait = self.framework.waits[int(kind.removeprefix("wait"))]
                yield WaitSaid(file, number, place.moment, wait, text)
            else:
                form = self.framework.lines[int(kind.removeprefix("head"))]
                yield from self._text(file, place, form, number, text, data[end : end + LONGEST_ROW])
        self._note_end(file, place, data)

    def _text(
        self, file: str, place: _Place, form: LineForms, number: int, text: str, rest: bytes
    ) -> Iterator[MetricRow]:
        head = re.search(form.head, text)
        assert head is not None
        step = int(head["step"]) if "step" in head.groupdict() else place.rows + 1 if form.counts else None
        behind = text[head.end() :] if form.several else text
        if form.several and "}" not in behind:
            closing = rest.find(b"}") + 1
            behind += "\n" + rest[: closing or len(rest)].decode(errors="replace")
        yield from self._several(file, place, form, step, number, behind)

    def _several(
        self, file: str, place: _Place, form: LineForms, step: int | None, line: int, text: str
    ) -> Iterator[MetricRow]:
        if form.several and "}" not in text and len(text) < LONGEST_ROW:
            place.open_row = form, step, line, text
            return
        place.open_row = None
        place.rows += 1
        yield MetricRow(file, line, step, place.moment, _items(form, text))

    def _json(
        self, file: str, place: _Place, number: int, text: str
    ) -> Iterator[MetricRow | EngineLook | WaitSaid]:
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            return
        if not isinstance(record, dict):
            return
        values = _numbers(record)
        time = next((values[key] for key in ("time", "_timestamp") if key in values), None)
        if time is not None:
            place.moment = Moment("unix", time)
        for key in ("text", "message"):  # a line of `loom logs --json`, or of a logger that writes JSON
            if isinstance(said := record.get(key), str):
                inner = f"{file} {key}"
                self._places.setdefault(inner, _Place()).moment = place.moment
                said = f"{record.get('timestamp', '')} {said}"
                yield from (replace(each, file=file) for each in self.read(inner, Block(said.encode(), number)))
                return
        step = next((int(values[key]) for key in self.framework.steps if key in values), None)
        place.rows += 1
        yield MetricRow(file, number, step, place.moment, values)

    def _note_end(self, file: str, place: _Place, data: bytes) -> None:
        tail = data[-4096:].decode(errors="replace").splitlines()
        found = next((moment for text in reversed(tail) if (moment := _moment(text, place.moment))), place.moment)
        if found is not None:
            self.ends[file] = found


def _items(form: LineForms, text: str) -> dict[str, float]:
    values: dict[str, float] = {}
    for item in re.finditer(form.item, text):
        value = float(item["value"])
        unit = item.groupdict().get("unit")
        if isfinite(value):
            values.setdefault(item["name"] or "Time", value * _UNITS.get(unit or "", 1.0))
    return values


def _numbers(record: Mapping[str, object]) -> dict[str, float]:
    inner = record.get("data")
    both = {**record, **inner} if isinstance(inner, dict) else record
    return {
        str(name): float(value)
        for name, value in both.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
    }


def _engine(text: str) -> dict[Signal, float] | None:
    found = ENGINE_LINE.search(text.encode())
    if found is None:
        return None
    groups = {name: float(value) for name, value in found.groupdict().items() if value is not None}
    named = {
        Signal.TOKENS: groups.get("vllm", groups.get("sglang")),
        Signal.RUNNING: groups.get("running", groups.get("sglang_running")),
        Signal.WAITING: groups.get("waiting", groups.get("queued")),
        Signal.PREEMPTIONS: groups.get("preemptions"),
        Signal.KV_CACHE: groups.get("cache", None if "usage" not in groups else 100 * groups["usage"]),
    }
    return {signal: value for signal, value in named.items() if value is not None}


def _moment(text: str, before: Moment | None) -> Moment | None:
    """Return the time at the beginning of a line, or None if it has none."""
    head = text[:160]
    if found := _DATE_TIME.search(head):
        year, month, day, hour, minute, second, fraction = found.groups()
        try:
            time = datetime(int(year or 2023), int(month), int(day), int(hour), int(minute), int(second))
        except ValueError:
            return None
        begin = datetime(time.year, 1, 1)
        return Moment("year", (time - begin).total_seconds() + float(f"0.{fraction or 0}"))
    if found := _DAY_TIME.match(head):
        hours, minutes, rest = map(float, found.groups())
        seconds = hours * 3600 + minutes * 60 + rest
        if before is not None and before.clock == "day":
            seconds += _DAY * round((before.seconds - seconds) / _DAY)  # over midnight
        return Moment("day", seconds)
    return None


def recognize(blocks: list[bytes], frameworks: tuple[Framework, ...] = FRAMEWORKS) -> dict[Framework, list[str]]:
    """Return the frameworks of which blocks have telling texts, the one with the most first, with these texts."""
    found = {
        one: [text for text in one.telling if any(text.encode() in block for block in blocks)] for one in frameworks
    }
    return dict(sorted(((one, texts) for one, texts in found.items() if texts), key=lambda each: -len(each[1])))
