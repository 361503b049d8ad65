"""What a researcher runs on the laptop whose training in pods is broken on purpose: ``python chaos.py STEPS``.

It says what it does in lines of JSON, trains until it is given a line on standard input, and says what came of it.
"""

import json
import sys
import time

import loom
from loom.train import Timeouts, digits

BOUND = 120.0


def say(event, **about):
    print(json.dumps({"event": event, **about}), flush=True)


def main(steps):
    with loom.connect() as job:
        run = digits.start(job, 2, steps, pace=0.03, spares=0, stuck=30.0, timeouts=Timeouts())
        begun = time.monotonic()
        while sum(bool(one.step) for one in job.weaver.replicas().values() if one.state == "running") < 2:
            assert time.monotonic() < begun + BOUND
            time.sleep(0.2)
        say("training", session=job.session)
        for line in sys.stdin:
            if line.strip() == "stop":
                break
        told = job.weaver.stop("train").get(BOUND)
        say("stopping", **{replica: one.reason or "ok" for replica, one in told.items()})
        try:
            result = run.result(BOUND)
        except loom.WaitTimeout:
            say(
                "goes on",
                **{name: f"{one.state} at step {one.step}" for name, one in job.weaver.replicas().items()},
            )
            raise
        say("result", ending=result.ending, steps=result.steps, failures=result.failures)
    say("closed")


if __name__ == "__main__":
    main(int(sys.argv[1]))
