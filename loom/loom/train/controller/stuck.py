"""`StuckGroups`: finds groups that make no step while others do."""

from __future__ import annotations

from collections.abc import Iterable

from loom.train.controller.group import ReplicaGroup

__all__ = ["StuckGroups"]


class StuckGroups:
    """Notes when each group that trains has made its last step.

    Args:
        patience: seconds that a group may make no step while others do.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._moved_at: dict[ReplicaGroup, tuple[int, float]] = {}

    def find(self, training: Iterable[ReplicaGroup], now: float) -> list[tuple[ReplicaGroup, float]]:
        """Return the groups that are stuck, with the seconds since their last step.

        Args:
            training: all groups that train.
            now: seconds of a monotonic clock.
        """
        self._moved_at = {group: self._progress(group, now) for group in training}
        return [
            (group, now - since)
            for group, (_, since) in self._moved_at.items()
            if now - since > self._patience and self._any_moved_after(since)
        ]

    def _progress(self, group: ReplicaGroup, now: float) -> tuple[int, float]:
        step, since = self._moved_at.get(group, (-1, now))
        # A pause is no lack of progress, neither meanwhile nor when it has ended.
        return (step, since) if step == group.report.step and not group.report.paused else (group.report.step, now)

    def _any_moved_after(self, moment: float) -> bool:
        return any(since > moment for group, (_, since) in self._moved_at.items() if not group.report.paused)
