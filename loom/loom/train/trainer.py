"""`TrainerActor`: a process of a replica group, as an actor that trains a model."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import traceback
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from loom.actor import Actor, concurrent_endpoint, current_rank, endpoint
from loom.control.address import own_address
from loom.devices import own_torch_device
from loom.train.model import TrainerModel
from loom.train.settings import Ending, Member, TrainerReport
from loom.train.spec import Assignment

if TYPE_CHECKING:
    from loom.train.loop.loop import TrainingLoop


class TrainerActor(TrainerModel, Actor):
    """A process of a replica group. A subclass overrides at least `build` and `loss`.

    Import torch inside the methods, so that a laptop without torch can define the class. A step whose result could
    not be applied is computed again, with the same `Batch`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.device = own_torch_device(self.device)
        self._loop: TrainingLoop | None = None
        self._store: Any = None
        """The group's store, in its first process. The reference keeps the store running."""
        self._joined = False
        """True if this process has joined its group's process group, which it does once for all trainings."""

    @endpoint
    async def prepare(self) -> Member:
        """Import everything and read the data, before there is an assignment."""
        rank = current_rank().rank
        await asyncio.to_thread(self._warm_up)
        address = await asyncio.to_thread(self._open_store) if rank == 0 else ("", 0)
        return Member(os.getpid(), address)

    def _warm_up(self) -> None:
        # Other groups train meanwhile: lower the priority of this thread, which the threads that it starts inherit.
        thread = threading.get_native_id()
        lower = max(10, os.getpriority(os.PRIO_PROCESS, thread))  # a higher one than it has needs a right
        os.setpriority(os.PRIO_PROCESS, thread, lower)
        os.environ.setdefault("RUST_LOG", "warn")  # by default torchft logs several lines in each step
        import torch
        import torchft  # noqa: F401

        import loom.train.loop.loop  # noqa: F401

        # The controller reports a lost group; for this process it is no error.
        logging.getLogger("torchft.manager").setLevel(logging.CRITICAL)
        torch.set_num_threads(1)
        weight = torch.nn.Parameter(torch.zeros(1))
        weight.sum().backward()  # the first backward pass of a process takes long
        torch.optim.SGD([weight]).step()
        self.warm_up()

    def _open_store(self) -> tuple[str, int]:
        from loom.process.listen import open_store

        address = own_address()
        self._store = open_store(address)
        return address, self._store.port

    @concurrent_endpoint
    async def train(self, assignment: Assignment) -> TrainerReport:
        """Train until the end; return the last report."""
        rank = current_rank().rank
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[TrainerReport] = loop.create_future()

        # Unlike an executor's thread, a daemon thread that hangs does not keep its process from ending.
        def work() -> None:
            report = self._train(assignment, rank)
            loop.call_soon_threadsafe(ended.set_result, report)

        threading.Thread(target=work, name="loom-training", daemon=True).start()
        return await ended

    def _train(self, assignment: Assignment, rank: int) -> TrainerReport:
        self.replica = assignment.replica
        try:
            if self.device.startswith("cuda:"):
                import torch

                torch.cuda.set_device(self.device)  # for this thread, in which NCCL looks for it
            if assignment.job.backend == "nccl":
                # Without it torchft warns, and may wait half an hour for a group that has lost a member.
                seconds = str(assignment.job.timeouts.collective)
                os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", seconds)
            if assignment.job.members > 1 and not self._joined:
                self._join_group(assignment, rank)
            from loom.train.loop.loop import TrainingLoop

            self._loop = TrainingLoop(self, assignment, rank)
        except Exception:  # noqa: BLE001 - the job decides what follows
            return TrainerReport(ending=Ending.FAILED, error=traceback.format_exc(limit=-8))
        return self._loop.run()

    def _join_group(self, assignment: Assignment, rank: int) -> None:
        from torch import distributed

        job = assignment.job
        host, port = assignment.store
        distributed.init_process_group(
            job.backend,
            store=distributed.TCPStore(host, port, is_master=False, wait_for_workers=False),
            rank=rank,
            world_size=job.members,
            timeout=timedelta(seconds=job.timeouts.collective),
        )
        self._joined = True

    def attend(self) -> None:
        """Apply commands, and end the training if it has to end; for a `loss` that waits for something."""
        if self._loop is not None:
            self._loop.attend()

    @endpoint
    async def report(self) -> TrainerReport:
        """Return the progress of the training."""
        return TrainerReport() if self._loop is None else self._loop.report()

    @endpoint
    async def leave(self) -> None:
        """End the training at the next step boundary."""
        if self._loop is not None:
            self._loop.leave()

    @endpoint
    async def break_off(self) -> None:
        """Wait no longer for the other groups in this step, one of which is lost."""
        if self._loop is not None:
            await asyncio.to_thread(self._loop.break_off)

    @endpoint
    async def move(self, lighthouse: str, behind: bool) -> None:
        """Move to another lighthouse; if ``behind``, take over the state of the groups there."""
        if self._loop is not None:
            self._loop.move(lighthouse, behind)
