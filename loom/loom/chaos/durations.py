"""Times and rates in the form that users write: ``5 s``, ``500 ms``, ``2 min``, ``3 per minute``.

Other forms are refused with `WrongArguments`.
"""

from __future__ import annotations

import re
from typing import Any

from loom.errors import WrongArguments

_UNITS = {
    "ms": 0.001, "millisecond": 0.001, "s": 1.0, "sec": 1.0, "second": 1.0,
    "m": 60.0, "min": 60.0, "minute": 60.0, "h": 3600.0, "hour": 3600.0,
    "d": 86_400.0, "day": 86_400.0,
}  # fmt: skip
_NUMBER = r"(?P<number>[-+]?\d+(\.\d+)?|[-+]?\.\d+)"
_TIME = re.compile(rf"{_NUMBER}\s*(?P<unit>[a-z]+)?")
_RATE = re.compile(rf"{_NUMBER}\s*(per|/)\s*(?P<each>.+)")


def parse_time(value: Any) -> float:
    """Return the seconds of a number, or of a number with a unit."""
    if type(value) in (int, float):
        seconds = float(value)
    else:
        match = _TIME.fullmatch(value.strip()) if isinstance(value, str) else None
        unit = _unit(match["unit"] or "s") if match else None
        if match is None or unit is None:
            raise WrongArguments(f"{value!r:.80} is no time: write seconds, or such as 500 ms, 5 s, 2 min")
        seconds = float(match["number"]) * unit
    if not 0 <= seconds < float("inf"):
        raise WrongArguments(f"a time is not negative, and not {value!r:.80}")
    return seconds


def parse_rate(value: Any) -> float:
    """Return the rate per second of a number, or of a text such as ``2 per minute`` or ``1 per 30 s``."""
    number, seconds = value, 1.0
    if type(value) not in (int, float):
        match = _RATE.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is None:
            raise WrongArguments(f"{value!r:.80} is no rate: write such as 2 per minute, or 1 per 30 s")
        each = match["each"].strip()
        number, seconds = float(match["number"]), _unit(each) or parse_time(each)
    if not number > 0 or not seconds > 0:
        raise WrongArguments(f"a rate is more than none, and not {value!r:.80}")
    return float(number / seconds)


def spoken(seconds: float | None) -> str:
    """Return a time as text for users; a dash for None."""
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _unit(name: str) -> float | None:
    return _UNITS.get(name) or _UNITS.get(name.removesuffix("s"))
