"""What a trainer waits for: it is woken, and looks at no folder meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from loom.rl import trainer as module
from loom.rl.arithmetic import Characters
from loom.rl.generation.tensor_files import unchanged
from loom.rl.rollouts import Rollout, RolloutStore, split
from loom.rl.settings import TrainerRun, Trainers, Weights
from loom.rl.trainer import Trainer
from loom.train.settings import Batch

BOUND = 30.0  # seconds


class Waiting(Trainer):
    """A trainer without a model."""

    def _publish(self, model: Any, step: int) -> None:
        self._published = step

    def attend(self) -> None:
        self.looked.release()

    def loss_of(self, model: Any, batch: Batch) -> Any:
        return [one.id for part in self._parts for one in part.rollouts]


def made(folder: Path, weights: Weights = Weights.FILES) -> Waiting:
    run = TrainerRun(str(folder), steps=9, weights=weights, temperature=1.0, keep=2, lines=False)
    trainer = Waiting(Trainers(lambda: None, Characters()), run)
    trainer.looked = threading.Semaphore(0)
    return trainer


def test_a_step_begins_when_it_is_told_of_its_rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ATTEND_EVERY", BOUND)
    trainer, found = made(tmp_path), []
    thread = threading.Thread(target=lambda: found.append(trainer.loss(None, Batch(0, 1, 0, 1))))
    thread.start()
    assert trainer.looked.acquire(timeout=BOUND)

    RolloutStore(tmp_path).write(split([Rollout("0.0.0", [1], [2], [0.0], 1.0, 1.0, 0)], 0, 1))
    trainer._arrived.set()
    thread.join(BOUND / 2)

    assert found == [["0.0.0"]]


def test_the_writer_of_weights_says_when_they_are_there(tmp_path: Path) -> None:
    trainer = made(tmp_path)
    answer: list[int | None] = []
    thread = threading.Thread(target=lambda: answer.append(trainer._await_weights(2, BOUND)))
    thread.start()
    trainer._announce(1)
    trainer._announce(3)
    thread.join(BOUND / 2)

    assert answer == [3]
    assert trainer._await_weights(4, 0.0) is None


def test_another_process_answers_at_once_that_it_writes_none(tmp_path: Path) -> None:
    trainer = made(tmp_path)
    trainer._shard = 1

    assert trainer._await_weights(0, BOUND) is None


def test_kept_weights_are_the_newest_ones(tmp_path: Path) -> None:
    trainer = made(tmp_path, Weights.MESSAGES)
    for step in range(4):
        trainer._announce(step, {})

    assert sorted(trainer._kept) == [2, 3]
    assert [trainer._await_weights(step, 0.0) for step in (1, 2, 3)] == [3, 2, 3]


def layers_of(step: int) -> dict[str, torch.Tensor]:
    """Return a model's tensors of a step: one does not learn."""
    return {"embedding": torch.ones(100, 4), "head": torch.full((50, 4), float(step)), "zero": torch.zeros(2)}


def bytes_kept(trainer: Trainer) -> int:
    storages = [one.untyped_storage() for state in trainer._kept.values() for one in state.values()]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


async def test_few_weights_are_kept_and_share_the_tensors_that_do_not_change(tmp_path: Path) -> None:
    run = TrainerRun(str(tmp_path), steps=9, weights=Weights.TRANSFER, temperature=1.0, keep=3, lines=False)
    trainer = Trainer(Trainers(lambda: None, Characters()), run)
    still, learning = (100 * 4 + 2) * 4, 50 * 4 * 4

    def publish(step: int) -> tuple[list[int], int]:
        trainer._keep(None, layers_of(step), step, unchanged)
        return sorted(trainer._kept), bytes_kept(trainer)

    assert publish(0) == ([0], still + learning)
    assert publish(1) == ([0, 1], still + 2 * learning), "step 0 may be asked for"
    await trainer._send_weights(0, [])
    assert (sorted(trainer._kept), bytes_kept(trainer)) == ([1], still + learning)
    await trainer._send_weights(1, [])
    assert sorted(trainer._kept) == [1], "the newest, for generators that start again"
    assert publish(2) == ([2], still + learning)
    for step in (3, 4, 5):
        publish(step)
    assert (sorted(trainer._kept), bytes_kept(trainer)) == ([3, 4, 5], still + 3 * learning)
    assert publish(4) == ([3, 4], still + 2 * learning), "steps that are made again replace the others"
    for step, state in trainer._kept.items():
        assert torch.equal(state["head"], layers_of(step)["head"])
