"""`AsyncBarrier`: how far the generators' policy may be behind the step for which they generate."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class AsyncBarrier:
    """The barrier of a step: ``step - ckpt_step > async_level``.

    With an ``async_level`` of 2 the policy of step 3 is good for step 5 (5 - 3 > 2 is false), and not for step 6.
    With 0, each step waits for the policy of the one before.
    """

    async_level: int
    ckpt_step: int | None = None
    """The step of the generators' policy; None while they have none."""

    def hit(self, step: int) -> bool:
        """Return whether a step has to wait for a newer policy."""
        return self.ckpt_step is None or step - self.ckpt_step > self.async_level

    def target(self, step: int) -> int:
        """Return the step of the policy that a step waits for: the oldest that is good for it."""
        return max(0, step - self.async_level)

    def staleness(self, step: int) -> int:
        """Return how many steps the policy is behind."""
        return step - (self.ckpt_step or 0)
