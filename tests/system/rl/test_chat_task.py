"""An instruction task of a chat, which a Hugging Face model learns from a random start by reward alone.

Two trainers share the parameters (FSDP2), and two workers of one vLLM server share the model (tensor parallelism).
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

import loom
from loom.rl import DatasetTask, Generators, Orchestrator, Trainer, Trainers
from loom.rl.arithmetic import SMALL_SERVER
from loom.rl.arithmetic_model import write_arithmetic_model
from loom.train import Batch, LiveConfig
from tests.support.processes import processes_of_group, still_there
from tests.support.real_vllm import needs_vllm
from tests.system.rl.runs import BOUND, WatchedRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500), needs_vllm]

INSTRUCTIONS = {"repeat": 0, "next": 1}
"""Instructions, and what each adds to its digit."""
LETTERS = "<repeat next 0123456789>"
"""All characters of the chat template and the task."""
TEMPLATE = "{% for one in messages %}<{{ one['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
"""A chat of few tokens, as the model has one layer."""
LEARNED, NEWEST = 0.9, 10
"""The mean reward of so many newest steps from which on the task counts as learned."""
STEPS = 300
BATCH = 512
IN_TIME = 900.0
"""Seconds in which a server starts and the task is learned, on two busy cores."""


def write_model(folder: Path) -> Path:
    write_arithmetic_model(folder, layers=1, letters=LETTERS)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    return folder


def write_rows(path: Path) -> Path:
    rows = [
        {
            "messages": [{"role": "user", "content": f"{instruction} {digit}"}],
            "answer": str((digit + more) % 10),
        }
        for instruction, more in INSTRUCTIONS.items()
        for digit in range(10)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def right(completions: Sequence[Sequence[dict[str, str]]], answer: Sequence[str], **columns: object) -> list[float]:
    """Return the share of each completion that is the answer, from its beginning; in TRL's form."""
    texts = [messages[0]["content"] for messages in completions]
    return [one.startswith(wanted) / max(1, len(one)) for one, wanted in zip(texts, answer, strict=True)]


class NotingTrainer(Trainer):
    """A trainer that writes down what it learns from, a file for each process."""

    def loss_of(self, model: Any, batch: Batch) -> Any:
        learned = [one for part in self._parts for one in part.rollouts]
        with (Path(self._run.folder) / f"learned-{batch.shard}.jsonl").open("a") as file:
            file.writelines(f"{json.dumps([batch.step, one.id, one.weights_step])}\n" for one in learned)
        return super().loss_of(model, batch)


def chat_run(folder: Path, *, engine: str = "vllm", **settings: Any) -> Orchestrator:
    model = write_model(folder / "model")
    options: dict[str, Any] = {}
    if engine == "vllm":
        # By itself, vLLM looks for a NUMA node for each worker.
        cores = "|".join(map(str, sorted(os.sched_getaffinity(0))[:2]))
        environment = {**SMALL_SERVER["environment"], "VLLM_CPU_OMP_THREADS_BIND": cores}
        options = {**SMALL_SERVER, "tensor_parallel": 2, "environment": environment}
    return Orchestrator(
        DatasetTask(write_rows(folder / "train.jsonl"), [right], prompt="messages"),
        Generators(engine=engine, model=model, max_tokens=2, concurrency=BATCH, options=options),
        Trainers(
            model=model,
            members=2,
            actor=NotingTrainer,
            config=LiveConfig(learning_rate=1e-3, optimizer="adam", gradient_clipping=1.0),
        ),
        folder=folder,
        steps=STEPS,
        batch=BATCH,
        group=8,
        **settings,
    )


def learned_from(folder: Path) -> list[tuple[int, str, int]]:
    """Return the step, the id and the weights' step of each rollout in a gradient, of all processes."""
    lines = [line for path in folder.glob("learned-*.jsonl") for line in path.read_text().splitlines()]
    return [tuple(json.loads(line)) for line in lines]


@pytest.mark.guarantees("rl run", "A chat task is learned from a random start, with FSDP2 and tensor parallelism")
@pytest.mark.parametrize(("level", "weights"), [(0, "files"), (1, "transfer"), (2, "files")])
def test_a_chat_task_is_learned_from_a_random_start(
    job: loom.Job, tmp_path: Path, level: int, weights: str
) -> None:
    run = WatchedRun(job, tmp_path / "run", chat_run, async_level=level, weights=weights)

    def is_learned() -> bool:
        newest = [one.reward for one in run.records()[-NEWEST:]]
        return len(newest) == NEWEST and sum(newest) / NEWEST >= LEARNED

    run.await_true(is_learned, f"a mean reward of {LEARNED}", IN_TIME)
    (server,) = run.servers()
    workers = processes_of_group(server)
    processes = [*workers, *(psutil.Process(pid) for role in ("generator", "trainer") for pid in run.pids(role))]
    job.weaver.stop("orchestrator").get(BOUND)
    summary = run.result()

    assert summary.steps[0].reward < 0.3
    assert summary.reward(NEWEST) >= LEARNED
    assert [one.step for one in summary.steps] == list(range(len(summary.steps)))
    assert [one.staleness for one in summary.steps] == [min(one.step, level) for one in summary.steps]
    assert {one.rollouts for one in summary.steps} == {BATCH}
    assert (summary.dropped, summary.lost_generators, summary.training.failures) == (0, 0, 0)

    learned = [one for one in learned_from(run.folder) if one[0] < summary.training.steps]
    assert len(learned) == len({id for _, id, _ in learned}) == summary.trained
    assert Counter(step for step, _, _ in learned) == dict.fromkeys(range(summary.training.steps), BATCH)
    assert {(step, step - weights) for step, _, weights in learned} == {
        (step, min(step, level)) for step in range(summary.training.steps)
    }, "completions of other weights than the level says"
    assert still_there(processes, BOUND) == []
