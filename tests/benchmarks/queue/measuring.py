"""Measures each way in each set-up, in rounds, on generators of a local cluster."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import loom
from loom.rl.generation import weight_files as weights
from loom.rl.generation.generator import Generator
from tests.benchmarks.queue.load import STEPS, Target, Window, measure_window
from tests.benchmarks.queue.plan import SET_UPS, WAYS, QueuePlan, SetUp
from tests.benchmarks.queue.waiting import SIZE, WaitingModel, WaitingTokenizer

Windows = dict[str, dict[str, list[Window]]]
"""What was measured: by set-up, by way, of each round."""


def measure_queue(plan: QueuePlan, say: Callable[[str], object]) -> Windows:
    """Measure all ways in turns, in one set-up after the other."""
    found: Windows = {}
    with tempfile.TemporaryDirectory() as folder, loom.local(hosts=1) as job:
        job.print_logs = False
        for step in STEPS:
            weights.save({"weight": torch.zeros(SIZE)}, {}, folder, step)
        for set_up in SET_UPS:
            found[set_up.name] = {way: [] for way in WAYS}
            procs = job.hosts.spawn_procs(per_host={"gpus": 1}, name=f"generator_{SET_UPS.index(set_up)}")
            target = _target(procs, set_up, folder)
            for number in range(plan.rounds):
                # No way always comes after the same other one.
                for way in random.Random(f"{set_up.name} {number}").sample(WAYS, len(WAYS)):
                    say(f"{set_up.name}, round {number + 1} of {plan.rounds}: {way}")
                    found[set_up.name][way].append(job.run(measure_window, target, set_up, plan, way))
            procs.stop().get()
    return found


def _target(procs: loom.ProcMeshProxy, set_up: SetUp, folder: str) -> Target:
    spawned = procs.spawn(
        "generator",
        Generator,
        partial(WaitingModel, set_up.step_s),
        WaitingTokenizer(set_up.decode_s),
        concurrency=64,
        folder=folder,
    )
    generator = spawned.slice(hosts=0, gpus=0)
    url = generator.serve.call_one(admin_port=0, connections=set_up.accepted).get()
    return Target(generator, url, generator.admin_url.call_one().get(), Path(folder))
