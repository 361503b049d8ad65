"""Ranks that average gradients take commands at one step, or none takes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cohort_training import WAYS, training
from tests.unit.loom.weaver.raw_threadlet import RawGateway, WeaverProcess, running_weaver

WAIT = 30.0
"""Seconds in which every command has its answers."""


@pytest.fixture
def weaver() -> Iterator[WeaverProcess]:
    with running_weaver() as running:
        yield running


def give(asking: RawGateway, kind: str, target: object = "train", **params: Any) -> dict[str, Any]:
    """Give a command and return what became of it, when all have answered."""
    id = asking.ask("command", kind=kind, target=target, params=params)["id"]
    state = asking.ask("command_state", id=id, timeout=WAIT)
    assert state["done"], state
    return dict(state["outcomes"])


def applied_at(answers: dict[str, Any]) -> int | None:
    """Check that all ranks applied a command at one step, and return it, or that none did, and return None."""
    outcomes = {(one["ok"], one["step"] if one["ok"] else None) for one in answers.values()}
    assert len(outcomes) == 1, answers
    ((_, step),) = outcomes
    return step  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", WAYS)
def test_all_ranks_change_at_one_step(weaver: WeaverProcess, tmp_path: Path, way: str) -> None:
    with training(weaver, tmp_path / way, world=2, way=way) as ranks:
        asking = weaver.gateway()
        values = [0.02, 0.05, 0.03]
        steps = [applied_at(give(asking, "update_config", learning_rate=value)) for value in values]
        paused = applied_at(give(asking, "pause"))
        applied_at(give(asking, "update_config", learning_rate=0.04)) if way != "taken" else None
        resumed = applied_at(give(asking, "resume"))
        saved = applied_at(give(asking, "save"))
        ranks.await_steps(2)
        stopped = applied_at(give(asking, "stop"))

        assert None not in (*steps, paused, resumed, saved, stopped)
        for process in ranks.processes:
            process.wait(WAIT)
        changes = [ranks.changes(rank) for rank in range(2)]
        assert changes[0] == changes[1]
        assert changes[0][:3] == list(zip(steps, values, strict=True))
        assert len({ranks.lines(rank)[-1]["step"] for rank in range(2)}) == 1
        assert ranks.check_equal() > 3
        assert [ranks.errors(rank) for rank in range(2)] == ["", ""]
