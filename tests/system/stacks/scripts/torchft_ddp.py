"""Train with replica groups that may come and go: https://github.com/meta-pytorch/torchft, train_ddp.py."""

import os
import sys
from datetime import timedelta

import torch
from torch import nn, optim
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo


def main():
    max_steps, batch_size = map(int, sys.argv[1:])
    replica_group = int(os.environ.get("REPLICA_GROUP_ID", 0))
    torch.manual_seed(replica_group)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    m = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    inner = optim.AdamW(m.parameters(), lr=1e-3)

    def load_state_dict(state_dict):
        m.load_state_dict(state_dict["model"])
        inner.load_state_dict(state_dict["optim"])

    def state_dict():
        return {"model": m.state_dict(), "optim": inner.state_dict()}

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"train_ddp_{replica_group}",
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
    )
    model = DistributedDataParallel(manager, m)
    optimizer = Optimizer(manager, inner)
    criterion = nn.CrossEntropyLoss()

    while manager.current_step() < max_steps:
        inputs = torch.rand(batch_size, 16)
        optimizer.zero_grad()
        loss = criterion(model(inputs), inputs[:, :4].argmax(1))
        loss.backward()
        optimizer.step()

    print(f"[{replica_group}] reached step {manager.current_step()}")
    manager.shutdown()


if __name__ == "__main__":
    main()
