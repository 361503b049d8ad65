"""The actor that benchmarks call, of whichever actor class they measure."""

from __future__ import annotations

from typing import Any

__all__ = ["counter_class"]


def counter_class(actor: type, endpoint: Any) -> type:
    """An actor class with a number that ``add`` increases and returns, and an ``echo``.

    Args:
        actor: `loom.Actor` or Monarch's own.
        endpoint: its decorator.
    """

    class Counter(actor):  # type: ignore[misc]
        def __init__(self) -> None:
            self.number = 0

        @endpoint  # type: ignore[untyped-decorator]
        def add(self, amount: int) -> int:
            self.number += amount
            return self.number

        @endpoint  # type: ignore[untyped-decorator]
        def echo(self, value: Any) -> Any:
            return value

    return Counter
