"""The part of the demo that runs in the cluster: an actor in each process learns to read handwritten digits.

torch and scikit-learn are imported where the actors run, so that a laptop that only drives them needs neither.
"""

from __future__ import annotations

import math
import os
import signal
import socket
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Any

from loom.actor import Actor, current_rank, current_size, endpoint

TEST_DIGITS = 360
"""How many of the 1,797 digits are kept back for `DigitsTrainer.evaluate`."""

WEAVER_SECONDS = 30.0
"""How long a process may take to find the weaver."""

BATCH = 32
SEED = 0


@dataclass(frozen=True)
class TrainResult:
    """What one process reports about the steps of one `DigitsTrainer.train`; ``seconds`` is their duration."""

    loss: float
    samples: int
    seconds: float


class DigitsTrainer(Actor):
    """One process of a data-parallel job: a replica of the network and this rank's share of the digits."""

    def __init__(self, learning_rate: float) -> None:
        # The slow imports happen here, in all processes at once, and not one after the other in `setup`.
        import torch

        torch.set_num_threads(1)
        self.learning_rate = learning_rate
        self.step = 0

    @endpoint
    def open_store(self) -> tuple[str, int]:
        """Open the store where the ranks find each other, on a free port; only rank 0 is asked to."""
        from torch.distributed import TCPStore

        # It listens on all interfaces; "localhost" is only this rank's own way to it.
        self.store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        return socket.gethostbyname(socket.gethostname()), self.store.port

    @endpoint
    def setup(self, rendezvous: tuple[str, int]) -> int:
        """Join the process group at ``rendezvous``, build the network, and return this process's id."""
        import torch
        from torch import distributed, nn

        rank, world_size = current_rank().rank, math.prod(current_size().values())
        store = self.store if rank == 0 else distributed.TCPStore(*rendezvous, is_master=False)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)

        images, labels = _digits_of_rank_zero(rank)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED))
        test, mine = order[:TEST_DIGITS], order[TEST_DIGITS:][rank::world_size]
        self.test_images, self.test_labels = images[test], labels[test]
        self.images, self.labels = images[mine], labels[mine]
        self.rank = rank

        torch.manual_seed(SEED)
        network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.model = nn.parallel.DistributedDataParallel(network)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.learning_rate, momentum=0.9)
        return os.getpid()

    @endpoint
    def train(self, steps: int) -> TrainResult:
        """Take ``steps`` optimizer steps together with all other ranks."""
        import torch
        from torch.nn.functional import cross_entropy

        # Seeded by the step, so that a job that went back to a checkpoint sees the same batches again.
        generator = torch.Generator().manual_seed(SEED + 1_000_003 * self.step + self.rank)
        total_loss = 0.0
        started = perf_counter()
        for _ in range(steps):
            batch = torch.randint(len(self.images), (BATCH,), generator=generator)
            loss = cross_entropy(self.model(self.images[batch]), self.labels[batch])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total_loss += loss.item()
        self.step += steps
        return TrainResult(total_loss / steps, steps * BATCH, perf_counter() - started)

    @endpoint
    def evaluate(self) -> float:
        """The share of the test digits that the network reads correctly, between 0 and 1."""
        import torch

        with torch.no_grad():
            # Not through DistributedDataParallel: one rank evaluates alone, the others do not take part.
            guesses = self.model.module(self.test_images).argmax(dim=1)
        return int((guesses == self.test_labels).sum()) / len(guesses)

    @endpoint
    def set_learning_rate(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

    @endpoint
    def save(self, path: str) -> int:
        """Write a checkpoint that is either complete or not there, and return its step."""
        import torch

        state = {
            "step": self.step,
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        partial = f"{path}.partial"
        torch.save(state, partial)
        os.replace(partial, path)
        return self.step

    @endpoint
    def load(self, path: str) -> int:
        """Continue from the checkpoint at ``path``, and return its step."""
        import torch

        state = torch.load(path, weights_only=True)
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        return self.step

    @endpoint
    def be_watched(self, weaver: str) -> str | None:
        """Tell the weaver of this process, which failures may be injected into; its name there once it is known."""
        from loom.threadlet import Threadlet

        self.threadlet = Threadlet(f"digits_{self.rank}", group="digits", weaver=weaver, injectable=True)
        until = perf_counter() + WEAVER_SECONDS
        while not self.threadlet.connected:
            if perf_counter() > until:
                return None
            sleep(0.02)
        return self.threadlet.replica_id

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def die(self) -> None:
        """End this process as the kernel's out-of-memory killer would."""
        os.kill(os.getpid(), signal.SIGKILL)


def _digits_of_rank_zero(rank: int) -> tuple[Any, Any]:
    """The images (n x 64, between 0 and 1) and labels, read by rank 0 and broadcast to the others.

    Importing scikit-learn costs two seconds of one core, which only one process has to pay this way.
    """
    import torch
    from torch import distributed

    digits: list[Any] = [None]
    if rank == 0:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        digits = [(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))]
    distributed.broadcast_object_list(digits)
    images, labels = digits[0]
    return images, labels
