"""Change the learning rate of a training while it runs, and see at which step each process took it.

Two processes learn to read handwritten digits, each with a start of its own. Their learning rate is far too small,
which can be seen from here, and changed from here: nothing is started again.
"""

import time

import loom
from loom import Actor, current_rank, endpoint


class Trainer(Actor):
    @endpoint
    def train(self):
        """Train until told to stop; returns the share of the test digits that are read correctly."""
        import torch  # imported where it runs
        from sklearn.datasets import load_digits
        from torch import nn

        torch.set_num_threads(1)
        torch.manual_seed(current_rank().rank)
        images, labels = map(torch.tensor, load_digits(return_X_y=True))
        images = images.float() / 16
        batches = list(zip(images[:1440].split(32), labels[:1440].split(32), strict=True))
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0001)

        # These lines are all that it takes. A process that Loom spawns finds the weaver by itself.
        threadlet = loom.Threadlet(config={"learning_rate": 0.0001})

        @threadlet.handler("learning_rate")
        def set_learning_rate(value: float):
            if value <= 0:
                raise ValueError("a learning rate is larger than 0")
            for group in optimizer.param_groups:
                group["lr"] = value

        number = 0
        while not threadlet.should_stop:
            digits, truth = batches[number % len(batches)]
            with threadlet.step(number) as step:
                loss = nn.functional.cross_entropy(model(digits), truth)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step.metrics["loss"] = loss
                step.metrics["lr"] = optimizer.param_groups[0]["lr"]  # what the optimizer goes by
            number += 1
        threadlet.close()
        return (model(images[1440:]).argmax(dim=1) == labels[1440:]).float().mean().item()


def look(weaver, times):
    """Show twice a second what the trainers report."""
    for _ in range(times):
        time.sleep(0.5)
        for id, replica in sorted(weaver.replicas().items()):
            loss, lr = replica.metrics["loss"], replica.metrics["lr"]
            print(f"  {id:28} step {replica.step:5}   loss {loss:.3f}   lr {lr:g}")


def change(weaver, **config):
    """Change the configuration of all trainers, and show what each made of it."""
    print(f"change {config}")
    for id, answer in sorted(weaver.update_config("trainers", **config).get(timeout=60).items()):
        for key, (old, new) in answer.changes.items():
            print(f"  {id:28} step {answer.step:5}   applied: {key} from {old:g} to {new:g}")
        for reason in answer.refused.values():
            print(f"  {id:28} step {answer.step:5}   refused: {reason}")


with loom.local() as job:
    trainers = job.hosts.spawn_procs(per_host={"gpus": 2}, name="trainers").spawn("trainers", Trainer)
    accuracies = trainers.train.call()  # goes on while this program does other things
    while sum("lr" in replica.metrics for replica in job.weaver.replicas().values()) < 2:
        time.sleep(0.1)
    print("two processes train")
    look(job.weaver, times=3)
    change(job.weaver, learning_rate=0.1)
    look(job.weaver, times=6)
    change(job.weaver, learning_rate=-1)
    change(job.weaver, learning_rate="0.01")  # text will do, as from a command line
    look(job.weaver, times=2)
    job.weaver.stop("trainers").get(timeout=60)
    for point, accuracy in accuracies.get():
        print(f"rank {point.rank} reads {accuracy:.1%} of the test digits")
