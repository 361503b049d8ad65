"""Three replica groups learn to read handwritten digits; one is killed meanwhile, and this prints what it cost.

Each group is a process with the whole network. They average their gradients in each step, so that all have the same
parameters. When one dies the others go on; a spare process takes its place, and the parameters from the others.
"""

import os
import signal
import time

import loom
from loom.train import Batch, FaultTolerantJob, LiveConfig, TrainerActor, status


class Digits(TrainerActor):
    def warm_up(self):
        import torch  # imported where it runs
        from sklearn.datasets import load_digits

        images, labels = map(torch.tensor, load_digits(return_X_y=True))
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        self.images, self.labels = images[order].float() / 16, labels[order]

    def build(self):
        from torch import nn

        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def loss(self, model, batch: Batch):
        import torch

        time.sleep(0.03)  # as if the network were larger
        chosen = torch.randint(1437, (batch.size,), generator=torch.Generator().manual_seed(batch.seed))
        return torch.nn.functional.cross_entropy(model(self.images[chosen]), self.labels[chosen])

    def evaluate(self, model):
        right = model(self.images[1437:]).argmax(dim=1) == self.labels[1437:]
        return {"accuracy": right.float().mean().item()}


with loom.local(hosts=2) as job:
    training = FaultTolerantJob(
        Digits, groups=3, steps=800, spares=1, evaluate_every=100, config=LiveConfig(learning_rate=0.1)
    )
    run = training.start(job)  # in the cluster: this program only watches, and could go away
    print("three groups and a spare import torch")
    victim = None
    shown = 0
    while not run.done():
        time.sleep(0.1)
        now = job.weaver.replicas()
        ours = sorted((id, one) for id, one in now.items() if one.group == "train" and one.step)
        if ours and ours[0][1].step >= shown + 100 and "accuracy" in ours[0][1].metrics:
            shown = ours[0][1].step
            print(f"step {shown:4}   " + "   ".join(f"{id} loss {one.metrics['loss']:.3f}" for id, one in ours))
        if victim is None and shown >= 200:
            state = job.run(status, "train")
            if any(spare.state == "ready" for spare in state.spares):
                victim = next(group for group in state.groups if group.replica == "train_1")
                os.kill(victim.pids[0], signal.SIGKILL)
                killed = time.time()
                print(f"killed process {victim.pids[0]}, which was {victim.replica}")

    result = run.result()

for event in result.events:
    after = f"  {event.time - killed:5.2f} s later {event.replica}" if victim else ""
    if event.kind == "group_failed":
        print(f"{after} is missed: {event.data['reason']}")
    if event.kind == "group_restored":
        print(f"{after} trains again, with the state of {event.data['restored']}")
twice = max(report.discarded for report in result.reports.values())
print(f"{result.steps} steps in {result.seconds:.1f} s, {twice} of them computed twice")
print("the parameters of all groups are " + ("the same" if len(set(result.hashes.values())) == 1 else "DIFFERENT"))
print(f"{result.metrics['accuracy']:.1%} of the test digits are read correctly")
raise SystemExit(0 if result.metrics["accuracy"] >= 0.97 else 1)
