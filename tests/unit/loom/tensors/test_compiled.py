"""Compiled functions do what they do without, in one command."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from loom.tensors.tensors import Tensors
from tests.support.near_tensors import near_tensors
from tests.support.torch_agreement import of_the_cpu


@pytest.fixture
def own() -> Tensors:
    """Lazy tensors whose commands the test counts."""
    return near_tensors()


def commands_of(lt: Tensors, work: Callable[[], Any]) -> int:
    """Return how many commands are queued, those that free tensors among them."""
    lt.synchronize()
    put, many = lt._put, 0

    def counted(*args: Any) -> int:
        nonlocal many
        many += 1
        return put(*args)

    lt._put = counted  # type: ignore[method-assign]
    try:
        work()
    finally:
        lt._put = put  # type: ignore[method-assign]
    return many


def trained(lt: Tensors, compiled: bool, make: Callable[[Any], Any], steps: int = 12) -> list[float]:
    lt.seed(3)
    model = lt.nn.Sequential(lt.nn.Linear(4, 8), lt.nn.Tanh(), lt.nn.Linear(8, 1))
    optimizer = make(model.parameters())

    def step(x: Any, y: Any) -> Any:
        loss = (model(x) - y).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"loss": loss, "name": "step"}

    run = lt.compile(step) if compiled else step
    losses = []
    for number in range(steps):
        x = lt.tensor([[number * 0.1, 1.0, -1.0, 0.5], [0.3, number * -0.2, 0.0, 1.0]])
        told = run(x, x.sum(1, keepdim=True))
        assert told["name"] == "step"
        losses.append(told["loss"].item())
    return losses


@pytest.mark.parametrize("name", ["SGD", "momentum", "AdamW"])
def test_a_step_is_the_same(own: Tensors, name: str, caplog: pytest.LogCaptureFixture) -> None:
    make = {
        "SGD": lambda params: own.optim.SGD(params, lr=0.05),
        "momentum": lambda params: own.optim.SGD(params, lr=0.05, momentum=0.9),
        "AdamW": lambda params: own.optim.AdamW(params, lr=0.05),
    }[name]
    with caplog.at_level(logging.WARNING, "loom"):
        assert trained(own, True, make) == trained(own, False, make)
    assert not caplog.records


def test_it_is_one_command(own: Tensors) -> None:
    w = own.ones(3, 3)

    @own.compile
    def work(x: Any) -> Any:
        for _ in range(20):
            x = (x @ w).tanh()
        return x, w, None

    x = own.ones(3, 3)
    expected = [work(x)[0].tolist() for _ in range(3)]
    assert commands_of(own, lambda: work(x)) == 1
    found, kept, nothing = work(x)
    assert (found.tolist(), kept is w, nothing) == (expected[0], True, None)
    assert found.shape == (3, 3)
    assert work(own.ones(1, 3))[0].shape == (1, 3)


def test_what_changes_in_place_is_counted_and_seen(own: Tensors) -> None:
    total = own.zeros(2)

    @own.compile
    def work(x: Any) -> None:
        x[0].mul_(2)
        total.add_(x)

    x = own.ones(2)
    for _ in range(4):
        work(x)
    assert (x.tolist(), total.tolist()) == ([16.0, 1.0], [30.0, 4.0])
    before = x._base.version, total._base.version
    assert commands_of(own, lambda: work(x)) == 1
    assert (x._base.version, total._base.version) > before


def test_random_numbers_are_drawn_anew(own: Tensors) -> None:
    @own.compile
    def draw() -> Any:
        return own.rand(2)

    assert len({tuple(draw().tolist()) for _ in range(6)}) == 6
    assert commands_of(own, draw) == 1


def test_other_arguments_are_recorded_apart(own: Tensors) -> None:
    @own.compile
    def work(x: Any, times: int, *, plus: float) -> Any:
        return x * times + plus

    x = own.ones(1)
    for times in (1, 2):
        for plus in (0.5, 1.5):
            assert [work(x, times, plus=plus).item() for _ in range(5)] == [times + plus] * 5


@pytest.mark.parametrize("kind", ["data", "read", "rebound"])
def test_what_cannot_be_recorded_runs_as_it_is(own: Tensors, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    w, count = own.zeros(1), 0

    @own.compile
    def work(x: Any) -> Any:
        nonlocal w, count
        count += 1
        if kind == "data":
            return x + own.tensor([float(count)])
        if kind == "read":
            return x + x.item() * count
        w = w + x
        return w

    with caplog.at_level(logging.WARNING, "loom"):
        found = [work(own.ones(1)).item() for _ in range(10)]
    assert found == {"rebound": [float(n) for n in range(1, 11)]}.get(kind, [1.0 + n for n in range(1, 11)])
    (warning,) = [each.getMessage() for each in caplog.records]
    assert "work is not compiled" in warning


@of_the_cpu
def test_a_failure_within_names_its_operation(own: Tensors) -> None:
    total = own.zeros(2, 2)

    @own.compile
    def work(x: Any) -> Any:
        y = x.index_select(0, own.arange(2) + x[0, 0].long())
        total.add_(y)
        return y

    good, bad = own.zeros(2, 2), own.full((2, 2), 7.0)
    for _ in range(4):
        work(good)
    assert commands_of(own, lambda: work(good)) == 1
    failed = work(bad)
    with pytest.raises(IndexError, match=r"index_select\(float32\[2, 2\], int64\[2\]\).*test_compiled\.py"):
        failed.tolist()
    with pytest.raises(IndexError, match="index_select"):
        total.tolist()
    assert good.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_within_another_it_is_part_of_it(own: Tensors) -> None:
    @own.compile
    def inner(x: Any) -> Any:
        return x * 2

    @own.compile
    def outer(x: Any) -> Any:
        return inner(x) + inner(x)

    x = own.ones(1)
    assert [outer(x).item() for _ in range(5)] == [4.0] * 5
    assert commands_of(own, lambda: outer(x)) == 1
