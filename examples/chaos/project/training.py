"""A training for the tests beside it: it fits a line, writes checkpoints, and starts again from them.

The replica, its group and the weaver are in its environment: LOOM_REPLICA, LOOM_GROUP and LOOM_WEAVER.
"""

import json
import os
import random
import sys
import time
from pathlib import Path

import loom

folder = Path(sys.argv[1])
threadlet = loom.Threadlet(injectable=True)
checkpoint = folder / f"{threadlet.replica_id}.json"

state = {"step": 0, "slope": 0.0}
if checkpoint.exists():
    state = json.loads(checkpoint.read_text())

while not threadlet.should_stop:
    with threadlet.step(state["step"]) as step:
        x = random.Random(state["step"]).uniform(-1.0, 1.0)
        error = state["slope"] * x - 3.0 * x
        state["slope"] -= 0.02 * error * x
        step.metrics["loss"] = (state["slope"] - 3.0) ** 2
        time.sleep(0.02)
    state["step"] += 1
    if state["step"] % 5 == 0:
        fresh = checkpoint.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(state))
        fresh.replace(checkpoint)
threadlet.close()
