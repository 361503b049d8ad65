"""Values of parameter groups that are set from outside, on top of a schedule."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch.optim import lr_scheduler

from loom.control.commands import Change, Command, CommandKind, former_values
from loom.instrument.torch import SILENT_AFTER, OptimizerSteps
from loom.threadlet.inbox import Application
from tests.unit.loom.instrument.conftest import apply, here

pytestmark = pytest.mark.usefixtures("hooked")


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def sgd(**options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(net().parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def step(*optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for one in group["params"]:
                one.grad = torch.ones_like(one)
        optimizer.step()


def rates(optimizer: torch.optim.Optimizer, key: str = "lr") -> list[Any]:
    return [group[key] for group in optimizer.param_groups]


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=30),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, 3),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda n: 0.95),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.9)], o
    ),
    "plateau": lambda o: Plateau(o, patience=1),
}


class Plateau(lr_scheduler.ReduceLROnPlateau):
    def step(self) -> None:  # type: ignore[override]
        super().step(1.0)


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_a_schedule_goes_on_under_a_value_from_outside(kind: str, lr: Any) -> None:
    def run(change: bool) -> tuple[list[float], list[float], Any]:
        optimizer = sgd(lr=lr if isinstance(lr, float) else lr.clone())
        scheduler = SCHEDULERS[kind](optimizer)
        scheduled, effective = [], []
        for n in range(12):
            step(optimizer)
            if change and n in (3, 6):
                assert apply(*{3: ("learning_rate_factor", 2.0), 6: ("learning_rate", 0.007)}[n]) is None
            if change and n == 9:
                assert apply("learning_rate", None) is None
            scheduler.step()
            scheduled.append(float(scheduler.get_last_lr()[0]))
            effective.append(float(optimizer.param_groups[0]["lr"]))
        return scheduled, effective, rates(optimizer, "momentum")

    plain, _, momentum = run(False)
    scheduled, effective, momentum_then = run(True)

    assert scheduled == pytest.approx(plain, rel=1e-5)
    assert effective[:3] == pytest.approx(plain[:3], rel=1e-5)
    assert effective[3:6] == pytest.approx([2 * one for one in plain[3:6]], rel=1e-5)
    assert effective[6:9] == pytest.approx([0.007] * 3)
    assert effective[9:] == pytest.approx(plain[9:], rel=1e-5)
    assert momentum_then == momentum


def test_a_saved_state_has_the_schedules_values_and_a_restart_applies_a_factor_once() -> None:
    optimizer = sgd()
    step(optimizer)
    apply("learning_rate_factor", 3.0)

    state = optimizer.state_dict()
    assert state["param_groups"][0]["lr"] == 0.1
    assert rates(optimizer) == pytest.approx([0.3])
    optimizer.load_state_dict({**state, "param_groups": [{**state["param_groups"][0], "lr": 0.2}]})

    assert rates(optimizer) == pytest.approx([0.6])
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.2


def test_a_saved_tensor_is_not_changed_afterwards() -> None:
    optimizer = torch.optim.Adam(net().parameters(), lr=torch.tensor(0.1))
    step(optimizer)
    apply("learning_rate", 0.5)

    state = optimizer.state_dict()

    assert float(state["param_groups"][0]["lr"]) == pytest.approx(0.1)
    assert float(rates(optimizer)[0]) == pytest.approx(0.5)


def test_a_value_that_the_script_writes_is_the_schedules() -> None:
    optimizer = sgd()
    step(optimizer)
    apply("learning_rate_factor", 10.0)
    used = []
    optimizer.register_step_pre_hook(lambda o, *_: used.append(o.param_groups[0]["lr"]))

    for n in range(3):
        optimizer.param_groups[0]["lr"] = 0.01 * (n + 1)
        step(optimizer)
    step(optimizer)

    assert rates(optimizer) == pytest.approx([0.3])
    assert optimizer.state_dict()["param_groups"][0]["lr"] == pytest.approx(0.03)
    apply("learning_rate", None)
    assert rates(optimizer) == pytest.approx([0.03])


def test_a_group_that_is_added_gets_the_value_too() -> None:
    optimizer = sgd()
    step(optimizer)
    apply("learning_rate", 0.5)

    optimizer.add_param_group({"params": list(net().parameters()), "lr": 0.2})
    step(optimizer)

    assert rates(optimizer) == [0.5, 0.5]
    apply("learning_rate", None)
    assert rates(optimizer) == [0.1, 0.2]


def test_a_factor_keeps_the_groups_apart() -> None:
    optimizer = torch.optim.SGD([{"params": [net().weight], "lr": 1.0}, {"params": [net().bias]}], lr=0.1)
    step(optimizer)

    apply("learning_rate_factor", 0.5)

    assert rates(optimizer) == [0.5, 0.05]


def test_a_group_without_weight_decay_keeps_none() -> None:
    groups = [{"params": [net().bias], "weight_decay": 0.0}, {"params": [net().weight]}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.01)
    step(optimizer)

    assert apply("weight_decay", 0.3) is None

    assert rates(optimizer, "weight_decay") == [0.0, 0.3]


def test_other_numbers_have_handlers_of_their_own() -> None:
    optimizer = torch.optim.Adam(net().parameters(), lr=0.1)
    step(optimizer)

    assert apply("betas", [0.8, 0.9]) is None
    assert rates(optimizer, "betas") == [(0.8, 0.9)]
    assert "betas has 2 numbers, not 1" in str(apply("betas", [0.5]))
    assert "0 or more, not -1.0" in str(apply("learning_rate", -1))
    assert "0 or more, not inf" in str(apply("learning_rate_factor", float("inf")))
    assert "no handler for it" in str(apply("amsgrad", True))


def test_whole_numbers_stay_whole() -> None:
    optimizer = torch.optim.LBFGS(net().parameters(), max_iter=3)
    optimizer.step(lambda: torch.tensor(1.0))

    assert apply("max_iter", 5) is None

    assert rates(optimizer, "max_iter") == [5]
    assert type(optimizer.param_groups[0]["max_iter"]) is int


def test_further_optimizers_are_named_by_their_index(hooked: OptimizerSteps) -> None:
    first, second = sgd(lr=0.1), sgd(lr=0.2)
    step(first, second, second)

    assert apply("learning_rate@1", 0.02) is None
    assert apply("learning_rate@0", 0.01) is None

    assert (rates(first), rates(second)) == ([0.01], [0.02])
    step(first, second)
    assert here()._step == 2
    here().close()
    assert (here()._config["learning_rate"], here()._config["learning_rate@1"]) == (0.01, 0.02)


def test_the_next_optimizer_is_the_primary_one_when_the_first_is_gone() -> None:
    first = sgd(lr=0.1)
    step(first)
    del first
    second = sgd(lr=0.2)

    step(second, second)

    assert apply("learning_rate", 0.02) is None
    assert rates(second) == [0.02]
    assert here()._step == 3


def test_a_schedulers_class_that_is_made_later_may_have_options(hooked: OptimizerSteps) -> None:
    class Named:
        def __init_subclass__(cls, name: str = "", **options: Any) -> None:
            super().__init_subclass__(**options)
            cls.name = name  # type: ignore[attr-defined]

    optimizer = sgd()
    step(optimizer)
    assert apply("learning_rate_factor", 0.5) is None

    class Halving(lr_scheduler.ExponentialLR, Named, name="halving"):
        pass

    scheduler = Halving(optimizer, 0.5)
    step(optimizer)
    scheduler.step()

    assert Halving.name == "halving"  # type: ignore[attr-defined]
    assert rates(optimizer) == [0.025]


def test_an_optimizer_made_anew_has_the_value_from_its_first_step_on(hooked: OptimizerSteps) -> None:
    parameters = list(net().parameters())
    former = torch.optim.SGD(parameters, lr=0.1)
    step(former)
    assert apply("learning_rate_factor", 0.5) is None

    later = torch.optim.SGD(parameters, lr=0.2, momentum=0.5)
    scheduler = lr_scheduler.ExponentialLR(later, 0.1)
    used = []
    later.register_step_pre_hook(lambda optimizer, *_: used.extend(rates(optimizer)))
    step(later)
    scheduler.step()
    step(later)

    assert used == [0.1, pytest.approx(0.01)]
    assert here()._step == 3
    here().close()
    names = ("learning_rate", "learning_rate_factor", "learning_rate_schedule", "momentum")
    assert [here()._config[name] for name in names] == [pytest.approx(0.01), 0.5, pytest.approx(0.02), 0.5]


def test_an_optimizer_of_another_kind_begins_with_its_own_values(hooked: OptimizerSteps) -> None:
    parameters = list(net().parameters())
    former, later = torch.optim.Adam(parameters, lr=0.1), torch.optim.LBFGS(parameters, lr=1.0)
    step(former)
    assert apply("learning_rate", 0.5) is None

    for one in parameters:
        one.grad = torch.ones_like(one)
    later.step(lambda: torch.zeros(()))

    assert rates(later) == [1.0]
    assert here()._step == 2
    assert apply("learning_rate", 0.7) is None
    assert rates(later) == [0.7]


def test_optimizers_that_share_parameters_and_take_turns_have_an_index_each(hooked: OptimizerSteps) -> None:
    parameters = list(net().parameters())
    first, second = torch.optim.SGD(parameters, lr=0.1), torch.optim.SGD(parameters, lr=0.2)
    for _ in range(5):
        step(first, second)

    assert apply("learning_rate", 0.02) is None
    assert apply("learning_rate@1", 0.01) is None

    assert (rates(second), rates(first)) == ([0.02], [0.01])
    assert here()._step == 6


def test_another_optimizer_stands_in_for_one_that_is_silent(hooked: OptimizerSteps) -> None:
    first, second = sgd(lr=0.1), sgd(lr=0.2)
    step(first, second)

    step(*[second] * SILENT_AFTER)

    assert here()._step == 2
    assert apply("learning_rate", 0.02) is None
    assert apply("learning_rate@1", 0.01) is None
    assert (rates(second), rates(first)) == ([0.02], [0.01])


def test_many_optimizers_that_take_turns_leave_the_first_one_the_primary_one(hooked: OptimizerSteps) -> None:
    optimizers = [sgd() for _ in range(SILENT_AFTER + 5)]

    for _ in range(3):
        step(*optimizers)

    assert here()._step == 3


class Wrapper(torch.optim.Optimizer):
    """An optimizer that lets another one make its step, as `ZeroRedundancyOptimizer` and Lookahead do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([{**group} for group in inner.param_groups], inner.defaults)
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        for mine, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            theirs["lr"] = mine["lr"]
        self.inner.step()


