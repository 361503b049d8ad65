"""Trackers as sources of metrics: numbers are taken, and the trackers get what they were given."""

from __future__ import annotations

import threading
from fractions import Fraction
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from loom.instrument import trackers
from loom.instrument import training as trainings
from loom.instrument.trackers import numbers_in


def test_numbers_are_taken_and_everything_else_is_passed_over() -> None:
    class Hostile:
        @property
        def ndim(self) -> int:
            raise ZeroDivisionError

    given = {
        "float": 0.5,
        "int": 2,
        "bool": True,
        "text": "x",
        "none": None,
        "nested": {"a": 1},
        "list": [1.0],
        "fraction": Fraction(1, 4),
        "numpy": np.float32(1.5),
        "array": np.zeros(3),
        "scalar": torch.tensor(2.5, requires_grad=True),
        "tensor": torch.zeros(2),
        "hostile": Hostile(),
        3: 1.0,
    }

    assert numbers_in(given) == {"float": 0.5, "int": 2.0, "fraction": 0.25, "numpy": 1.5, "scalar": 2.5}
    assert numbers_in("no mapping") == {}


class Recorder:
    """Stands in for the class of a tracker, and keeps what it was given."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def log(self, data: Any, step: int | None = None) -> str:
        self.given.append((data, step))
        return "returned"


def hook(kind: Any) -> ModuleType:
    module: Any = SimpleNamespace(Run=kind)
    trackers.hook_wandb(module)
    return module  # type: ignore[no-any-return]


def test_a_tracker_gets_the_same_object_and_its_answer_comes_back() -> None:
    kind = type("Run", (Recorder,), {"log": Recorder.log})
    hook(kind)
    run, given = kind(), {"loss": torch.tensor(1.0), "image": object()}

    assert run.log(given, step=4) == "returned"
    assert run.given[0][0] is given
    assert trainings._waiting == {"loss": 1.0}


def test_nested_metrics_have_the_names_of_wandb() -> None:
    given = {"train": {"loss": 0.5, "best": {3: np.int64(2)}, "text": "x", "none": {}}, "lr": 0.1}
    endless: dict[str, Any] = {"loss": 1.0}
    endless["again"] = endless
    kind = type("Run", (Recorder,), {"log": Recorder.log})
    hook(kind)
    recorder = kind()

    for data in (given, endless, [("loss", 1.0)]):
        recorder.log(data)

    assert trainings._waiting == {"train.loss": 0.5, "train.best.3": 2.0, "lr": 0.1}
    assert [data for data, _ in recorder.given] == [given, endless, [("loss", 1.0)]]


def test_what_a_tracker_refuses_it_refuses_itself() -> None:
    kind = type("Run", (Recorder,), {"log": Recorder.log})
    hook(kind)

    with pytest.raises(TypeError, match="unexpected keyword"):
        kind().log({}, stepp=1)


def test_any_thread_may_log() -> None:
    kind = type("Run", (Recorder,), {"log": Recorder.log})
    hook(kind)
    run = kind()
    threads = [threading.Thread(target=run.log, args=({f"m{n}": n},)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert trainings._waiting == {f"m{n}": float(n) for n in range(8)}


def test_tensorboards_scalars_are_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.tensorboard import writer

    class Writer(writer.SummaryWriter):
        pass

    trackers.hook_tensorboard(SimpleNamespace(SummaryWriter=Writer))  # type: ignore[arg-type]
    with Writer(str(tmp_path)) as board:
        board.add_scalar("loss", torch.tensor(0.5), global_step=3)
        board.add_scalars("accuracy", {"train": 0.1, "test": np.float64(0.2)}, 3)

    assert trainings._waiting == {"loss": 0.5, "accuracy/train": 0.1, "accuracy/test": 0.2}
    assert list(tmp_path.glob("events.*"))
