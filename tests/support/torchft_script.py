"""A user's own torchft script, which registers its manager in one line.

``python -m tests.support.torchft_script REPLICA LIGHTHOUSE [DEVICE]`` trains one weight with the other groups, on a
device with that uuid as well, prints ``up`` when it has made a step, and goes on until it is told to stop.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

STEP = 0.05
"""Seconds."""


def train(replica: str, lighthouse: str, device: str = "") -> None:
    import torch
    from torch.distributed import TCPStore
    from torchft.manager import Manager
    from torchft.optim import OptimizerWrapper
    from torchft.process_group import ProcessGroupGloo

    import loom.train
    from loom.devices import LocalDevice

    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    weight = torch.nn.Parameter(torch.zeros(()))
    own = torch.optim.SGD([weight], lr=0.5)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=lambda state: weight.data.copy_(state["weight"]),
        state_dict=lambda: {"weight": weight.detach().clone()},
        min_replica_size=1,
        timeout=timedelta(seconds=10),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=replica,
        hostname="127.0.0.1",
    )
    optimizer = OptimizerWrapper(manager, own)
    threadlet = loom.train.register(manager)
    if device:
        threadlet.add_device(LocalDevice(device, "gpu", "host", "a stand-in for a GPU", 1 << 30))

    @threadlet.handler("learning_rate")
    def set_learning_rate(value: float) -> None:
        for group in own.param_groups:
            group["lr"] = value

    while not threadlet.should_stop:
        optimizer.zero_grad()
        weight.backward()
        manager.allreduce(weight.grad).wait()
        optimizer.step()
        if manager.current_step() == 1:
            print("up", flush=True)
        time.sleep(STEP)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    train(*sys.argv[1:])
