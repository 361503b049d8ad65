"""Which rows of goodput are written by the next commit."""

from __future__ import annotations

SAVE_AFTER = 30.0
"""Seconds after which what a living replica has told is written; it would tell it again."""

MAX_SAVED = 200
"""Rows that are written by one commit, besides those that cannot wait: it must not take long."""


class UnsavedRows:
    """Keys of rows that are to be written: some at once, others a while after they have changed first."""

    def __init__(self) -> None:
        self._at_once: dict[tuple[str, ...], None] = {}
        self._later: dict[tuple[str, ...], float] = {}

    def add(self, key: tuple[str, ...], now: float) -> None:
        self._later.setdefault(key, now)

    def add_now(self, key: tuple[str, ...]) -> None:
        self._at_once[key] = None

    def due(self, now: float) -> list[tuple[str, ...]]:
        """Return the keys of the rows that are due; they count as written from then on."""
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
