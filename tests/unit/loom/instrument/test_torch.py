"""PyTorch's optimizers: their steps are those of the training, and commands apply between two of them."""

from __future__ import annotations

import logging
import sys
import time
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from loom.instrument import torch as module
from loom.instrument import training as trainings
from loom.instrument.torch import OptimizerSteps
from tests.support.logged import messages
from tests.unit.loom.instrument.conftest import here
from tests.unit.loom.instrument.test_steering import net, sgd, step
from tests.unit.loom.threadlet.fake_weaver import Connection, FakeWeaver, come, eventually


def statuses(connection: Connection, until: int) -> list[list[Any]]:
    """Receive reports until one of a step; return them all."""
    found: list[list[Any]] = []
    while not any(row[2] == until for row in found):
        frame = connection.receive()
        assert frame is not None
        if frame[0] == "status":
            found += frame[1]
    return found


@pytest.fixture
def _reporting(weaver: FakeWeaver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOM_WEAVER", weaver.address)
    monkeypatch.setenv("LOOM_RUN", "fit")


@pytest.mark.parametrize("rank_variable", ["RANK", "SLURM_PROCID"])
@pytest.mark.usefixtures("_reporting", "hooked")
def test_a_process_is_a_replica_from_its_first_step_on(
    weaver: FakeWeaver, monkeypatch: pytest.MonkeyPatch, rank_variable: str
) -> None:
    monkeypatch.setenv(rank_variable, "3")
    optimizer = sgd()
    assert trainings._training is None

    step(optimizer)

    connection, hello = weaver.welcome()
    assert (hello["replica"], hello["group"]) == ("fit_3", "fit")
    trainings.log({"loss": 2.0})
    step(optimizer)
    rows = statuses(connection, 2)
    assert [row[2] for row in rows] == [1, 2]
    assert rows[0][6]["learning_rate"] == 0.1
    assert rows[1][5]["loss"] == 2.0


@pytest.mark.usefixtures("_reporting", "hooked")
def test_what_is_logged_before_the_first_step_joins_it(weaver: FakeWeaver) -> None:
    trainings.log({"loss": 3.0})

    step(sgd())

    connection, _ = weaver.welcome()
    assert statuses(connection, 1)[0][5]["loss"] == 3.0


@pytest.mark.usefixtures("_reporting", "hooked")
def test_what_is_logged_after_the_last_step_is_published_at_the_end(weaver: FakeWeaver) -> None:
    step(sgd())
    connection, _ = weaver.welcome()
    statuses(connection, 1)

    trainings.log({"accuracy": 0.9})
    here().close()
    here().close()

    assert statuses(connection, 1)[0][5] == {"accuracy": 0.9}


@pytest.mark.usefixtures("_reporting", "hooked")
def test_a_learning_rate_is_set_at_the_next_step(weaver: FakeWeaver) -> None:
    optimizer = sgd()
    step(optimizer)
    connection, _ = weaver.welcome()
    eventually(lambda: here().threadlet.connected)
    command = weaver.command(connection, "update_config", learning_rate=0.02)
    come(here().threadlet)

    step(optimizer)

    assert optimizer.param_groups[0]["lr"] == 0.02
    at, outcome = connection.ack(command)
    assert (at, outcome["ok"]) == (2, True)


@pytest.mark.usefixtures("_reporting", "hooked")
def test_a_stop_ends_the_program_in_order(weaver: FakeWeaver) -> None:
    optimizer = sgd()
    step(optimizer)
    connection, _ = weaver.welcome()
    eventually(lambda: here().threadlet.connected)
    weaver.command(connection, "stop")
    come(here().threadlet)

    with pytest.raises(SystemExit) as ended:
        step(optimizer)

    assert ended.value.code == 0


@pytest.mark.usefixtures("_reporting", "hooked")
def test_an_owner_stops_in_its_own_way(weaver: FakeWeaver) -> None:
    optimizer, stops = sgd(), []
    step(optimizer)
    here().on_stop(lambda: stops.append("stopped"))
    weaver.welcome()
    here().threadlet.evict()

    step(optimizer, optimizer)

    assert stops == ["stopped"]


@pytest.mark.usefixtures("hooked")
def test_a_richer_source_names_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = sgd()
    here().owns(trainings.StepSource.LIGHTNING)

    step(optimizer)

    assert here()._step is None
    assert not here().owns(trainings.StepSource.TORCH)


@pytest.mark.usefixtures("hooked")
def test_a_hook_that_raises_steps_back_once_and_for_good(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = sgd()
    step(optimizer)
    threadlet = here().threadlet

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a fault of Loom's")

    monkeypatch.setattr(here(), "publish", fail)
    with caplog.at_level(logging.WARNING, "loom"):
        step(optimizer, optimizer, optimizer)

    assert [text for text in messages(caplog) if "steps back" in text] == [
        "Loom steps back from PyTorch's optimizers, and the training goes on without it: "
        "ZeroDivisionError: a fault of Loom's"
    ]
    assert threadlet._ended.is_set()


@pytest.mark.usefixtures("hooked")
def test_a_process_that_has_a_threadlet_of_its_own_takes_no_second_one(
    threadlet: Any, caplog: pytest.LogCaptureFixture
) -> None:
    threadlet("mine")

    with caplog.at_level(logging.WARNING, "loom"):
        step(sgd())

    assert trainings._training is None
    assert not [text for text in messages(caplog) if "steps back" in text]


@pytest.mark.usefixtures("hooked")
def test_a_step_that_prepares_a_checkpoint_is_none() -> None:
    from torch.distributed.checkpoint.state_dict import _init_optim_state

    optimizer = torch.optim.Adam(net().parameters(), lr=0.1)

    _init_optim_state(optimizer)

    assert trainings._training is None
    step(optimizer)
    assert here()._step == 1


def test_a_compiled_step_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizers = sys.modules["torch.optim.optimizer"]
    monkeypatch.setattr(optimizers, "_global_optimizer_post_hooks", hooks := OrderedDict())
    module.hook(optimizers)
    optimizer = sgd()
    compiled = torch.compile(lambda: optimizer.step(), backend="eager")

    for _ in range(3):
        net()(torch.ones(3)).sum().backward()
        compiled()

    assert len(hooks) == 1
    assert here()._step == 3


@pytest.mark.usefixtures("hooked")
def test_samples_tell_of_gradients_memory_and_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLE_EVERY", 0.0)
    monkeypatch.setattr(module, "MOST_OF_TIME", float("inf"))
    module.hook_loaders(sys.modules["torch.utils.data.dataloader"])
    samples = module.Samples()
    optimizer = sgd()
    step(optimizer)
    began, found = time.monotonic(), {}
    for _ in DataLoader(TensorDataset(torch.zeros(64)), batch_size=4):
        found = samples.take(optimizer) or {}

    assert float(found["grad_norm"]) == pytest.approx(8**0.5)
    assert found["memory_bytes"] > 1e6
    assert found["samples_per_second"] > 4 / (time.monotonic() - began)


def test_a_loader_of_another_library_may_have_iterators_with_further_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.utils.data import dataloader

    base = dataloader._BaseDataLoaderIter
    monkeypatch.setattr(base, "__new__", base.__new__)  # and take it back afterwards

    class Iterator(dataloader._SingleProcessDataLoaderIter):
        def __init__(self, loader: Any, state: Any = None) -> None:
            super().__init__(loader)

    class StrangeIterator(base):  # type: ignore[valid-type,misc]
        def __init__(self, *, state: Any) -> None:
            pass

    module.hook_loaders(dataloader)
    loader = DataLoader(TensorDataset(torch.zeros(8, 1)), batch_size=4)
    made = [Iterator(loader, {}), Iterator(loader=loader, state=None)]
    StrangeIterator(state=None)

    assert [len(list(one)) for one in made] == [2, 2]
    assert all(module._loading[one][0] == 4 for one in made)


def test_samples_that_cannot_be_had_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLE_EVERY", 0.0)
    monkeypatch.setattr(module, "MOST_OF_TIME", float("inf"))
    samples, optimizer = module.Samples(), sgd()
    step(optimizer)
    monkeypatch.setattr(torch.nn.utils, "get_total_norm", None)

    assert set(samples.take(optimizer) or {}) == {"learning_rate", "memory_bytes"}
    assert len(samples._kinds) == 3


def test_scaled_gradients_have_no_norm() -> None:
    optimizer = sgd()
    step(optimizer)
    optimizer.grad_scale = torch.tensor(2.0)  # type: ignore[attr-defined]

    assert module._gradient_norm(optimizer) == {}


def test_the_hook_takes_at_most_50_microseconds_a_step(hooked: OptimizerSteps) -> None:
    optimizer, took = sgd(), []
    for _ in range(2000):
        began = time.perf_counter()
        hooked.stepped(optimizer, (), {})
        took.append(time.perf_counter() - began)

    assert sorted(took)[len(took) // 2] < 50e-6


def test_one_slow_sample_does_not_keep_the_next_ones_away(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0

    def slow(optimizer: object) -> dict[str, float]:
        nonlocal now
        now += 0.5
        return {"x": 1.0}

    monkeypatch.setattr(module, "monotonic", lambda: now)
    samples, optimizer = module.Samples(), sgd()
    samples._kinds = [slow]

    assert samples.take(optimizer) == {"x": 1.0}
    now += 0.6
    assert samples.take(optimizer) == {"x": 1.0}
    now += 100.0
    assert samples.take(optimizer) is None  # two in a row: it is slow
