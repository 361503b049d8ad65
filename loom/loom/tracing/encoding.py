"""The encoding of events as lines, by a function for each kind of event: a name, its fields, and their classes.

A program has few kinds of events, and many of each kind. A function in which the fields are written out makes a
line in two thirds of the time of a loop over them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from string import Formatter
from typing import Any

from loom.tracing.lines import FORMS, LineForm, is_plain

Lines = tuple[str, "str | None"]
"""The line of a file, in ASCII with its end, and that of a log, without one; None if the event has none."""
Encode = Callable[..., "Lines | None"]
"""It takes the first arguments of `encode` but for the name, and the fields' values."""

PLAIN = frozenset((int, float, str, bool, type(None)))
"""Immutable classes that `encode` writes as JSON."""
MOST = 1000
"""Kinds of events that have a function; others are encoded as any record is."""

quoted = json.encoder.encode_basestring_ascii
_made: dict[tuple[Any, ...], Encode] = {}
_GIVEN = {"_quoted": quoted, "_is_plain": is_plain, "_LARGEST": sys.float_info.max}


def encode(
    name: str, t: float, unix: float, who: str, trace: str | None, fields: Mapping[str, object], says: bool
) -> Lines | None:
    """Return the lines of an event; None if a value is no plain one, or if there are too many kinds.

    Args:
        name: the name of the event.
        t: seconds of the session's clock.
        unix: seconds since 1970.
        who: the members of a record that are the same in all records of a process, as JSON.
        trace: the trace id.
        fields: no key of a record is among them.
        says: whether a log line is wanted.
    """
    try:
        kind = (name, says, *fields, *map(type, fields.values()))
        made = _made.get(kind)
        if made is None:
            if len(_made) >= MOST:
                return None
            made = _made[kind] = _function(name, fields, FORMS.get(name) if says else None)
        return made(t, unix, who, trace, *fields.values())
    except (TypeError, ValueError, OverflowError):  # a name that is no text, or more digits than Python writes
        return None


def _function(name: str, fields: Mapping[str, object], form: LineForm | None) -> Encode:
    """Return what makes the lines of a kind of events, and gives None for numbers that JSON lacks.

    Its source has nothing that a program gives: names and keys are in its namespace.
    """
    if not all(value.__class__ in PLAIN for value in fields.values()):
        return lambda *_: None
    source = _Source()
    at = {key: f"v{place}" for place, key in enumerate(fields)}
    line = source.text(f'{{"name":{quoted(name)},"t":') + "{_t:.6f}" + source.text(',"time":') + "{_unix:.6f}"
    line += (
        source.text(",") + "{_who}" + source.text(',"trace":') + '{"null" if _trace is None else _quoted(_trace)}'
    )
    for key, value in fields.items():
        line += source.text(f",{quoted(key)}:")
        if value.__class__ is float:
            source.checks.append(f"-_LARGEST <= {at[key]} <= _LARGEST")
        line += _JSON[value.__class__].format(at[key])
    line += source.text("}\n")
    said = None
    if form is not None and (said := source.said(form, fields, at)) is None:
        return lambda *_: None
    return source.function([*at.values()], line, said)


_JSON = {
    float: "{{{}!r}}",
    int: "{{{}!r}}",
    str: "{{_quoted({})}}",
    bool: '{{"true" if {} else "false"}}',
    type(None): "null",
}
"""The expression in an f-string for a value of each class."""


class _Source:
    """The source of a function, and what it takes from its namespace."""

    def __init__(self) -> None:
        self.checks: list[str] = []
        self._names: dict[str, object] = dict(_GIVEN)

    def text(self, text: str) -> str:
        """Return what stands for a text in an f-string."""
        name = f"_text{len(self._names)}"
        self._names[name] = text
        return f"{{{name}}}"

    def said(self, form: LineForm, fields: Mapping[str, object], at: Mapping[str, str]) -> str | None:
        """Return the f-string of a log line; None if it needs more than these fields."""
        at = {"t": "_t", **at}
        parts = {}
        for field in form.fields:
            value = fields.get(field.name) if field.name != "t" else 0.0  # of the event itself
            if value is None:
                if form.sentence:
                    return None
                continue
            if (field.digits is None) != isinstance(value, str):
                return None
            if field.digits is None:
                self.checks.append(f"_is_plain({at[field.name]})")
            parts[field.name] = f"{{{at[field.name]}{'' if field.digits is None else f':.{field.digits}f'}}}"
        if form.sentence:
            words = Formatter().parse(form.sentence)
            return "".join(self.text(text) + (parts[name] if name else "") for text, name, *_ in words)
        before, trace, after = form.head.partition("[ID]")
        head = self.text(before) + ('[{_trace or "-"}]' + self.text(after) if trace else "")
        return head + "".join(self.text(f" {name}=") + part for name, part in parts.items())

    def function(self, values: Sequence[str], line: str, said: str | None) -> Encode:
        """Return the function of an event's times, process, trace and values."""
        lines = f"f'{line}', " + ("None" if said is None else f"f'{said}'")
        made = f"lambda {', '.join(['_t', '_unix', '_who', '_trace', *values])}: ({lines})"
        if self.checks:
            made += f" if {' and '.join(self.checks)} else None"
        found: Encode = eval(made, self._names)
        return found
