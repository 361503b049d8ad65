"""Average gradients with torchrun: https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html."""

import argparse

import torch
import torch.distributed as dist
import torch.optim as optim
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.tensorboard import SummaryWriter


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("log_dir")
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=20)
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    ddp_model = DDP(ToyModel())
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.001)
    writer = SummaryWriter(arguments.log_dir) if rank == 0 else None

    for step in range(arguments.max_steps):
        optimizer.zero_grad()
        outputs = ddp_model(torch.randn(arguments.batch_size, 10))
        loss = loss_fn(outputs, torch.randn(arguments.batch_size, 5))
        loss.backward()
        optimizer.step()
        if writer is not None:
            writer.add_scalar("loss", loss.item(), step)

    total = torch.tensor([sum(one.double().sum().item() for one in ddp_model.parameters())], dtype=torch.float64)
    least, most = total.clone(), total.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if rank == 0:
        print(f"parameters: {total.item():.12f}, equal on all ranks: {bool(least == most)}")
        writer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
