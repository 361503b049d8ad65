"""The values with which a branch begins: those of its run at the step, and what is changed of them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

from loom.branches.branch import Branch
from loom.errors import WrongArguments

_TIMES = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(?:e([+-]?\d+))?x", re.IGNORECASE)

RATE = "learning_rate"
FACTOR = "learning_rate_factor"
"""The key that multiplies a schedule; a fixed rate and a factor take each other's place."""

_NOT_SET = ("learning_rate_schedule",)
"""Keys that are only read."""


def times(value: Any) -> float | None:
    """Return the factor of a relative value, such as 0.5 of ``"0.5x"``; None for every other value."""
    if not isinstance(value, str) or _TIMES.fullmatch(value.strip()) is None:
        return None
    return float(value.strip()[:-1])


def check_changes(changes: Mapping[str, Any], run: str, known: Mapping[str, Any]) -> None:
    """Check the values that a branch is to change, before anything is started.

    Args:
        known: the keys that the run has had, with their values as far as they are known.

    Raises:
        WrongArguments: the run has no such key, or a number where a text is given.
    """
    for key, value in changes.items():
        if key not in known:
            raise WrongArguments(f"set {key}: run {run!r} has no such key; it has {', '.join(sorted(known))}")
        if type(known[key]) in (int, float) and isinstance(value, str) and not _is_number(value):
            raise WrongArguments(
                f"set {key}: run {run!r} has {known[key]} there, and {value!r:.80} is no number: write such as "
                "0.001, or 0.5x for half of what it was"
            )


def _is_number(text: str) -> bool:
    if times(text) is not None or text.strip().lower() in ("null", "none"):  # which gives a schedule back
        return True
    with contextlib.suppress(ValueError):
        return float(text) == float(text)
    return False


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a key, in the place of what it takes the place of."""
    base, at, index = key.partition("@")
    other = {RATE: FACTOR, FACTOR: RATE}.get(base)
    if other is not None:
        values.pop(f"{other}{at}{index}", None)
    values.pop(key, None)
    values[key] = value


def kept_at(timeline: Iterable[Mapping[str, Any]], step: int) -> dict[str, Any]:
    """Return the values that commands had set in a run up to a step."""
    values: dict[str, Any] = {}
    for mark in timeline:
        at = mark.get("step")
        if mark.get("do") == "update_config" and mark.get("applied") and at is not None and at <= step:
            for key, change in mark.get("changes", {}).items():
                if key not in _NOT_SET:
                    put(values, key, change["new"])
    return values


def beginning(branch: Branch, handlers: Container[str], present: Callable[[str], Any]) -> dict[str, Any]:
    """Return the values of a branch without relative ones. One that cannot be resolved stays as it is.

    Args:
        handlers: the keys that the training process can set.
        present: returns the present value of a key, as the checkpoint has left it; None if it is not known.
    """
    values = dict(branch.kept)
    for key, value in branch.changes.items():
        factor = times(value)
        if factor is None:
            put(values, key, value)
        else:
            put(values, *_scaled(branch, values, key, factor, handlers, present))
    return values


def _scaled(
    branch: Branch,
    values: Mapping[str, Any],
    key: str,
    factor: float,
    handlers: Container[str],
    present: Callable[[str], Any],
) -> tuple[str, Any]:
    base, at, index = key.partition("@")
    multiplies = f"{FACTOR}{at}{index}"
    if base == RATE and multiplies in handlers and values.get(key) is None:
        return multiplies, factor * values.get(multiplies, 1.0)  # the schedule goes on, times the factor
    found = (values.get(key), present(key), branch.known.get(key))
    old = next((one for one in found if type(one) in (int, float)), None)
    return key, branch.changes[key] if old is None else old * factor
