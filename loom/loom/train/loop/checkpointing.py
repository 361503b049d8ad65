"""`Checkpointing`: when a group writes its state to the job's folder, and how it begins with the newest one."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from loom.train.checkpoints.store import CheckpointStore, PendingCheckpoint
from loom.train.loop.progress import Progress
from loom.train.loop.step_clock import StepClock
from loom.train.loop.training_state import TrainingState
from loom.train.settings import Assignment

__all__ = ["Checkpointing"]


@dataclass
class Checkpointing:
    """The checkpoints of one process; the first process of a group writes them, all take part."""

    assignment: Assignment
    rank: int
    state: TrainingState
    progress: Progress
    clock: StepClock

    def __post_init__(self) -> None:
        folder, keep = self.assignment.checkpoints, self.assignment.keep_checkpoints
        self._store = None if folder is None else CheckpointStore(folder, keep=keep)
        self._saved_step: int | None = None
        """The step that was saved last, written or not: the same in all processes of the group."""
        self._pending: PendingCheckpoint | None = None

    def restore(self) -> None:
        """Go on from the newest whole checkpoint, if there is one."""
        found = None if self._store is None else self._store.newest()
        if found is None:
            return
        self.state.take_from_checkpoint(found.load())
        passed = "".join(f"; passed over {one.path.name}: {one.reason}" for one in found.skipped)
        self.progress.restored = f"checkpoint {found.path.name}{passed}"
        self.progress.restored_step = found.step

    def save(self) -> None:
        """Save the state, which is written in the background. All processes of the group have to call this."""
        with self.clock.saving():
            self._save()

    def save_and_wait(self) -> None:
        """Save the state unless this step was saved, and wait until it is written, or could not be."""
        with self.clock.saving():
            if self._saved_step != self.progress.step:
                self._save()
            if self._pending is not None:
                with contextlib.suppress(OSError):  # which is in the report
                    self._pending.wait()
                self._take_note()

    def _save(self) -> None:
        self._take_note()
        if self._store is None:
            return
        state = self.state.for_checkpoint()
        self._saved_step = self.progress.step
        if self.rank == 0:
            self._pending = self._store.save(state, self.progress.step)

    def _take_note(self) -> None:
        """Report what became of the last checkpoint, if that is known."""
        if self._pending is None or not self._pending.done:
            return
        error = self._pending.error
        self.progress.checkpoint_error = None if error is None else str(error)
        if error is None:
            self.progress.checkpoint_step = self._pending.step
        self._pending = None
