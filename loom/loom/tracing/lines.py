r"""The log lines of events, such as ``[ckpt] write.done step=3 write_ms=234.5``: one table formats and parses them.

A line may stand behind a prefix (a time, a component's name), and have terminal colours and brackets around its
fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from math import isfinite
from typing import NamedTuple

from loom.terminal_text import without_styles
from loom.tracing.trace_ids import checked_trace


class Field(NamedTuple):
    """A field of a line: ``step=3``."""

    name: str
    digits: int | None = None
    """Digits behind the point; 0 for an integer, None for a text."""
    required: bool = True
    """True if a line without it is broken."""


class LineForm(NamedTuple):
    """The form of an event's line: a head and ``name=value`` fields, or a sentence of its own."""

    head: str
    """The beginning of the line; ``[ID]`` in it is the trace id."""
    fields: tuple[Field, ...]
    sentence: str | None = None
    """The whole line with ``{field}`` in it, if it is no head and fields."""


class EventLine(NamedTuple):
    """A parsed log line."""

    name: str
    trace: str | None
    fields: dict[str, str | int | float]


def _weights(what: str, *fields: Field) -> LineForm:
    return LineForm(f"[weights][ID] {what}", fields)


_T = Field("t", 3, required=False)
_OP = Field("op", required=False)
_PATH = Field("path", required=False)
_RPC, _STEP, _RANK, _DUR, _WAIT = (
    Field("rpc_ms", 1),
    Field("step", 0),
    Field("rank", 0),
    Field("dur_ms", 1),
    Field("wait_ms", 1),
)
_INFLIGHT, _CKPT = Field("inflight", 0), Field("ckpt_step", 0)

FORMS: dict[str, LineForm] = {
    "weights.client.send": _weights("client.send", Field("url", required=False), _PATH, _T),
    "weights.server.recv": _weights("server.recv", _PATH, _T),
    "weights.rpc.start": _weights("rpc.start", _OP, _T),
    "weights.rpc.done": _weights("rpc.done", _OP, _T, _RPC),
    "weights.client.done": _weights(
        "client.done", Field("wall_ms", 1), _RPC, Field("queue_ms", 1), Field("pool_ms", 1, required=False)
    ),
    "ckpt.write.done": LineForm("[ckpt] write.done", (_STEP, Field("write_ms", 1))),
    "ckpt.wait.start": LineForm("[ckpt] wait.start", (Field("target_step", 0),)),
    "ckpt.wait.done": LineForm("[ckpt] wait.done", (Field("target_step", 0), _WAIT)),
    "gen.batch.start": LineForm("[gen] batch.start", (_INFLIGHT, Field("target_batch", 0))),
    "gen.batch.done": LineForm("[gen] batch.done", (Field("completions", 0), _DUR, _INFLIGHT)),
    "gen.idle": LineForm("[gen] idle", (_WAIT,)),
    "rollout": LineForm(
        "[rollout]", (Field("trunc_pct", 1), Field("current_step", 0), _CKPT, Field("staleness", 0))
    ),
    "train.step.done": LineForm("[train] step.done", (_STEP, _RANK, _DUR)),
    "train.batch.wait": LineForm("[train] batch.wait", (_STEP, _RANK, _WAIT)),
    "step.begin": LineForm("Step", (_STEP,), "Step {step} begins"),
    "step.complete": LineForm("Step", (_STEP, Field("wall", 3)), "Step {step} complete (wall={wall}s)"),
    "barrier": LineForm(
        "Hit async barrier",
        (_STEP, _CKPT, Field("async_level", 0)),
        "Hit async barrier ({step}-{ckpt_step} > {async_level})",
    ),
}
"""The form of the line of each event that has one, by the event's name."""


def format_line(name: str, trace: object, fields: Mapping[str, object]) -> str | None:
    """Return the log line of an event, or None if its name has none. Fields of other names are left out."""
    form = FORMS.get(name)
    if form is None:
        return None
    if form.sentence:
        return form.sentence.format_map(
            {field.name: _text(fields.get(field.name, "?"), field) for field in form.fields}
        )
    text = form.head.replace("[ID]", f"[{trace or '-'}]")
    for field in form.fields:
        value = fields.get(field.name)
        if value is not None:
            text += f" {field.name}={_text(value, field)}"
    return text


