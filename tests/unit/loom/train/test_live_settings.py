"""Schedules, accumulation, decay and data: what a step is made with, and what is told of a change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loom.errors import WrongArguments
from loom.threadlet.handlers import Settlement
from loom.train import Averaging, Batch, FaultTolerantJob, LiveConfig, TrainerReport
from loom.train.loop.agreement import OF_BATCHES, AgreedConfig
from loom.train.loop.averaging import SharedSteps, StepExchange
from loom.train.loop.data_feed import DataFeed
from loom.train.loop.loop import TrainingLoop
from loom.train.loop.training_state import TrainingState, plain, whole
from loom.train.model import TrainerModel, adamw
from loom.train.settings import Ending, Restore
from loom.train.spec import Assignment


class Numbers:
    """A loader of the numbers below a bound, with a state."""

    def __init__(self, bound: int = 5) -> None:
        self.bound = bound
        self.next = 0

    def __iter__(self) -> Any:
        while self.next < self.bound:
            self.next += 1
            yield self.next - 1
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def two_groups(parameters: Any, learning_rate: float) -> Any:
    first, second = parameters
    plain_group = {"params": [second], "weight_decay": 0.0, "lr": learning_rate / 10}
    return torch.optim.AdamW([{"params": [first]}, plain_group], lr=learning_rate, weight_decay=0.1)


class Line(TrainerModel):
    optimizers = {**TrainerModel.optimizers, "two": two_groups}  # noqa: RUF012

    def __init__(self, loader: Any = None) -> None:
        super().__init__()
        self.loader = loader
        self.batches: list[Batch] = []

    def build(self) -> Any:
        return torch.nn.Linear(1, 1)

    def data_loader(self) -> Any:
        return self.loader

    def loss(self, model: Any, batch: Batch) -> Any:
        self.batches.append(batch)
        return model(torch.tensor([[float(batch.part + 1)]])).sum()


def state_of(trainer: Line, **config: Any) -> TrainingState:
    live = LiveConfig(**config)
    job = FaultTolerantJob(Line, steps=10, config=live)  # type: ignore[arg-type]
    agreed = AgreedConfig(live, Averaging.GRADIENTS, trainer.optimizers)
    assignment = Assignment(job, "train_0", "", ("", 0), Restore.NOTHING, "key")
    return TrainingState(trainer, assignment, 0, agreed, TrainerReport())


def strategy_of(state: TrainingState) -> SharedSteps:
    membership: Any = SimpleNamespace(place=(0, 1))  # stands in for the only group of a job
    clock: Any = None
    return SharedSteps(state, StepExchange(state, membership, clock, lambda: None), clock)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.7, 0.4, 0.1]),
        ("cosine", [0.5, 1.0, 1.0, 0.1 + 0.9 * 0.75, 0.1 + 0.9 * 0.25, 0.1]),
    ],
)
def test_a_schedule_warms_up_and_ends_with_its_share(schedule: str, rates: list[float]) -> None:
    config = LiveConfig(learning_rate=1.0, schedule=schedule, warmup_steps=2, decay_to=0.1)

    assert [config.rate(step, 6) for step in range(6)] == pytest.approx(rates)
    assert config.rate(99, 6) == pytest.approx(rates[-1])


def test_a_step_has_the_mean_gradient_of_its_batches() -> None:
    trainer = Line()
    flat = strategy_of(state_of(trainer, accumulation=3))._compute()

    assert flat[:2].tolist() == [2.0, 1.0]  # the mean of 1, 2 and 3, and that of 1
    assert [(one.part, one.parts) for one in trainer.batches] == [(0, 3), (1, 3), (2, 3)]
    assert len({Batch(4, 1, shard, 2, part, 3).seed for shard in range(2) for part in range(3)}) == 6


def test_groups_of_parameters_keep_their_share_of_the_rate_and_their_lack_of_decay() -> None:
    state = state_of(Line(), optimizer="two", learning_rate=0.5, weight_decay=0.3, beta1=0.8, warmup_steps=2)

    rate = state.tune_optimizer()

    first, second = state.optimizer.param_groups
    assert rate == first["lr"] == 0.25
    assert second["lr"] == pytest.approx(0.025)
    assert (first["weight_decay"], second["weight_decay"]) == (0.3, 0.0)
    assert first["betas"] == second["betas"] == (0.8, 0.999)


def test_what_is_not_set_is_the_optimizers_own() -> None:
    state = state_of(Line(), optimizer="adamw")
    state.tune_optimizer()

    (group,) = state.optimizer.param_groups
    (own,) = adamw([torch.nn.Parameter(torch.zeros(1))], 0.1).param_groups
    assert {**group, "params": 0} == {**own, "params": 0}


def test_the_configuration_survives_its_numbers() -> None:
    config = LiveConfig(schedule="linear", weight_decay=0.0, beta2=0.5, accumulation=4, optimizer="adamw")

    assert AgreedConfig(config, Averaging.GRADIENTS, ["sgd", "adamw"]).current == config


def test_a_change_of_batches_holds_from_the_step_after_its_exchange() -> None:
    agreed = AgreedConfig(LiveConfig(), Averaging.GRADIENTS, ["sgd"])
    batches, rate = agreed.propose("accumulation", 2.0), agreed.propose("learning_rate", 0.5)

    agreed.settle([agreed.row()], 7, OF_BATCHES)

    assert (batches.verdict, rate.verdict) == (Settlement(8), Settlement(7))


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("schedule", "quick", "is one of constant, cosine, linear"),
        ("beta1", 1.0, "is from 0 to below 1"),
        ("weight_decay", -0.1, "is 0"),
        ("decay_to", 2.0, "is a share from 0 to 1"),
        ("warmup_steps", -1, "is 0"),
        ("accumulation", 0, "is 1 at least"),
    ],
)
def test_what_makes_no_sense_is_refused_by_a_job_and_by_its_groups(key: str, value: Any, rule: str) -> None:
    with pytest.raises(WrongArguments, match=f"{key} {rule}"):
        FaultTolerantJob(Line, config=LiveConfig(**{key: value}))  # type: ignore[arg-type]
    with pytest.raises(WrongArguments, match=f"{key} {rule}"):
        AgreedConfig(LiveConfig(), Averaging.GRADIENTS, ["sgd"])._handler(key, type(value))(value)


def test_betas_are_refused_for_an_optimizer_without_them() -> None:
    config = state_of(Line(), optimizer="sgd").config

    with pytest.raises(WrongArguments, match="beta1 is for optimizers like Adam, and the optimizer is sgd"):
        config._handler("beta1", float)(0.8)


def test_a_step_that_is_made_again_gets_the_same_items() -> None:
    feed = DataFeed(Numbers())

    assert [feed.item(0, 0), feed.item(0, 1), feed.item(0, 0), feed.item(0, 1)] == [0, 1, 0, 1]
    assert feed.item(1, 0) == 2


def test_a_step_that_is_not_applied_gets_its_items_after_a_restore() -> None:
    feed = DataFeed(Numbers())
    feed.item(0, 0)
    before, after = feed.state(0), feed.state(1)

    found = []
    for state in (before, after):
        other = DataFeed(Numbers())
        other.load(state)
        found.append(other.item(1, 0))

    assert found == [0, 1]


def test_a_loader_that_ends_begins_again() -> None:
    feed = DataFeed(Numbers(2))

    assert [feed.item(step, 0) for step in range(5)] == [0, 1, 0, 1, 0]


def test_a_loader_without_a_state_or_without_items_is_refused() -> None:
    with pytest.raises(WrongArguments, match=r"a list has no state_dict.*StatefulDataLoader"):
        DataFeed([1])
    with pytest.raises(WrongArguments, match="has no items"):
        DataFeed(Numbers(0)).item(0, 0)


def test_a_state_has_the_place_in_the_data() -> None:
    first = state_of(Line(Numbers()))
    strategy = strategy_of(first)
    for _ in range(2):
        strategy._compute()
        first.report.step += 1
    second = state_of(Line(Numbers()))

    second.load(plain(first.save(whole), whole), of_whole=True)
    strategy_of(second)._compute()

    assert [one.items for one in first.trainer.batches] == [0, 1]  # type: ignore[attr-defined]
    assert [one.items for one in second.trainer.batches] == [2]  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_torchdatas_loader_goes_on() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    made = [DataFeed(stateful(list(range(6)), batch_size=2)) for _ in range(2)]

    first = [made[0].item(step, 0).tolist() for step in range(2)]
    made[1].load(made[0].state(2))

    assert first == [[0, 1], [2, 3]]
    assert [made[1].item(step, 0).tolist() for step in range(2)] == [[4, 5], [0, 1]]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (WrongArguments("there is no such model"), "WrongArguments: there is no such model"),
        (torch.OutOfMemoryError("tried to allocate"), "OutOfMemoryError: cpu is too small: tried to allocate"),
    ],
)
def test_arguments_that_are_wrong_are_so_only_until_the_first_step(
    monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    loop = TrainingLoop(Line(), state_of(Line()).assignment, 0)

    def fail() -> None:
        raise error

    monkeypatch.setattr(loop, "_train", fail)
    first = loop.run()
    loop._report.first_step_at = 1.0
    later = loop.run()

    assert (first.ending, later.ending) == (Ending.REFUSED, Ending.FAILED)
    assert first.error == later.error == told
