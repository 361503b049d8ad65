"""Three replica groups learn to read digits while a plan of faults strikes them; exits as `loom inject run` does.

python examples/chaos/digits.py [PLAN] [--steps N] [options of loom inject run]
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import loom
from loom.train import digits

CHECKPOINTS = "/tmp/loom-digits"  # where the plan corrupts one

parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
parser.add_argument("plan", nargs="?", default=str(Path(__file__).parent / "everything-digits.yaml"))
parser.add_argument("--steps", type=int, default=1200)
arguments, options = parser.parse_known_args()

shutil.rmtree(CHECKPOINTS, ignore_errors=True)
with loom.local(hosts=3, env={"LOOM_INJECTABLE": "1"}) as job:
    run = digits.start(job, groups=3, steps=arguments.steps, pace=0.05, spares=1, checkpoints=CHECKPOINTS)
    print("three groups and a spare import torch")
    while not run.done():
        if sum(one.state == "running" and bool(one.step) for one in job.weaver.replicas().values()) >= 3:
            break
        time.sleep(0.2)
    command = [sys.executable, "-c", "from loom.cli import main; main()", "inject", "run", arguments.plan, *options]
    ended = subprocess.run(command, env={**os.environ, "LOOM_URL": job.url, "LOOM_TOKEN": job.token})
    if ended.returncode == 0:
        result = run.result()  # the plan may be over before the training
        print(
            f"{result.steps} steps in {result.seconds:.1f} s; {result.metrics['accuracy']:.1%} are read correctly"
        )
        print("the parameters are", "the same" if len(set(result.hashes.values())) == 1 else "DIFFERENT")
sys.exit(ended.returncode)
