"""Checks of the fields of messages from NATS. Each raises `WrongArguments` for a value that makes no sense.

Protobuf writes whole numbers as texts, so a number may be a text of it.
"""

from __future__ import annotations

import math
from typing import Any

from loom.control.frame import MAX_COUNT, MAX_NAME
from loom.errors import WrongArguments


def text(body: dict[str, Any], field: str, default: str | None = None) -> str:
    """Return a text; one without a default has to be there, and not empty."""
    value = body.get(field)
    if value is None and default is not None:
        return default
    if value is None or (value == "" and default is None):
        raise WrongArguments(f"{field} is missing; there is {names(body)}")
    if not isinstance(value, str):
        raise WrongArguments(f"{field} is a text, not {value!r:.80}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise WrongArguments(f"{field} has half a character: {value!a:.80}") from None
    return value


def name(body: dict[str, Any], field: str, default: str | None = None) -> str:
    """Return a printable text of at most `MAX_NAME` characters."""
    return check_name(field, text(body, field, default))


def check_name(field: str, value: Any) -> str:
    """Return a value if it is a printable text of at most `MAX_NAME` characters."""
    if not isinstance(value, str) or not value.isprintable():
        raise WrongArguments(f"{field} is a printable text, not {value!r:.80}")
    if len(value) > MAX_NAME:
        raise WrongArguments(f"{field} has at most {MAX_NAME} characters, not {len(value)}")
    return value


def values(body: dict[str, Any], field: str, most: int | None = None) -> dict[str, Any]:
    """Return keys and values, at most ``most`` of them; none if the field is missing."""
    value = body.get(field)
    if value is not None and not isinstance(value, dict):
        raise WrongArguments(f"{field} has keys and values, not {value!r:.80}")
    if most is not None and len(value or {}) > most:
        raise WrongArguments(f"{field} has at most {most} keys, not {len(value or {})}")
    return value or {}


def count(body: dict[str, Any], field: str) -> int | None:
    """Return a count, such as a step, or None if it is missing."""
    value = body.get(field)
    if isinstance(value, str) and len(value) < 20 and value.isascii() and value.isdigit():
        value = int(value)
    if value is not None and (type(value) is not int or not 0 <= value < MAX_COUNT):
        raise WrongArguments(f"{field} is a whole number from 0, not {value!r:.80}")
    return value


def number(field: str, value: Any) -> float:
    """Return a number, also one that is not finite, for which JSON has texts."""
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    if type(value) is int and abs(value) < MAX_COUNT:
        return float(value)
    if type(value) is not float:
        raise WrongArguments(f"{field} is a number, not {value!r:.80}")
    return value


def seconds(body: dict[str, Any], field: str, default: float, least: float, most: float) -> float:
    """Return a time in seconds within bounds, or the default if it is missing."""
    value = body.get(field)
    if value is None:
        return default
    if type(value) not in (int, float) or math.isnan(value) or not least <= value <= most:
        raise WrongArguments(f"{field} is from {least:g} to {most:g} seconds, not {value!r:.80}")
    return float(value)


def names(body: dict[str, Any]) -> str:
    """Return the names of the fields that are there, for an error."""
    return ", ".join(repr(field)[:40] for field in list(body)[:10]) or "nothing"
