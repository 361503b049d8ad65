"""What a researcher runs on the laptop: the demo's digits training, then one that survives losing a pod.

``python digits.py HOW`` with HOW one of ``compute``, ``selector``, ``http``, ``meshes`` or ``url``. It says what it
does in lines of JSON on standard output, and goes on where it waits when it is given a line on standard input.
"""

import json
import os
import sys
import time
from pathlib import Path

import loom
from loom.cli.demo_training import DemoTraining, summarize
from loom.train import Timeouts, digits

BOUND = 120.0
BACK_WITHIN = 300.0
"""Seconds in which a pod is back on a busy machine, which may have to be deployed again."""
PATIENCE = 120
"""Seconds after which the kubelet starts a pod's server again that does not come up."""


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
            "workers": kt.Compute(cpus=1, replicas=2, image=image, launch_timeout=PATIENCE),
            "dataloaders": kt.Compute(cpus=1, replicas=1, image=image, launch_timeout=PATIENCE),
        }
        return loom.KubernetesJob(meshes=meshes)
    if how == "http":
        compute = kt.Compute(cpus=1, replicas=3, image=image, launch_timeout=PATIENCE)
        return loom.KubernetesJob(compute=compute, transport="http")
    return loom.KubernetesJob(compute=kt.Compute(cpus=1, replicas=3, launch_timeout=PATIENCE))


def needed_by(job):
    """The addresses of the pods that have the session and the weaver, if they are pods with workers."""
    meshes = getattr(job, "_meshes", ())
    return [meshes[0].status()["weaver"], job.run(lambda: os.environ["POD_IP"])] if meshes else []


def demo(job):
    """The training of `loom demo`, with a process lost on purpose."""
    hosts = job.state().workers.extent.nelements
    began = time.perf_counter()
    events = list(DemoTraining(job, Path(os.environ["CHECKPOINTS"]), hosts, 120).run())
    summary = summarize(events, hosts, 1, 0.0, time.perf_counter() - began)
    say("demo", accuracy=summary.accuracy, hosts=hosts, transport=job.transport)


def training(job):
    """A training that loses a pod, and later the laptop's link."""
    hosts = job.hosts.extent.nelements
    settings = {"pace": 0.1, "spares": 0, "evaluate_every": 100, "timeouts": Timeouts(), "stuck": 30.0}
    run = digits.start(job, hosts, 100_000, **settings)
    follow = job.weaver.events(after=0, follow=True)
    events = (event for event in follow if (event.replica or "").startswith("train_"))  # the demo's are digits_…
    for event in events:
        if event.kind == "group_trains":
            break
    say("training", session=job.session)
    for event in events:
        if event.kind == "group_restored":
            say("restored", seconds=event.data["seconds"], host=event.data["host"])
            break
    for event in job.events(timeout=BACK_WITHIN):
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
    events = [
        f"{event.time:.1f} {event.kind} {event.replica} {event.data}"
        for event in result.events
        if event.kind.startswith(("group_", "job_"))
    ]
    say("result", ending=result.ending, steps=result.steps, failures=result.failures, events=events)


def main(how):
    with opened(how) as job:
        hosts, meshes = job.hosts.extent.nelements, sorted(vars(job.state()))
        about = {"hosts": hosts, "meshes": meshes, "transport": job.transport, "needed": needed_by(job)}
        say("open", session=job.session, **about)
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