def parse_line(text: str) -> EventLine | None:
    """Return what a log line says, or None if it is not one of these.

    Fields that the table does not know are kept as text.

    Raises:
        ValueError: the line begins as one of these, but a field is missing or is no number.
    """
    found = _heads().search(text := without_styles(text))
    if found is None:
        return None
    trace, weights, other, sentence = found.groups()
    if sentence:
        return _parse_sentence(text[found.start() :])
    if weights:
        name = f"weights.{weights}"
        if trace != "-" and checked_trace(trace) is None:
            raise ValueError(f"{name} with the trace id {trace[:40]!r}")
    else:
        name = _names()[" ".join(other.split())]
    values: dict[str, str | int | float] = {}
    kinds = {field.name: field for field in FORMS[name].fields}
    for key, value in _FIELD.findall(text, found.end()):
        values[key] = _value(kinds.get(key), value, name)
    for field in FORMS[name].fields:
        if field.required and field.name not in values:
            raise ValueError(f"{name} without {field.name}")
    return EventLine(name, None if trace == "-" else trace, values)


def _text(value: object, field: Field) -> str:
    if field.digits is None:
        text = str(value)
        # Quoted if its text would end the field or the line, or would be taken for the text behind the field.
        return text if is_plain(text) else json.dumps(text)
    try:
        return _NUMBER[field.digits](float(value))  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return "?"


def _value(field: Field | None, text: str, name: str) -> str | int | float:
    if text[0] == '"':
        try:
            text = str(json.loads(text))
        except ValueError:
            raise ValueError(f"{name} with {text[:40]!r}") from None
    else:
        text = text.rstrip(",;")
        if text.count(")") > text.count("("):
            text = text.rstrip(")")
    if field is None or field.digits is None:
        return text
    try:
        value = float(text) if field.digits else int(text)
        if isfinite(value):
            return value
    except (ValueError, OverflowError):
        pass
    raise ValueError(f"{name} with {field.name}={text[:40]!r}")


def _parse_sentence(text: str) -> EventLine:
    for name, pattern in _sentences():
        if match := pattern.match(text):
            fields = FORMS[name].fields
            return EventLine(name, None, {f.name: _value(f, match[f.name], name) for f in fields})
    raise ValueError(f"other words than expected in {text[:40]!r}")


_NUMBER = tuple(f"{{:.{digits}f}}".format for digits in range(4))
is_plain = re.compile(r'[^\s"\x00-\x1f\x7f]*[^\s"\x00-\x1f\x7f,;)]').fullmatch
"""Say whether a text stands in a line as it is."""
_FIELD = re.compile(r'\(?\b([A-Za-z_]\w*)=("(?:[^"\\]|\\.)*"|[^\s"]+)')


@cache
def _names() -> dict[str, str]:
    return {form.head: name for name, form in FORMS.items() if not form.sentence}


@cache
def _heads() -> re.Pattern[str]:
    """Return the beginning of any line. The trace id is matched loosely, so that a damaged one is noticed."""
    weights = "|".join(re.escape(head.removeprefix("[weights][ID] ")) for head in _names() if "[ID]" in head)
    others = "|".join(re.escape(head).replace(r"\ ", r"\s+") for head in _names() if "[ID]" not in head)
    return re.compile(
        rf"\[weights\]\[([^\]\s]*)\]\s+({weights})(?![\w.])"
        rf"|({others})(?![\w.])"
        r"|(\bStep(?= \d+ (?:begins|complete))|Hit async barrier)"
    )


@cache
def _sentences() -> list[tuple[str, re.Pattern[str]]]:
    patterns = []
    for name, form in FORMS.items():
        if form.sentence:
            pattern = re.escape(form.sentence)
            for field in form.fields:
                number = r"-?\d+" if field.digits == 0 else r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?"
                pattern = pattern.replace(rf"\{{{field.name}\}}", rf"(?P<{field.name}>{number})")
            patterns.append((name, re.compile(pattern)))
    return patterns
