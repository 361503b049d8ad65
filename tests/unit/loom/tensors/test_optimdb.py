"""Optimizers agree with torch's own database of optimizers, and schedules of learning rates with torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from loom.errors import NotSupported
from loom.tensors.tensors import Tensors
from tests.support.near_tensors import near_tensors
from tests.support.torch_agreement import PROCESSES, to_torch

pytest.importorskip("expecttest", reason="torch's database of optimizers needs it")

from torch.testing._internal.common_optimizers import OptimizerErrorEnum, OptimizerInfo, optim_db

pytestmark = [
    pytest.mark.skipif(PROCESSES > 1, reason="operations are compared on several processes, not optimizers"),
    pytest.mark.filterwarnings("ignore"),
]

ABSENT = {"LBFGS", "SparseAdam"}
"""Optimizers of torch that lazy tensors do not have: they need the loss as a function, or sparse gradients."""

FURTHER: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}, {"fused": False}, {"capturable": False}]
"""Arguments that say how torch computes, and change nothing."""


def named(info: OptimizerInfo) -> str:
    return str(info.optim_cls.__name__)


OPTIMIZERS = [each for each in optim_db if named(each) not in ABSENT]


@pytest.fixture
def own() -> Tensors:
    return near_tensors()


def of(m: Any, value: Any) -> Any:
    """Return an argument of an optimizer for torch, or for lazy tensors."""
    return m.tensor(value) if isinstance(value, torch.Tensor) and m is not torch else value


def trained(m: Any, name: str, dtype: str, arguments: dict[str, Any], steps: int = 5) -> list[Any]:
    """Train two parameters for some steps, the state sent through a new optimizer between; return them."""
    generator = torch.Generator().manual_seed(3)
    data = [torch.rand(2, 3, generator=generator, dtype=getattr(torch, dtype)) for _ in range(3)]
    one, other, target = (m.tensor(each.numpy()) for each in data)
    params = [one.requires_grad_(), other.requires_grad_()]
    kwargs = {key: of(m, value) for key, value in arguments.items()}
    make = getattr(m.optim, name)
    optimizer = make(params, **kwargs)
    for step in range(steps):
        if step == 3:
            state = optimizer.state_dict()
            optimizer = make(params, **kwargs)
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        ((params[0] * params[1] - target) ** 2).sum().backward()
        optimizer.step()
    return params


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("info", OPTIMIZERS, ids=named)
def test_an_optimizer_agrees(own: Tensors, info: OptimizerInfo, dtype: str) -> None:
    inputs = [each.kwargs for each in info.optim_inputs_func("cpu", getattr(torch, dtype))]
    for arguments in [*inputs, *(each for each in FURTHER if next(iter(each)) in info.supported_impls)]:
        if any(isinstance(each, torch.Tensor) for each in arguments.values()):
            with pytest.raises(NotSupported, match="is a number of Python on lazy tensors"):
                trained(own, named(info), dtype, arguments)
            continue
        found, wanted = (trained(m, named(info), dtype, arguments) for m in (own, torch))
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(to_torch(one), other.detach())


@pytest.mark.parametrize("info", OPTIMIZERS, ids=named)
def test_an_optimizer_refuses_what_torch_refuses(own: Tensors, info: OptimizerInfo) -> None:
    for given in info.optim_error_inputs_func("cpu", torch.float32):
        if given.error_on is not OptimizerErrorEnum.CONSTRUCTION_ERROR or given.error_type is UserWarning:
            continue
        arguments = given.optimizer_error_input

        known: dict[int, Any] = {}

        def made(value: Any, known: dict[int, Any] = known) -> Any:
            if isinstance(value, torch.nn.Parameter):
                return known.setdefault(id(value), own.nn.Parameter(own.tensor(value.detach())))
            if isinstance(value, torch.Tensor):
                return own.tensor(value)
            if isinstance(value, dict):
                return {key: made(each) for key, each in value.items()}
            return type(value)(map(made, value)) if isinstance(value, (list, tuple)) else value

        params = made(arguments.params or [torch.nn.Parameter(torch.ones(2))])
        with pytest.raises((given.error_type, TypeError, NotSupported)):
            getattr(own.optim, named(info))(params, **made(arguments.kwargs))


def test_no_other_optimizer_is_absent(own: Tensors) -> None:
    assert {name for name in map(named, optim_db) if not hasattr(own.optim, name)} == ABSENT


SCHEDULES: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": 2, "gamma": 0.5},
    "MultiStepLR": {"milestones": [1, 3, 3]},
    "ExponentialLR": {"gamma": 0.9},
    "LinearLR": {"start_factor": 0.25, "total_iters": 3},
    "CosineAnnealingLR": {"T_max": 4, "eta_min": 0.01},
    "LambdaLR": {"lr_lambda": lambda epoch: 1 / (epoch + 1)},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_agrees(own: Tensors, name: str) -> None:
    def rates(m: Any) -> Any:
        optimizer = m.optim.SGD([m.ones(2, requires_grad=True)], lr=0.5)
        schedule = getattr(m.optim.lr_scheduler, name)(optimizer, **SCHEDULES[name])
        found = []
        for step in range(8):
            found += [schedule.get_last_lr(), optimizer.param_groups[0]["lr"]]
            optimizer.step()
            schedule.step()
            if step == 4:
                state = schedule.state_dict()
                schedule = getattr(m.optim.lr_scheduler, name)(optimizer, **SCHEDULES[name])
                schedule.load_state_dict(state)
                optimizer.param_groups[0]["lr"] = schedule.get_last_lr()[0]
        return [each[0] if isinstance(each, list) else each for each in found]

    assert rates(own) == pytest.approx(rates(torch))
