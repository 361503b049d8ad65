"""Shard a transformer over processes: https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.tensorboard import SummaryWriter


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("log_dir")
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=4)
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(32, 16), *layers, nn.Linear(16, 32))
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    writer = SummaryWriter(arguments.log_dir) if rank == 0 else None

    torch.manual_seed(rank)
    for step in range(arguments.max_steps):
        x = torch.randint(0, 32, (arguments.batch_size, 8))
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optim.step()
        optim.zero_grad()
        if writer is not None:
            writer.add_scalar("loss", loss.item(), step)

    if rank == 0:
        print(f"loss below 3: {loss.item() < 3}")
        writer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
