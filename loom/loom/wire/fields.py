"""Checks of values, a peer's and those to send, against the annotations of fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from loom.errors import ProtocolMismatch, WrongArguments
from loom.wire.plain import plain, shortened

Check = Callable[[Any], bool]


def _all_are(kind: type, values: Sequence[Any]) -> bool:
    return all(type(value) is kind for value in values)


def _is_sequence(value: Any) -> bool:
    return type(value) in (list, tuple)


def _is_map(value: Any) -> bool:
    return type(value) is dict and _all_are(str, list(value))


_FITS: dict[str, Check] = {
    "Any": lambda value: True,
    "int": lambda value: type(value) is int and value >= 0,
    "Id": lambda value: type(value) is int,
    "int | None": lambda value: value is None or (type(value) is int and value >= 0),
    "bool": lambda value: type(value) is bool,
    "float": lambda value: type(value) in (int, float) and value >= 0,
    "float | None": lambda value: value is None or (type(value) in (int, float) and value >= 0),
    "str": lambda value: type(value) is str,
    "str | None": lambda value: value is None or type(value) is str,
    "bytes": lambda value: type(value) is bytes,
    "Sequence[Any]": _is_sequence,
    "Sequence[Any] | None": lambda value: value is None or _is_sequence(value),
    "Sequence[int]": lambda value: _is_sequence(value) and _all_are(int, value),
    "Sequence[str]": lambda value: _is_sequence(value) and _all_are(str, value),
    "Mapping[str, Any]": _is_map,
    "Mapping[str, int]": lambda value: _is_map(value) and _all_are(int, list(value.values())),
    "Mapping[str, str]": lambda value: _is_map(value) and _all_are(str, list(value.values())),
    "Mapping[str, Sequence[int]]": lambda value: (
        _is_map(value) and all(_is_sequence(numbers) and _all_are(int, numbers) for numbers in value.values())
    ),
}
"""The check of a value, by the annotation of its field. An ``Id`` may be negative, an ``int`` may not."""


@cache
def _checks(cls: type) -> tuple[tuple[str, Check], ...]:
    return tuple((one.name, _FITS[str(one.type)]) for one in dataclasses.fields(cls))


def check_fields(body: Any, title: str) -> None:
    """Raise `ProtocolMismatch`, about ``title``, unless each field of a dataclass fits its annotation."""
    for name, fits in _checks(type(body)):  # type: ignore[arg-type]  # classes are hashable
        value = getattr(body, name)
        if not fits(value):
            raise ProtocolMismatch(f"not {title} of Loom's protocol: its {name} is {value!r:.40}")


def sendable_fields(body: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, by name, as a peer takes them: values that do not fit in their plain form.

    Raises:
        WrongArguments: a value has none that fits the annotation of its field. The peer would refuse the message,
            and with it the connection.
    """
    sendable = {}
    for one, (name, fits) in zip(dataclasses.fields(body), _checks(type(body)), strict=True):  # type: ignore[arg-type]  # as below
        value = getattr(body, name)
        if not fits(value):
            value = plain(value, name)
            if not fits(value):
                raise WrongArguments(f"{name}: {shortened(value)} is not {_WORDS[str(one.type)]}")
        sendable[name] = value
    return sendable


_WORDS = {
    "Any": "anything",
    "int": "a count of 0 or more",
    "Id": "an id",
    "int | None": "None or a count of 0 or more",
    "bool": "True or False",
    "float": "a number of 0 or more",
    "float | None": "None or a number of 0 or more",
    "str": "a text",
    "str | None": "a text or None",
    "bytes": "bytes",
    "Sequence[Any]": "a list",
    "Sequence[Any] | None": "a list or None",
    "Sequence[int]": "a list of integers",
    "Sequence[str]": "a list of texts",
    "Mapping[str, Any]": "a dict whose keys are texts",
    "Mapping[str, int]": "a dict of integers whose keys are texts",
    "Mapping[str, str]": "a dict of texts whose keys are texts",
    "Mapping[str, Sequence[int]]": "a dict of lists of integers whose keys are texts",
}
"""What `_FITS` takes, for errors."""
