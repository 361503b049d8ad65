"""`TrainerActor`: a model, an optimizer and data, written in plain torch, as an actor that trains them."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from loom.actor import Actor, concurrent_endpoint, current_rank, endpoint
from loom.train.addresses import own_address
from loom.train.settings import Assignment, Batch, Ending, Member, TrainerReport

if TYPE_CHECKING:
    from loom.train.loop.loop import TrainingLoop

__all__ = ["TrainerActor", "adamw", "here", "sgd"]

_here: TrainerActor | None = None


def here() -> TrainerActor | None:
    """Return the trainer of this process, if it has one."""
    return _here


def sgd(parameters: Iterable[Any], learning_rate: float) -> Any:
    """SGD with momentum 0.9."""
    import torch

    return torch.optim.SGD(parameters, lr=learning_rate, momentum=0.9)


def adamw(parameters: Iterable[Any], learning_rate: float) -> Any:
    """AdamW with torch's defaults."""
    import torch

    return torch.optim.AdamW(parameters, lr=learning_rate)


class TrainerActor(Actor):
    """A process of a replica group. A subclass gives at least `build` and `loss`.

    Import torch inside the methods, so that a laptop without torch can define the class. A step whose result could
    not be applied is computed again, with the same `Batch`.
    """

    seed = 0
    """Seed of torch, before `build`."""
    device = "cpu"
    """Where the model is put."""
    optimizers: Mapping[str, Callable[[Iterable[Any], float], Any]] = {"sgd": sgd, "adamw": adamw}
    """Functions of parameters and a learning rate, by the names that `LiveConfig.optimizer` may have."""

    def __init__(self) -> None:
        self.before_step: list[Callable[[Batch], object]] = []
        """Called with each batch before it is trained on, in the training thread."""
        self.after_loss: list[Callable[[Any], Any]] = []
        """Called with each loss; each returns the loss to go on with."""
        self.replica = ""
        """Name of the replica, such as ``train_0``; empty before the training begins."""
        self._loop: TrainingLoop | None = None
        self._store: Any = None
        self._joined = False

    # What a subclass gives.

    def build(self) -> Any:
        """Return the model, a ``torch.nn.Module``, which has to be the same in each process."""
        raise NotImplementedError(f"{type(self).__name__} has to give build(self), which returns the model")

    def loss(self, model: Any, batch: Batch) -> Any:
        """Return the loss of a model on a batch: a tensor that can be differentiated."""
        raise NotImplementedError(f"{type(self).__name__} has to give loss(self, model, batch)")

    def warm_up(self) -> None:
        """Do what takes long and needs no model, such as reading data; a spare does it before it is needed."""

    def evaluate(self, model: Any) -> dict[str, float]:
        """Return metrics of a model, such as ``{"accuracy": 0.97}``. All processes call this, without gradients."""
        return {}

    def save(self) -> dict[str, Any]:
        """Return the state besides model and optimizer, for `load`."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `save` returned in another process, or an earlier one."""

    def step(self, model: Any, batch: Batch) -> Any:
        """Return the loss to differentiate."""
        for function in self.before_step:
            function(batch)
        loss = self.loss(model, batch)
        for function in self.after_loss:
            loss = function(loss)
        return loss

    # What the controller calls.

    @endpoint
    async def prepare(self) -> Member:
        """Import everything and read the data, before there is anything to train."""
        global _here
        _here = self
        rank = current_rank().rank
        await asyncio.to_thread(self._warm_up)
        address = await asyncio.to_thread(self._open_store) if rank == 0 else ("", 0)
        return Member(os.getpid(), socket.gethostname(), address)

    def _warm_up(self) -> None:
        # Other groups train meanwhile. Linux has a priority for each thread, which the threads it starts inherit.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        os.environ.setdefault("RUST_LOG", "warn")  # torchft's native part logs several lines a step
        import torch
        import torchft  # noqa: F401

        import loom.train.loop.loop  # noqa: F401

        # The controller reports a group that is lost; here it is no error.
        logging.getLogger("torchft.manager").setLevel(logging.CRITICAL)
        torch.set_num_threads(1)
        weight = torch.nn.Parameter(torch.zeros(1))
        weight.sum().backward()  # the first of a process takes long
        torch.optim.SGD([weight]).step()
        self.warm_up()

    def _open_store(self) -> tuple[str, int]:
        from torch.distributed import TCPStore

        address = own_address()
        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        return address, self._store.port

    @concurrent_endpoint
    async def train(self, assignment: Assignment) -> TrainerReport:
        """Train until the end; return the last report."""
        rank = current_rank().rank
        ended: asyncio.Future[TrainerReport] = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()

        def work() -> None:
            report = self._train(assignment, rank)
            loop.call_soon_threadsafe(ended.set_result, report)

        threading.Thread(target=work, name="loom-training", daemon=True).start()
        return await ended

    def _train(self, assignment: Assignment, rank: int) -> TrainerReport:
        import traceback

        self.replica = assignment.replica
        try:
            if assignment.members > 1 and not self._joined:
                self._join_group(assignment, rank)
            from loom.train.loop.loop import TrainingLoop

            self._loop = TrainingLoop(self, assignment, rank)
        except Exception:  # noqa: BLE001 - the job decides what follows
            return TrainerReport(ending=Ending.FAILED, error=traceback.format_exc(limit=-8))
        return self._loop.run()

    def _join_group(self, assignment: Assignment, rank: int) -> None:
        from datetime import timedelta

        from torch import distributed

        host, port = assignment.store
        distributed.init_process_group(
            assignment.backend,
            store=distributed.TCPStore(host, port, is_master=False, wait_for_workers=False),
            rank=rank,
            world_size=assignment.members,
            timeout=timedelta(seconds=assignment.timeouts.collective),
        )
        self._joined = True

    @endpoint
    async def report(self) -> TrainerReport:
        """Return how far the training is."""
        return TrainerReport() if self._loop is None else self._loop.report()

    @endpoint
    async def leave(self) -> None:
        """End at the next step boundary."""
        if self._loop is not None:
            self._loop.leave()

    @endpoint
    async def move(self, lighthouse: str) -> None:
        """Go to another lighthouse."""
        if self._loop is not None:
            self._loop.move(lighthouse)