def test_a_step_within_a_step_is_a_part_of_it(hooked: OptimizerSteps) -> None:
    outer = Wrapper(sgd())

    step(outer, outer)

    assert here()._step == 2
    assert apply("learning_rate", 0.02) is None
    step(outer)
    assert (rates(outer), rates(outer.inner)) == ([0.02], [0.02])


class Container(torch.optim.Optimizer):
    """An optimizer that has others, as torchtitan's."""

    def __init__(self, *others: torch.optim.Optimizer) -> None:
        super().__init__([one for other in others for group in other.param_groups for one in group["params"]], {})
        self.others = others

    def step(self, closure: Any = None) -> None:
        for one in self.others:
            one.step()


def test_a_container_of_optimizers_is_none_itself(hooked: OptimizerSteps) -> None:
    first, second = sgd(lr=0.1), sgd(lr=0.2)
    container = Container(first, second)

    step(container, container)

    assert here()._step == 2
    assert apply("learning_rate", 0.02) is None
    assert apply("learning_rate@1", 0.01) is None
    assert (rates(first), rates(second)) == ([0.02], [0.01])


def test_a_step_that_raises_does_not_hide_the_next_ones(hooked: OptimizerSteps) -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise RuntimeError("out of memory")

    step(sgd())
    with pytest.raises(RuntimeError, match="out of memory"):
        step(Broken(net().parameters(), lr=0.1))
    optimizer = sgd()

    step(optimizer, optimizer)

    assert here()._step == 3


