"""Trainings that follow one another in a process, such as the cells of a notebook."""

from __future__ import annotations

import sys

import pytest
import torch

from loom.instrument.torch import OptimizerSteps
from loom.instrument.training import SILENT_STEPS, StepSource
from tests.unit.loom.instrument.conftest import here
from tests.unit.loom.instrument.test_steering import sgd, step
from tests.unit.loom.instrument.test_torch import _reporting, statuses
from tests.unit.loom.threadlet.fake_weaver import FakeWeaver, come, eventually

__all__ = ["_reporting"]


@pytest.mark.usefixtures("_reporting", "hooked")
def test_each_training_has_its_own_primary_optimizer(weaver: FakeWeaver) -> None:
    first, second, third = sgd(), sgd(), sgd()
    step(first)
    connection, _ = weaver.welcome()
    eventually(lambda: here().threadlet.connected)
    for optimizer, value in ((second, 0.02), (third, 0.03)):
        assert here().begin(StepSource.TRANSFORMERS)
        step(optimizer)
        weaver.command(connection, "update_config", learning_rate=value)
        come(here().threadlet)

        step(optimizer)

        assert (first.param_groups[0]["lr"], optimizer.param_groups[0]["lr"]) == (0.1, value)


@pytest.mark.usefixtures("_reporting", "hooked")
def test_a_training_that_is_over_has_made_its_last_step_and_a_loop_after_it_is_seen(weaver: FakeWeaver) -> None:
    trained, after = sgd(), sgd()
    step(trained)
    connection, _ = weaver.welcome()
    assert here().begin(StepSource.TRANSFORMERS)
    here().publish(7, max_step=30)
    here().end(StepSource.TRANSFORMERS, 7, epoch=1)  # before its planned end, as an early stopping does

    row = next(row for row in statuses(connection, 7) if row[4] == 7)
    assert row[2:5] == [7, 1, 7]
    step(after)
    assert statuses(connection, 2)
    assert here().begin(StepSource.LIGHTNING)


@pytest.mark.usefixtures("hooked")
def test_a_loop_after_a_training_that_was_interrupted_is_seen_in_the_end() -> None:
    optimizer = sgd()
    step(optimizer)
    assert here().begin(StepSource.TRANSFORMERS)

    for _ in range(SILENT_STEPS + 1):
        assert not here().owns(StepSource.TORCH)

    assert here().owns(StepSource.TORCH)


@pytest.mark.usefixtures("_reporting", "hooked")
def test_a_cell_that_was_stopped_can_be_run_and_stopped_again(
    weaver: FakeWeaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    optimizer = sgd()
    step(optimizer)
    connection, _ = weaver.welcome()
    eventually(lambda: here().threadlet.connected)
    for _ in range(2):
        weaver.command(connection, "stop")
        come(here().threadlet)
        with pytest.raises(SystemExit):
            step(optimizer)
        step(optimizer)  # the next cell
        assert not here().threadlet.should_stop


@pytest.mark.parametrize("interactive", [True, False])
@pytest.mark.usefixtures("_reporting", "hooked")
def test_a_stopped_trainer_trains_again_in_a_notebook_and_not_in_a_script(
    weaver: FakeWeaver, monkeypatch: pytest.MonkeyPatch, interactive: bool
) -> None:
    if interactive:
        monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    stopped: list[int] = []
    optimizer = sgd()
    step(optimizer)
    connection, _ = weaver.welcome()
    eventually(lambda: here().threadlet.connected)
    assert here().begin(StepSource.TRANSFORMERS)
    here().on_stop(lambda: stopped.append(1))
    weaver.command(connection, "stop")
    come(here().threadlet)
    step(optimizer)
    assert stopped
    here().end(StepSource.TRANSFORMERS, 3)

    assert here().begin(StepSource.TRANSFORMERS)

    assert here().threadlet.should_stop is not interactive


def test_an_interrupted_training_does_not_keep_another_library_from_naming_the_steps(
    monkeypatch: pytest.MonkeyPatch, hooked: OptimizerSteps
) -> None:
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    step(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
    assert here().begin(StepSource.TRANSFORMERS)

    assert here().begin(StepSource.LIGHTNING)
    assert here().owner is StepSource.LIGHTNING


class Session:
    """The session of a driver."""

    name = "session-1"

    def weaver_address(self) -> str:
        return "tcp://127.0.0.1:1/k"


def test_processes_of_a_session_have_the_names_that_it_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    from loom import driver_api
    from loom.control import address
    from loom.instrument.training import _identity, ask_gateway

    for name, value in {
        "LOOM_RUN": "fit",
        "LOOM_WEAVER": "tcp://127.0.0.1:1/k",
        "LOOM_REPLICA": "mesh_3@s",
    }.items():
        monkeypatch.setenv(name, value)
    assert _identity() == {
        "replica_id": "fit_0",
        "group": "fit",
        "find_weaver": None,  # the address that was given stays
    }  # a program that such a one starts
    monkeypatch.setenv("LOOM_FOUND", "1")
    assert _identity()["find_weaver"] is ask_gateway

    monkeypatch.setattr(driver_api, "_here", Session())
    assert _identity() == {"replica_id": "session-1_0", "group": "session-1", "weaver": "tcp://127.0.0.1:1/k"}

    monkeypatch.setattr(address, "_held", "tcp://127.0.0.1:1/k")
    assert _identity() == {}
