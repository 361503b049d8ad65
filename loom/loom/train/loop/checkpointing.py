"""`Checkpointing`: a group's use of the job's checkpoints, to save its state and to begin with the newest one."""

from __future__ import annotations

import contextlib

from loom.train.checkpoints.store import CheckpointStore, PendingCheckpoint
from loom.train.loop.tensors import whole
from loom.train.loop.training_state import TrainingState


class Checkpointing:
    """The checkpoints of one process. The first process of a group writes them; all take part."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        folder, keep = state.job.checkpoints, state.job.keep_checkpoints
        self._store = None if folder is None else CheckpointStore(folder, keep=keep)
        self._saved_step: int | None = None  # whether written yet or not; the same in the whole group
        self._pending: PendingCheckpoint | None = None

    def restore(self) -> None:
        """Continue from the newest whole checkpoint, if there is one."""
        found = None if self._store is None else self._store.newest()
        if found is None:
            return
        self._state.load(found.load(), of_whole=True)
        passed = "".join(f"; passed over {one.path.name}: {one.reason}" for one in found.skipped)
        report = self._state.report
        report.restored = f"checkpoint {found.path.name}{passed}"
        report.restored_step = found.step

    def save(self) -> None:
        """Save the state, which is written in the background. All processes of the group have to call this."""
        self._take_note()
        if self._store is None:
            return
        state = self._state.save(whole)
        self._saved_step = step = self._state.report.step
        if self._state.rank == 0:
            self._pending = self._store.save(state, step)

    def save_and_wait(self) -> None:
        """Save the state unless this step was saved, and wait until it is written or has failed."""
        if self._saved_step != self._state.report.step:
            self.save()
        if self._pending is not None:
            with contextlib.suppress(OSError):  # the report has it
                self._pending.wait()
            self._take_note()

    def _take_note(self) -> None:
        """Report the outcome of the last checkpoint, if it is known."""
        if self._pending is None or not self._pending.done:
            return
        error, report = self._pending.error, self._state.report
        report.checkpoint_error = None if error is None else str(error)
        if error is None:
            report.checkpoint_step = self._pending.step
        self._pending = None
