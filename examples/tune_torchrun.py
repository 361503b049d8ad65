"""A script for torchrun, which Loom has not started, that can be watched and changed while it trains.

In one terminal, `loom up`. In another one, with the variables that it prints::

    export $(loom weaver)        # LOOM_WEAVER, where threadlets find the weaver
    torchrun --nproc-per-node 2 examples/tune_torchrun.py

And in a third one, with the same variables::

    loom metrics digits_0 loss --plot
    loom config set learning_rate=0.01 --replica 'digits_*'
    loom stop --replica 'digits_*'

Without LOOM_WEAVER it trains all the same. Each process trains a network of its own here. Processes that average
their gradients need nothing more: with a process group, all ranks change at one step.
"""

import os

import torch
from sklearn.datasets import load_digits
from torch import nn

import loom

rank, steps = int(os.environ["RANK"]), int(os.environ.get("STEPS", 100_000))
torch.set_num_threads(1)
torch.manual_seed(rank)
images, labels = map(torch.tensor, load_digits(return_X_y=True))
batches = list(zip((images.float() / 16).split(32), labels.split(32), strict=True))
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

threadlet = loom.Threadlet(f"digits_{rank}", config={"learning_rate": 0.001})  # the first line that is new


@threadlet.handler("learning_rate")  # the second, with what it needs
def set_learning_rate(value: float):
    optimizer.param_groups[0]["lr"] = value


for number in range(steps):
    digits, truth = batches[number % len(batches)]
    with threadlet.step(number, max_step=steps) as step:  # and the third
        loss = nn.functional.cross_entropy(model(digits), truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step.metrics.update(loss=loss, lr=optimizer.param_groups[0]["lr"])
    if threadlet.should_stop:
        break
print(f"rank {rank}: {number + 1} steps, loss {loss.item():.3f}, lr {optimizer.param_groups[0]['lr']:g}")
