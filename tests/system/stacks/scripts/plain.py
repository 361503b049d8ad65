"""Fit a network: https://docs.pytorch.org/tutorials/beginner/basics/optimization_tutorial.html."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter


def train_loop(dataloader, model, loss_fn, optimizer, scheduler, writer, steps, done):
    model.train()
    for X, y in dataloader:
        loss = loss_fn(model(X), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

        writer.add_scalar("Loss/train", loss.item(), done)
        done += 1
        if done % 10 == 0:
            print(f"loss: {loss.item():>7f}  [{done:>5d}/{steps:>5d}]")
        if done == steps:
            break
    return done


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("log_dir")
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=256)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    images = torch.rand(2048, 64)
    dataloader = DataLoader(TensorDataset(images, images[:, :10].argmax(1)), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(64, arguments.width), nn.ReLU(), nn.Linear(arguments.width, 10))
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99999)
    writer = SummaryWriter(arguments.log_dir)
    done = 0
    while done < arguments.max_steps:
        done = train_loop(dataloader, model, loss_fn, optimizer, scheduler, writer, arguments.max_steps, done)
    writer.close()
    print("Done!")


if __name__ == "__main__":
    main()
