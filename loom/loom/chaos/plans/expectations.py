"""The expectations of a plan, in their written form: ``loss falls``, ``recovers within 20 s``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Any

from loom.chaos.durations import parse_time
from loom.errors import WrongArguments


class ExpectationKind(str, Enum):
    """The kind of an expectation."""

    RECOVERS = "recovers within"
    """The training recovers within this time after each fault."""
    DETECTED = "detected within"
    """Each fault is detected within this time."""
    STEPS_LOST = "steps lost at most"
    """Each fault loses at most this many steps."""
    LOST_ONCE = "no step lost twice"
    FALLS = "falls"
    RISES = "rises"
    AT_LEAST = "at least"
    AT_MOST = "at most"
    FINITE = "is finite"
    AGREE = "replicas agree"
    """Replicas that reported the hash of their parameters for the same step reported the same hash."""
    GOODPUT = "goodput at least"


OF_FAULTS = (ExpectationKind.RECOVERS, ExpectationKind.DETECTED, ExpectationKind.STEPS_LOST)
"""Expectations that a single fault may have; in a plan, they hold for each of its faults."""

_NUMBER = r"(?P<number>[-+]?\d+(\.\d+)?(e[-+]?\d+)?)\s*(?P<percent>%)?"
_METRIC = r"(?P<metric>[A-Za-z][\w./-]*)"

_FORMS = (
    ("recovers within 20 s", r"recovers? within (?P<time>.+)", ExpectationKind.RECOVERS),
    ("detected within 1 s", r"(is )?detected within (?P<time>.+)", ExpectationKind.DETECTED),
    ("at most 5 steps lost", rf"at most {_NUMBER} steps? lost", ExpectationKind.STEPS_LOST),
    ("steps lost at most 5", rf"steps lost at most {_NUMBER}", ExpectationKind.STEPS_LOST),
    ("no step lost twice", r"no step (is )?(lost|applied) twice", ExpectationKind.LOST_ONCE),
    ("replicas agree", r"(all )?replicas agree", ExpectationKind.AGREE),
    ("goodput at least 85 %", rf"goodput (is )?at least {_NUMBER}", ExpectationKind.GOODPUT),
    ("loss falls", rf"{_METRIC} falls", ExpectationKind.FALLS),
    ("accuracy rises", rf"{_METRIC} rises", ExpectationKind.RISES),
    ("loss is finite", rf"{_METRIC} is finite", ExpectationKind.FINITE),
    ("accuracy at least 0.97", rf"{_METRIC} (is )?at least {_NUMBER}", ExpectationKind.AT_LEAST),
    ("loss at most 0.2", rf"{_METRIC} (is )?at most {_NUMBER}", ExpectationKind.AT_MOST),
)

FORMS = tuple(example for example, _, _ in _FORMS)  # an example of each form


@dataclass(frozen=True)
class Expectation:
    """An expectation. ``value`` is in seconds, steps, or the unit of the metric."""

    text: str
    kind: ExpectationKind
    metric: str = ""
    value: float = 0.0

    @property
    def of_faults(self) -> bool:
        """Whether the expectation is about single faults."""
        return self.kind in OF_FAULTS


def parse_expectation(value: Any) -> Expectation:
    """Parse an expectation."""
    if isinstance(value, Expectation):
        return value
    text = " ".join(value.split()) if isinstance(value, str) else ""
    for _, form, kind in _FORMS:
        if (match := re.fullmatch(form, text)) is not None:
            found = match.groupdict()
            number = parse_time(found["time"]) if found.get("time") else float(found.get("number") or 0.0)
            if found.get("percent"):
                number /= 100
            return Expectation(text, kind, found.get("metric") or "", number)
    raise WrongArguments(f"{value!r:.80} is nothing that can be expected: write such as {'; '.join(FORMS)}")
