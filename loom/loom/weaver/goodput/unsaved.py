"""The rows of goodput that a commit writes."""

from __future__ import annotations

SAVE_AFTER = 30.0
"""Seconds after which a living replica's account is written. They are cumulative, so losing one does no harm."""

MAX_SAVED = 200
"""Rows that one commit writes in addition to the urgent ones, so that it does not take long."""


class UnsavedRows:
    """Keys of unsaved rows: some are written at once, others a while after their first change."""

    def __init__(self) -> None:
        self._at_once: dict[tuple[str, ...], None] = {}
        self._later: dict[tuple[str, ...], float] = {}

    def add(self, key: tuple[str, ...], now: float) -> None:
        self._later.setdefault(key, now)

    def add_now(self, key: tuple[str, ...]) -> None:
        self._at_once[key] = None

    def due(self, now: float) -> list[tuple[str, ...]]:
        """Return the keys of the rows that are due, and count them as written."""
        due, self._at_once = self._at_once, {}
        for key in due:
            self._later.pop(key, None)
        while self._later and len(due) < MAX_SAVED:
            key, since = next(iter(self._later.items()))
            if since > now - SAVE_AFTER:
                break
            del self._later[key]
            due[key] = None
        return list(due)
