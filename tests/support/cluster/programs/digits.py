"""What a researcher runs on the laptop: the demo's digits training, then one that survives losing a pod.

``python digits.py HOW`` with HOW one of ``compute``, ``selector``, ``http``, ``meshes`` or ``url``. It says what it
does in lines of JSON on standard output, and goes on where it waits when it is given a line on standard input.
"""

import json
import os
import sys
import time

import loom
from loom.cli.demo_job import DigitsJob
from loom.cli.demo_summary import summarize
from loom.train import Batch, FaultTolerantJob, LiveConfig, TrainerActor

BOUND = 120.0


class Digits(TrainerActor):
    def warm_up(self):
        import torch
        from sklearn.datasets import load_digits

        images, labels = map(torch.tensor, load_digits(return_X_y=True))
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        self.images, self.labels = images[order].float() / 16, labels[order]

    def build(self):
        from torch import nn

        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def loss(self, model, batch: Batch):
        import torch

        time.sleep(0.03)
        chosen = torch.randint(1437, (batch.size,), generator=torch.Generator().manual_seed(batch.seed))
        return torch.nn.functional.cross_entropy(model(self.images[chosen]), self.labels[chosen])

    def evaluate(self, model):
        right = model(self.images[1437:]).argmax(dim=1) == self.labels[1437:]
        return {"accuracy": right.float().mean().item()}


class Counter(loom.Actor):
    def __init__(self):
        self.n = 0

    @loom.endpoint
    def add(self, k):
        self.n += k
        return self.n


def say(event, **about):
    print(json.dumps({"event": event, **about}), flush=True)


def opened(how):
    """The job, as each way to deploy gives it."""
    if how == "url":
        return loom.connect()
    import kubetorch as kt

    image = kt.Image(image_id="local")  # the pods have this machine's installation
    if how == "selector":
        return loom.KubernetesJob(selector={"app": "mine"}, name="chosen", service="mine-headless")
    if how == "meshes":
        meshes = {
            "workers": kt.Compute(cpus=1, replicas=2, image=image),
            "dataloaders": kt.Compute(cpus=1, replicas=1, image=image),
        }
        return loom.KubernetesJob(meshes=meshes)
    if how == "http":
        return loom.KubernetesJob(compute=kt.Compute(cpus=1, replicas=3, image=image), transport="http")
    return loom.KubernetesJob(compute=kt.Compute(cpus=1, replicas=3))


def demo(job):
    """The training of `loom demo`, with a process lost on purpose."""
    mesh, hosts = job.state().workers, job.state().workers.extent.nelements
    checkpoint = os.environ["CHECKPOINTS"] + "/checkpoint.pt"
    began = time.perf_counter()
    events = list(DigitsJob(mesh, job.weaver, checkpoint, hosts, 1, 120).run())
    summary = summarize(events, hosts, 1, 0.0, time.perf_counter() - began)
    say("demo", accuracy=summary.accuracy, hosts=hosts, transport=job.transport)


def training(job):
    """A training that loses a pod, and later the laptop's link."""
    hosts = job.hosts.extent.nelements
    config = LiveConfig(learning_rate=0.1)
    run = FaultTolerantJob(Digits, groups=hosts, steps=100_000, evaluate_every=100, config=config).start(job)
    events = job.weaver.events(after=0, follow=True)
    for event in events:
        if event.kind == "group_trains":
            break
    say("training", session=job.session)
    for event in events:
        if event.kind == "group_restored":
            say("restored", seconds=event.data["seconds"], host=event.data["host"])
            break
    for event in job.events(timeout=BOUND):
        if event.name == "host_back":
            say("host_back")
            break
    counters = job.hosts.spawn_procs().spawn("counters", Counter)
    say("counted", values=list(counters.add.call(1).get(BOUND).values()))
    sys.stdin.readline()  # the link is cut
    answers = [counters.add.call(1) for _ in range(50)]
    say("asked")
    last = [sorted(set(answer.get(BOUND).values())) for answer in answers]
    say("answered", values=last)
    job.weaver.stop("train").get(BOUND)
    result = run.result(BOUND)
    say("result", ending=result.ending, steps=result.steps, failures=result.failures)


def main(how):
    with opened(how) as job:
        hosts, meshes = job.hosts.extent.nelements, sorted(vars(job.state()))
        say("open", session=job.session, hosts=hosts, meshes=meshes, transport=job.transport)
        try:
            demo(job)
            if "--kill" in sys.argv:
                training(job)
        except BaseException:
            job.detach()  # the pods stay, to be looked at
            raise
    say("closed")


if __name__ == "__main__":
    main(sys.argv[1])
