"""What the demo shows of a training."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loom.cli.demo_training import DemoProgress, DemoTraining
from loom.train import FaultTolerantJob


@pytest.mark.parametrize(
    ("metrics", "shown"),
    [({"loss": 0.5, "accuracy": 0.9}, [(20, 0.5, 0.9)]), ({"accuracy": 0.9}, []), ({"loss": 0.5}, [])],
    ids=["all", "no loss", "no accuracy"],
)
def test_progress_is_shown_when_all_of_it_is_known(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    metrics: dict[str, float],
    shown: list[tuple[int, float, float]],
) -> None:
    """A group that has just taken over its state has an accuracy, and no loss."""
    run: Future[Any] = Future()
    run.set_result(SimpleNamespace(events=(), steps=20, metrics=metrics))
    monkeypatch.setattr(FaultTolerantJob, "start", lambda *_: run)

    events = list(DemoTraining(SimpleNamespace(weaver=None), tmp_path, groups=3).run())

    assert [(e.step, e.loss, e.accuracy) for e in events if isinstance(e, DemoProgress)] == shown
    assert len(events) == len(shown)
