"""What a researcher runs: a training with checkpoints, until it ends or its session is lost, whatever restarts it.

It says what it does in lines of JSON, and fails if what is learnt in the end is not, to the bit, what a training
alone learns.
"""

import argparse
import json

import cloudpickle

import loom
from tests.system.chaos import digits_alike

BOUND = 400.0
SHOWN_EVERY = 25

cloudpickle.register_pickle_by_value(digits_alike)  # the nodes have no tests


def say(event, **about):
    print(json.dumps({"event": event, **about}), flush=True)


def opened(job):
    say("open", session=job.session, hosts=job.hosts.extent.nelements)
    return job


def started(job, options):
    settings = {"pace": options.pace, "checkpoints": options.checkpoints, "checkpoint_every": options.every}
    return digits_alike.alike_job(options.steps, spares=0, **settings).start(job, restarts=options.restarts)


def result(job, run):
    shown = 0
    while True:
        try:
            return run.result(0.5)
        except loom.WaitTimeout:
            if (step := step_of(job)) >= shown + SHOWN_EVERY:
                shown = step
                say("step", step=step)


def step_of(job):
    try:
        return max((one.step or 0 for one in job.weaver.replicas().values() if one.group == "train"), default=0)
    except loom.LoomError:  # the weaver is away, as it is while its gateway ends and starts
        return 0


def summary_of(job, run):
    while True:
        try:
            return result(job, run)
        except loom.SessionRestarted:  # the job and the function's handle go on
            say("restarted")
            opened(job)


def curve(run):
    points = run.history("loss")
    return {"name": run.name, "state": run.state, "steps": [point.step for point in points]}


def main(options):
    job = opened(loom.connect(options.address, persist=True, timeout=BOUND))
    try:
        summary = summary_of(job, started(job, options))
    except loom.LoomError as error:
        say("lost", error=type(error).__name__, text=str(error))
        return
    runs = [curve(run) for run in job.weaver.runs()]
    job.close()
    restored = max(report.restored_step for report in summary.reports.values())
    if restored + 2 * digits_alike.HASH_EVERY <= options.steps:  # else nothing but the end was left to do
        digits_alike.assert_as_without_faults(summary, options.steps)
    moved = [event.data["reason"] for event in summary.events if event.kind == "group_moved"]
    accuracy = summary.metrics["accuracy"]
    say("finished", steps=summary.steps, restored=restored, accuracy=accuracy, runs=runs, moved=moved)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("checkpoints", help="the folder of the checkpoints")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--pace", type=float, default=0.1, help="seconds that a step takes at least")
    parser.add_argument("--every", type=int, default=20, help="steps from one checkpoint to the next")
    parser.add_argument("--restarts", type=int, default=0)
    main(parser.parse_args())
