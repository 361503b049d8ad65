"""Configuration that all replicas change at the same step.

Each replica group is told of a change by itself, at a step boundary of its own. If each applied it there, their
parameters would differ from then on. So a change is a proposal at first: with the gradients of a step the groups
exchange a row of numbers each, and all take, for each key, the newest value of all rows, for that very step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["Agreement"]


class Agreement:
    """What one group knows of the configuration.

    Args:
        values: of each key, from the beginning.
    """

    def __init__(self, values: Mapping[str, float]) -> None:
        self._agreed = {key: (0, value) for key, value in values.items()}
        self._proposed: dict[str, tuple[int, float]] = {}

    def __getitem__(self, key: str) -> float:
        """The value that all have agreed on."""
        return self._agreed[key][1]

    def propose(self, key: str, value: float) -> None:
        """Have a key changed with the next step that all take."""
        version, _ = self._proposed.get(key, self._agreed[key])
        self._proposed[key] = version + 1, value

    @property
    def width(self) -> int:
        """How many numbers a row has."""
        return 2 * len(self._agreed)

    def row(self) -> list[float]:
        """What the others are told: a version and a value for each key."""
        return [number for key, known in self._agreed.items() for number in self._proposed.get(key, known)]

    def settle(self, rows: Sequence[Sequence[float]]) -> dict[str, float]:
        """Agree on what the rows of all groups say; every group has to be given the same rows.

        Returns:
            The keys that have changed, with their new values.
        """
        changed = {}
        for place, (key, (version, value)) in enumerate(list(self._agreed.items())):
            newest = max((row[2 * place], row[2 * place + 1]) for row in rows)
            self._agreed[key] = int(newest[0]), newest[1]
            if newest[0] > version and newest[1] != value:
                changed[key] = newest[1]
            if key in self._proposed and self._proposed[key][0] <= newest[0]:
                del self._proposed[key]
        return changed

    def state(self) -> dict[str, list[float]]:
        """What has been agreed on, for a group that joins and for a checkpoint."""
        return {key: [float(version), value] for key, (version, value) in self._agreed.items()}

    def load(self, state: Mapping[str, Sequence[float]]) -> None:
        """Take over what others have agreed on. Own proposals stay."""
        for key, (version, value) in state.items():
            self._agreed[key] = int(version), float(value)
