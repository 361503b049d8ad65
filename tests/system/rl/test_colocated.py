"""Generators that use the trainers' GPUs in turns with these. There is no GPU here: the servers are stand-ins."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

import loom
from loom.rl import Orchestrator, arithmetic_run
from tests.support.vllm_stand_in import environment
from tests.system.rl.runs import WatchedRun, assert_exact

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 4
TURNS = {
    "/inference/v1/generate": "generate",
    "/sleep": "sleep",
    "/wake_up": "wake",
    "/collective_rpc": "load",
}


def colocated_run(folder: Path, **settings: Any) -> Orchestrator:
    run = arithmetic_run(folder, **settings)
    object.__setattr__(run.generators, "colocated", True)  # past the check that there are GPUs
    return run


@pytest.mark.guarantees("rl run", "Colocated generators sleep while trainers train, and get weights when they wake")
def test_servers_sleep_while_trainers_train_and_get_weights_when_they_wake(job: loom.Job, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    variables = {"STAND_IN_TOKENS": "13", "STAND_IN_DEVICE": "cuda", "STAND_IN_CALLS": str(calls)}
    options = {"installation": str(environment(tmp_path / "stand-in")), "environment": variables}
    settings = {"steps": STEPS, "async_level": 0, "engine": "vllm", "options": options, "batch": 32, "group": 4}
    run = WatchedRun(job, tmp_path / "run", colocated_run, **settings)
    summary = run.result()

    assert_exact(summary, STEPS)
    assert summary.lost_generators == 0
    made = [
        (float(time), TURNS[path]) for time, path in map(str.split, calls.read_text().splitlines()) if path in TURNS
    ]
    order = [turn for turn, _ in groupby(turn for _, turn in made)]
    assert order == ["generate", *(["load", "generate", "sleep", "wake"] * STEPS)[:-1]], "the first is a check"

    slept = [time for time, turn in made if turn == "sleep"]
    woke = [time for time, turn in made if turn == "wake"] + [float("inf")]
    events = [json.loads(line) for file in (run.folder / "timing").glob("*.jsonl") for line in file.open()]
    trained = sorted(one["time"] for one in events if one["name"] == "train.step.done")
    assert len(trained) == STEPS
    for step in range(STEPS):
        assert slept[step] < trained[step] < woke[step]