def test_optimizers_within_the_backward_pass_refuse_values() -> None:
    model = net()
    optimizers = {one: torch.optim.SGD([one], lr=0.1) for one in model.parameters()}
    for one in optimizers:
        one.register_post_accumulate_grad_hook(lambda one: optimizers[one].step())

    model(torch.ones(3)).sum().backward()

    assert "steps within the backward pass" in str(apply("learning_rate", 0.5))


@pytest.mark.parametrize(
    ("before", "change"),
    [
        ({}, {"learning_rate": 0.5}),
        ({}, {"learning_rate_factor": 2.0}),
        ({"learning_rate_factor": 0.5}, {"learning_rate": 0.3, "learning_rate_factor": 2.0}),
        ({"learning_rate": 0.3}, {"learning_rate": None}),
    ],
)
def test_a_change_that_another_rank_has_not_made_leaves_the_schedule_as_it_was(
    before: dict[str, Any], change: dict[str, Any]
) -> None:
    optimizer = sgd()
    schedule = SCHEDULERS["exponential"](optimizer)
    step(optimizer)
    threadlet = here().threadlet
    for key, value in before.items():
        apply(key, value)
    made = Application(Command("k", CommandKind.UPDATE_CONFIG, change))
    threadlet._update(made, by_program=False)

    threadlet._take_back(made, dict(threadlet._config), "rank 1 died")

    assert made.reason == "rank 1 died"
    schedule.step()
    effective = {"learning_rate_factor": 0.09 * 0.5, "learning_rate": 0.3}
    assert rates(optimizer) == pytest.approx([effective[key] for key in before] or [0.09])


