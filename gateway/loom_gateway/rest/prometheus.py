"""The text in which Prometheus reads numbers.

https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format, version 0.0.4. By hand, because the
gateway shows what others have counted; a library of counters would count it again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

__all__ = ["CONTENT_TYPE", "Exposition"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


class Exposition:
    """Families of samples, in the order in which they were begun."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._families: set[str] = set()
        self._open = ""

    def family(self, name: str, kind: str, about: str) -> None:
        """Begin a family; the samples that follow are of it.

        Args:
            name: of the family.
            kind: ``counter``, ``gauge`` or ``histogram``.
            about: what it counts, and in which unit.
        """
        assert _NAME.fullmatch(name)
        assert name not in self._families
        self._families.add(name)
        self._open = name
        escaped = about.replace("\\", "\\\\").replace("\n", "\\n")
        self._lines += [f"# HELP {name} {escaped}", f"# TYPE {name} {kind}"]

    def sample(self, value: float, **labels: str) -> None:
        """Add a sample of the family."""
        self._sample(self._open, value, labels)

    def histogram(self, bounds: Sequence[float], counts: Sequence[int], total: float, **labels: str) -> None:
        """Add a histogram of the family.

        Args:
            bounds: the upper bounds of the buckets, growing, without the infinite one.
            counts: how many are in each bucket alone, the infinite one last.
            total: the sum of what was counted.
        """
        upto = 0
        for bound, count in zip([*bounds, math.inf], counts, strict=True):
            upto += count
            self._sample(f"{self._open}_bucket", upto, {**labels, "le": _number(bound)})
        self._sample(f"{self._open}_sum", total, labels)
        self._sample(f"{self._open}_count", upto, labels)

    def text(self) -> str:
        """All of it."""
        return "".join(f"{line}\n" for line in self._lines)

    def _sample(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        assert all(map(_LABEL.fullmatch, labels))
        shown = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        self._lines.append(f"{name}{{{shown}}} {_number(value)}" if shown else f"{name} {_number(value)}")


def _number(value: float) -> str:
    if isinstance(value, bool):
        value = int(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
