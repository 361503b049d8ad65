"""Checks of arguments by name, for the operations of the weaver and for what its own processes report."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from loom.control.frame import MAX_NAME
from loom.errors import WrongArguments

IDENTITY = r"[A-Za-z0-9_-]{8,64}"
"""The form of an id that a caller chooses."""


MOST_EVENTS = 10_000
"""Events that one request can read."""


def check_name(what: str, name: str) -> None:
    """Raise `WrongArguments` if a name, or a glob on names, is longer than any name is."""
    if len(name) > MAX_NAME:
        raise WrongArguments(f"{what} has at most {MAX_NAME} characters, not {len(name)}: {name!r:.80}")


def text(arguments: Mapping[str, Any], name: str) -> str:
    """Return a text that has to be there, and not empty."""
    value = text_or_none(arguments, name)
    if not value:
        raise WrongArguments(f"{name} is missing")
    return value


def text_or_none(arguments: Mapping[str, Any], name: str) -> str | None:
    """Return a text, or None if it was not given."""
    value = arguments.get(name)
    if value is not None and not isinstance(value, str):
        raise WrongArguments(f"{name} is a text, not {value!r:.80}")
    return value


def identity(arguments: Mapping[str, Any], name: str) -> str | None:
    """Return an id that the caller has chosen, or None if it was not given."""
    value = text_or_none(arguments, name)
    if value is not None and not re.fullmatch(IDENTITY, value):
        raise WrongArguments(f"{name} is 8 to 64 letters, digits, - and _, not {value!r:.80}")
    return value


def given(arguments: Mapping[str, Any], name: str) -> Any:
    """Return an argument of any type that has to be there."""
    value = arguments.get(name)
    if value is None:
        raise WrongArguments(f"{name} is missing")
    return value


def count_or_none(arguments: Mapping[str, Any], name: str) -> int | None:
    """Return a count, or None if it was not given."""
    value = arguments.get(name)
    if value is not None and (type(value) is not int or not 0 <= value < 1 << 53):
        raise WrongArguments(f"{name} is a count, not {value!r:.80}")
    return value


_ITEMS = {int: "numbers", str: "texts"}


def items(
    arguments: Mapping[str, Any], name: str, kind: type, least: int, most: int | None, required: bool
) -> Sequence[Any] | None:
    """Return a list of counts or of texts, with some bounds of its length; None if none was given."""
    value = given(arguments, name) if required else arguments.get(name)
    fits = type(value) is list and len(value) >= least and (most is None or len(value) <= most)
    if value is None or (fits and all(type(one) is kind and (type(one) is not int or one >= 0) for one in value)):
        return value
    many = "" if most is None else f"{most} " if least == most else f"at most {most} "
    raise WrongArguments(f"{name} are {many}{_ITEMS[kind]}, not {value!r:.80}")


def seconds_or_none(arguments: Mapping[str, Any], name: str) -> float | None:
    """Return a time in seconds, or None if it was not given."""
    value = arguments.get(name)
    if value is None:
        return None
    if type(value) not in (int, float):
        raise WrongArguments(f"{name} is a time in seconds, not {value!r:.80}")
    return float(value)