def test_an_acknowledgement_has_the_value_that_held_and_not_the_last_one_read() -> None:
    optimizer = sgd()
    schedule = SCHEDULERS["exponential"](optimizer)
    step(optimizer)
    threadlet, made = here().threadlet, []
    threadlet._config["learning_rate"] = 0.1
    schedule.step()
    threadlet._acknowledge = made.append  # type: ignore[method-assign]

    threadlet._apply(Command("k", CommandKind.UPDATE_CONFIG, {"learning_rate": 0.3}))

    assert made[0].changes["learning_rate"] == Change(pytest.approx(0.09), 0.3, {"learning_rate": None})


@pytest.mark.parametrize("before", [{}, {"learning_rate": 0.3}, {"learning_rate_factor": 0.5}])
def test_a_change_says_what_brings_a_schedule_or_what_was_set_before_back(before: dict[str, Any]) -> None:
    optimizer = sgd()
    SCHEDULERS["exponential"](optimizer)
    step(optimizer)
    threadlet, made = here().threadlet, []
    threadlet._acknowledge = made.append  # type: ignore[method-assign]
    threadlet._apply(Command("k", CommandKind.UPDATE_CONFIG, before))
    rate = rates(optimizer)
    threadlet._apply(Command("l", CommandKind.UPDATE_CONFIG, {"learning_rate": 0.7, "learning_rate_factor": 2.0}))

    back = former_values({key: one.to_body() for key, one in made[-1].changes.items()})
    threadlet._apply(Command("m", CommandKind.UPDATE_CONFIG, back))

    assert back == (before or {"learning_rate": None})
    assert rates(optimizer) == rate


class Derived(torch.optim.SGD):
    """An optimizer of a user's own that lets torch's make the step."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


def test_a_step_of_a_derived_class_counts_once(hooked: OptimizerSteps) -> None:
    sgd()  # by which torch has the base class call hooks, too
    optimizer = Derived(net().parameters(), lr=0.1)

    step(optimizer, optimizer)
    assert apply("learning_rate", 0.02) is None
    step(optimizer)

    assert here()._step == 3
    assert rates(optimizer) == [0.02]


@pytest.mark.parametrize("lr", [numpy.float32(0.5), numpy.float64(0.5), torch.tensor(0.5), 1], ids=repr)
def test_a_learning_rate_of_any_kind_of_number_is_read_and_set(lr: Any) -> None:
    optimizer = sgd(lr=lr)
    step(optimizer)

    here().publish(1)
    assert here()._config["learning_rate"] == float(lr)
    assert apply("learning_rate", 0.25) is None
    assert rates(optimizer) == [0.25]
    assert apply("learning_rate", None) is None
    assert rates(optimizer) == [lr]


class OwnRate(torch.optim.Optimizer):
    """An optimizer that computes its learning rate, such as transformers' Adafactor."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


@pytest.mark.parametrize("defaults", [{"eta": 0.1}, {"lr": None}], ids=repr)
def test_a_learning_rate_that_an_optimizer_does_not_have_is_refused(defaults: dict[str, Any]) -> None:
    optimizer = OwnRate(net().parameters(), defaults)
    step(optimizer)

    for key in ("learning_rate", "learning_rate_factor"):
        assert "OwnRate has no learning rate in its param_groups" in str(apply(key, 0.5))


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("weight_decay", float("nan"), "weight_decay is finite, not nan"),
        ("betas", [0.9, float("inf")], "betas is finite"),
        ("betas", [0.9, 1.5], "Invalid beta parameter at index 1: 1.5"),
        ("eps", -1.0, "Invalid epsilon value: -1.0"),
    ],
)
def test_a_number_that_torch_would_refuse_is_refused(key: str, value: object, why: str) -> None:
    optimizer = torch.optim.Adam(net().parameters(), weight_decay=0.1)
    step(optimizer)
    before = rates(optimizer, key)

    assert why in str(apply(key, value))
    assert rates(optimizer, key) == before


def test_the_values_of_an_optimizer_that_is_gone_are_its_last_ones() -> None:
    def train() -> None:
        optimizer = sgd(lr=0.1)
        step(optimizer)
        optimizer.param_groups[0]["lr"] = 0.05
        here()._read_next = 0.0
        step(optimizer)

    train()
    gc.collect()

    here().close()
    known = {key: value for key, value in here()._config.items() if value is not None}
    assert known == {"learning_rate": 0.05, "momentum": 0.9, "dampening": 0, "weight_decay": 0}
