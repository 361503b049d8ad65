"""`Progress`: what a process has done so far, as its parts write it and its report tells it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from loom.train.settings import Ending, TrainerReport

__all__ = ["Progress"]

KEPT_HASHES = 200
"""Hashes of the parameters that a process remembers."""


@dataclass
class Progress:
    """The fields of a `TrainerReport` while they change. Written by the training thread, read by others."""

    step: int = 0
    restored: str = ""
    restored_step: int = 0
    first_step_at: float | None = None
    participants: int = 0
    discarded: int = 0
    skipped: int = 0
    applied: int = 0
    hashes: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=KEPT_HASHES))
    changes: list[tuple[int, str, Any]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    checkpoint_step: int | None = None
    checkpoint_error: str | None = None
    ending: Ending | None = None
    error: str | None = None

    def report(self, paused: bool) -> TrainerReport:
        """Return a report that does not change any more."""
        fields = {
            **vars(self),
            "hashes": dict(self.hashes.copy()),
            "changes": tuple(self.changes),
            "metrics": dict(self.metrics),
        }
        return TrainerReport(paused=paused, **fields)
