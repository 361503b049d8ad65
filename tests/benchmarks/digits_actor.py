"""`DigitsActor`: a process of a data-parallel training by torch's own means, to be measured step by step."""

from __future__ import annotations

import math
import socket
from typing import Any

from loom.actor import Actor, current_rank, current_size, endpoint
from loom.train.digits import DigitsTrainer

__all__ = ["BATCH", "DigitsActor"]

BATCH = 32


class DigitsActor(Actor):
    """The network and the digits of `loom.train.digits`, in ``DistributedDataParallel``."""

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

        host = socket.gethostbyname(socket.gethostname())
        listener = socket.create_server((host, 0))  # torch's own would listen on every address
        port: int = listener.getsockname()[1]
        self.store = TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return host, port

    @endpoint
    def setup(self, rendezvous: tuple[str, int]) -> None:
        """Join the process group at ``rendezvous``, and build the network."""
        import torch
        from torch import distributed, nn

        self.rank, world_size = current_rank().rank, math.prod(current_size().values())
        store = self.store if self.rank == 0 else distributed.TCPStore(*rendezvous, is_master=False)
        distributed.init_process_group("gloo", store=store, rank=self.rank, world_size=world_size)
        trainer = DigitsTrainer()
        trainer.warm_up()
        self.images, self.labels = trainer.images[self.rank :: world_size], trainer.labels[self.rank :: world_size]
        torch.manual_seed(trainer.seed)
        self.model = nn.parallel.DistributedDataParallel(trainer.build())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.learning_rate, momentum=0.9)

    def one_step(self, generator: Any) -> float:
        """Take an optimizer step together with all other ranks; return the loss."""
        import torch
        from torch.nn.functional import cross_entropy

        batch = torch.randint(len(self.images), (BATCH,), generator=generator)
        loss = cross_entropy(self.model(self.images[batch]), self.labels[batch])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.item())
