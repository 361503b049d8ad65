"""What a program sees beside operations: making tensors, showing them, gradients' rules, memory, networks."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import random
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

import loom
from loom.tensors.tensors import Tensors
from tests.support.near_tensors import near_tensors
from tests.support.torch_agreement import to_torch

MADE = [
    lambda ns: ns.zeros(2, 3),
    lambda ns: ns.ones((2, 3), dtype=ns.int64),
    lambda ns: ns.full((2,), 7),
    lambda ns: ns.full((2,), 7.5),
    lambda ns: ns.full((), True),
    lambda ns: ns.eye(3),
    lambda ns: ns.eye(2, 3, dtype=ns.float64),
    lambda ns: ns.arange(5),
    lambda ns: ns.arange(1, 2, 0.25),
    lambda ns: ns.arange(5, 0, -2),
    lambda ns: ns.zeros(0, 3),
    lambda ns: ns.tensor([[1, 2], [3, 4]]),
    lambda ns: ns.tensor([1.5, float("inf")], dtype=ns.float16),
    lambda ns: ns.tensor([1.1, 3e38, -0.3], dtype=ns.bfloat16),
    lambda ns: ns.tensor([True, False]),
    lambda ns: ns.tensor(3),
    lambda ns: ns.tensor([]),
    lambda ns: ns.tensor([1 + 2j]),
    lambda ns: ns.tensor(np.arange(6, dtype=np.int16).reshape(2, 3)),
    lambda ns: ns.tensor(np.arange(6.0).reshape(2, 3).T),
    lambda ns: ns.zeros_like(ns.ones(2, dtype=ns.float64)),
]


@pytest.mark.parametrize("make", MADE)
def test_tensors_are_made_as_torch_makes_them(lt: Tensors, make: Any) -> None:
    expected, found = make(torch), make(lt)
    assert (found.shape, found.dtype.name) == (tuple(expected.shape), str(expected.dtype).removeprefix("torch."))
    assert torch.equal(to_torch(found), expected.contiguous())
    if expected.dtype is not torch.bfloat16:
        assert found.tolist() == expected.tolist()


@pytest.mark.parametrize(
    "make",
    [
        lambda ns: ns.tensor([[1, 2], [3]]),
        lambda ns: ns.tensor([[1, 2], 3]),
        lambda ns: ns.tensor(["a"]),
        lambda ns: ns.zeros(-1),
        lambda ns: ns.arange(0, 5, -1),
        lambda ns: ns.tensor(1).requires_grad_(),
        lambda ns: ns.ones(2).backward(),
        lambda ns: ns.ones(2, requires_grad=True).mul(2).backward(),
        lambda ns: ns.ones(2, requires_grad=True).add_(1),
        lambda ns: ns.ones(2).item(),
        lambda ns: bool(ns.ones(2)),
        lambda ns: ns.ones(2, requires_grad=True).numpy(),
        lambda ns: len(ns.tensor(1)),
        lambda ns: ns.ones(2, requires_grad=True).mul(2).requires_grad_(False),
    ],
)
def test_what_torch_refuses_is_refused(lt: Tensors, make: Any) -> None:
    with pytest.raises(Exception) as expected:  # noqa: PT011 - torch says which
        make(torch)
    with pytest.raises(expected.type):
        make(lt)


def test_a_tensor_shows_its_elements_when_they_are_here(lt: Tensors) -> None:
    x = lt.tensor([1.0, 2.0], requires_grad=True)
    assert repr(x) == "tensor(shape=[2], dtype=float32, requires_grad=True)"
    x.tolist()
    assert repr(x) == "tensor([1.0, 2.0], dtype=float32, requires_grad=True)"
    with lt.no_grad():
        x += 1
    assert "shape" in repr(x)
    assert "grad_fn=<mul>" in repr(x * x)


def test_any_function_of_torch_can_be_called(lt: Tensors) -> None:
    x = lt.tensor([1.0, 2.0, 3.0, 4.0])
    found = lt.call("torch.fft.rfft", x)
    assert "not known" in repr(found)
    assert (found.shape, found.dtype) == ((3,), lt.complex64)
    assert found.tolist() == torch.fft.rfft(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist()
    assert (lt.call("torch.fft.rfft", x).abs() + 1).shape == (3,)


def test_gradients_pass_any_function_of_torch(lt: Tensors) -> None:
    found = []
    for erfinv, ns in ((torch.erfinv, torch), (lambda x: lt.call("torch.erfinv", x), lt)):
        x = ns.tensor([0.25, -0.5], requires_grad=True)
        erfinv(x).sum().backward()
        found.append(x.grad.tolist())
    assert found[0] == pytest.approx(found[1])


@pytest.mark.parametrize("name", ["torch.nope", "torch._C._jit_init", "os.system", "torch.os.system", "float32"])
def test_what_is_no_function_of_torch_fails_at_the_read(lt: Tensors, name: str) -> None:
    failed = lt.call(name, lt.ones(1))
    with pytest.raises(AttributeError, match=r"queued at .*test_tensors\.py"):
        failed.tolist()


def test_a_failure_spreads_and_nothing_else_does() -> None:
    lt = near_tensors()
    good, bad = lt.ones(2), lt.call("linalg.cholesky", lt.zeros(2, 2))
    depends, beside = lt.call("add", bad, good), good + good
    with pytest.raises(RuntimeError, match=r"linalg\.cholesky"):
        depends.tolist()
    assert beside.tolist() == [2.0, 2.0]
    with pytest.raises(RuntimeError, match=r"linalg\.cholesky"):
        lt.synchronize()
    lt.synchronize()


def test_memory_is_known_by_line_and_limited() -> None:
    lt = near_tensors()
    kept = lt.zeros(1000)
    for _ in range(10):
        lt.zeros(500) + 1
    held = lt.memory()
    assert list(held.values()) == [4000]
    assert "test_tensors.py" in next(iter(held))
    lt.limit_memory(8003)
    with pytest.raises(loom.LimitReached, match=r"4004 bytes more than the 4000 .*test_tensors.py"):
        lt.zeros(1001)
    assert lt.zeros(999).add_(1).sum().item() == 999
    view = kept[10:]
    del kept
    gc.collect()
    assert view.sum().item() == 0


def test_the_state_of_an_optimizer_is_memory() -> None:
    lt = near_tensors()
    w = lt.zeros(1000, requires_grad=True)
    optimizer = lt.optim.Adam([w])
    w.sum().backward()
    optimizer.step()
    assert next(iter(lt.memory().values())) == 2 * 4000
    assert optimizer.state[w]["exp_avg"].shape == (1000,)


def test_what_is_queued_behind_handles_that_died_is_sent_by_itself() -> None:
    lt = near_tensors()
    x = lt.ones(2)
    lt.synchronize()
    for _ in range(3):
        gone = x + 1
        lt.synchronize()
        del gone
        y = x + 2
        held = lt._dispatcher._workers.values.tensors
        deadline = time.monotonic() + 30
        while y._value.id not in held:
            assert time.monotonic() < deadline
            time.sleep(0.001)


def test_hooks_and_kept_gradients(lt: Tensors) -> None:
    found: list[list[Any]] = []
    for ns in (torch, lt):
        x = ns.tensor([1.0, 2.0], requires_grad=True)
        y = x * 3
        scale = ns.tensor([1.0, -1.0])
        y.retain_grad()
        y.register_hook(lambda grad, scale=scale: grad * 2 + scale)
        gone = x.register_hook(lambda grad: grad * 100)
        x.register_hook(lambda grad: None)
        gone.remove()
        (y * y).sum().backward()
        found.append([x.grad.tolist(), y.grad.tolist()])
    assert found[0] == found[1]


def test_a_hook_that_cannot_be_recorded_is_refused_when_it_is_registered(lt: Tensors) -> None:
    x, seen = lt.ones(2, requires_grad=True), []
    with pytest.raises(loom.NotSupported, match="it reads a tensor"):
        x.register_hook(lambda grad: seen.append(grad.tolist()))
    with pytest.raises(loom.NotSupported, match="it keeps its gradient"):
        x.register_hook(lambda grad: seen.append(grad))
    counted = lt.zeros(2)
    with pytest.raises(loom.NotSupported, match="changes a tensor from outside"):
        x.register_hook(lambda grad: counted.add_(grad))
    with pytest.raises(RuntimeError, match="doesn't require gradient"):
        lt.ones(2).register_hook(lambda grad: grad)
    assert (x * 2).sum().item() == 4.0


def test_a_graph_is_used_once_unless_it_is_kept(lt: Tensors) -> None:
    x = lt.tensor(3.0, requires_grad=True)
    y = x * x
    y.backward(retain_graph=True)
    y.backward()
    assert x.grad.item() == 12.0
    y.backward()
    with pytest.raises(RuntimeError, match=r"a second time.*queued at .*test_tensors\.py"):
        x.grad.item()
    x.grad = None
    (first,) = lt.grad(x * x * x, x, create_graph=True)
    (second,) = lt.grad(first, x)
    assert (first.item(), second.item()) == (27.0, 18.0)
    with pytest.raises(RuntimeError, match="allow_unused"):
        lt.grad(x * x, lt.ones(1, requires_grad=True))


def test_what_was_saved_and_changed_in_place_is_noticed(lt: Tensors) -> None:
    x = lt.tensor([1.0, 2.0], requires_grad=True)
    y = x.exp()
    y.add_(1)
    y.sum().backward()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|exp"):
        x.grad.tolist()


def test_gradients_of_two_tensors_are_apart(lt: Tensors) -> None:
    x, y = lt.ones(2, requires_grad=True), lt.ones(2, requires_grad=True)
    (x + y).sum().backward()
    x.grad[0].mul_(5)
    assert (x.grad.tolist(), y.grad.tolist()) == ([5.0, 1.0], [1.0, 1.0])


def test_a_view_from_before_a_change_in_place_follows_it(lt: Tensors) -> None:
    x = lt.ones(2, 2, requires_grad=True)
    y = x * 1
    view, apart = y[0], y.detach()
    y.mul_(2)
    assert apart.sum().item() == 8.0
    view.sum().backward()
    assert x.grad.tolist() == [[2.0, 2.0], [0.0, 0.0]]


def test_networks_and_optimizers_agree_with_torch(lt: Tensors) -> None:
    torch.manual_seed(0)
    theirs = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 3)
    ).double()
    nn = lt.nn
    ours = nn.Sequential(
        nn.Linear(6, 8, dtype=lt.float64),
        nn.LayerNorm(8, dtype=lt.float64),
        nn.GELU(),
        nn.Linear(8, 3, dtype=lt.float64),
    )
    ours.load_state_dict(theirs.state_dict())
    x, y = torch.randn(16, 6, dtype=torch.float64), torch.randint(3, (16,))
    drawn = random.Random(0)
    makers = [
        lambda ns, params: ns.SGD(params, lr=0.1),
        lambda ns, params: ns.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
        lambda ns, params: ns.Adam(params, lr=0.01, weight_decay=0.1),
        lambda ns, params: ns.AdamW(params, lr=0.01),
    ]
    for make in makers:
        one, other = make(torch.optim, theirs.parameters()), make(lt.optim, ours.parameters())
        for _ in range(5):
            chosen = [drawn.randrange(16) for _ in range(8)]
            for ns, model, optimizer, a, b in (
                (torch.nn.functional, theirs, one, x[chosen], y[chosen]),
                (lt, ours, other, lt.tensor(x[chosen]), lt.tensor(y[chosen])),
            ):
                loss = ns.cross_entropy(model(a), b)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    back = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 3)
    ).double()
    back.load_state_dict(ours.state_dict())
    for name, each in theirs.state_dict().items():
        torch.testing.assert_close(back.state_dict()[name], each, rtol=1e-9, atol=1e-12)
    with pytest.raises(RuntimeError, match="Missing key"):
        ours.load_state_dict({})


def test_attention_agrees_with_torch(lt: Tensors) -> None:
    torch.manual_seed(1)
    for first in (False, True):
        theirs = torch.nn.MultiheadAttention(8, 2, batch_first=first).double()
        ours = lt.nn.MultiheadAttention(8, 2, batch_first=first, dtype=lt.float64)
        ours.load_state_dict(theirs.state_dict())
        x = torch.randn(3, 5, 8, dtype=torch.float64)
        size = x.shape[1 if first else 0]
        mask = torch.ones(size, size).triu(1).bool()
        for needed in (False, True):
            expected, weights = theirs(x, x, x, attn_mask=mask, need_weights=needed)
            found, told = ours(
                lt.tensor(x), lt.tensor(x), lt.tensor(x), attn_mask=lt.tensor(mask), need_weights=needed
            )
            torch.testing.assert_close(to_torch(found), expected.detach())
            if needed:
                torch.testing.assert_close(to_torch(told), weights.detach())


def test_a_module_of_ones_own(lt: Tensors) -> None:
    class Twice(lt.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inner = lt.nn.Linear(2, 2, bias=False)
            self.scale = lt.nn.Parameter(lt.ones(()))
            self.plain = lt.ones(1)
            self.register_buffer("seen", lt.zeros(1))

        def forward(self, x: Any) -> Any:
            return self.inner(self.inner(x)) * self.scale

    model = Twice()
    assert [name for name, _ in model.named_parameters()] == ["scale", "inner.weight"]
    assert list(model.state_dict()) == ["scale", "seen", "inner.weight"]
    model(lt.ones(2)).sum().backward()
    assert all(each.grad is not None for each in model.parameters())
    model.zero_grad()
    assert model.inner.weight.grad is None
    assert not model.eval().inner.training
    assert isinstance(model.inner, lt.nn.Linear)
    assert "(inner): Linear()" in repr(model)
    twin = copy.deepcopy(model)
    assert [name for name, _ in twin.named_parameters()] == ["scale", "inner.weight"]
    with lt.no_grad():
        model.scale.add_(1)
    assert (twin.scale.item(), model.scale.item()) == (1.0, 2.0)


def test_what_a_tensor_is_is_known_before_it_is_read(lt: Tensors) -> None:
    x = lt.randn(2, 3, requires_grad=True)
    y = x.t()

    assert (y.shape, y.strides, y.requires_grad, y.grad, x.device) == ((3, 2), (1, 3), True, None, "loom")


def test_the_update_of_the_plan_goes_on_training(lt: Tensors) -> None:
    inputs = np.random.default_rng(0).normal(size=(32, 4))
    x, target = lt.tensor(inputs), lt.tensor(inputs @ np.array([[1.0], [-2.0], [3.0], [0.5]]))
    w = lt.zeros(4, 1, dtype=lt.float64, requires_grad=True)
    b = lt.zeros(1, dtype=lt.float64)

    def update() -> None:
        nonlocal w
        w = w.sub(w.grad.mul(0.1))

    for _ in range(100):
        y = x.matmul(w).add(b)
        loss = y.sub(target).pow(2).mean()
        loss.backward()
        lt.no_grad(update)
        assert (w.requires_grad, w.is_leaf, w.grad) == (True, True, None)
    assert w.flatten().tolist() == pytest.approx([1.0, -2.0, 3.0, 0.5], abs=1e-3)


def test_a_tensor_knows_what_made_it_and_keeps_nothing(lt: Tensors) -> None:
    x, w = lt.ones(2), lt.ones(2, requires_grad=True)
    y = x * w
    z = y.sum()
    assert (z.op, y.op, x.op, w.op) == ("sum", "mul", "", "")
    assert [id(each) for each in y.prev] == [id(x), id(w)]
    assert z.prev[0] is y
    assert repr(lt.graph(z)).splitlines()[0] == "0: sum float32[] of 1"
    assert lt.graph(z)._repr_html_().count("<rect") == 4
    del y
    assert z.prev == []
    z.backward()
    assert w.grad.tolist() == [1.0, 1.0]
    with lt.no_grad():
        assert (x * w).prev == []


def test_a_failed_backward_leaves_no_gradient_to_a_step(lt: Tensors) -> None:
    w, other = lt.ones(2, requires_grad=True), lt.ones(2, requires_grad=True)
    (w * 2 + other).sum().backward()
    lt.call("linalg.cholesky", (w[:1] * 0).reshape(1, 1)).sum().backward()
    with pytest.raises(RuntimeError, match=r"linalg\.cholesky.*queued at .*test_tensors\.py"):
        w.grad.tolist()
    optimizer = lt.optim.SGD([w, other], lr=0.5)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"linalg\.cholesky"):
        w.tolist()
    assert other.tolist() == [0.5, 0.5]


def test_a_gradient_that_only_torch_knows_is_asked_for(lt: Tensors) -> None:
    x, y = lt.ones(2, requires_grad=True), lt.ones(2, requires_grad=True)
    (lt.call("histc", x).sum() + y.sum()).backward()
    assert x.grad is None
    assert y.grad.tolist() == [1.0, 1.0]


def test_a_weight_is_changed_in_place_or_made_anew(lt: Tensors) -> None:
    w = lt.ones(2, requires_grad=True)
    (w * w).sum().backward()
    with lt.no_grad():
        made = w.sub(w.grad.mul(0.25))
        w -= 0.5 * w.grad

    assert (w.tolist(), w.requires_grad, w.is_leaf) == ([0.0, 0.0], True, True)
    assert (made.tolist(), made.requires_grad) == ([0.5, 0.5], False)
    anew = made.detach().requires_grad_()
    anew.sum().backward()
    assert anew.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("mode", ["no_grad", "enable_grad"])
@pytest.mark.parametrize("called", [True, False])
def test_a_function_is_run_without_a_graph_or_with_one(lt: Tensors, mode: str, called: bool) -> None:
    w = lt.ones(2, requires_grad=True)

    def double(x: Any) -> Any:
        return 2 * x

    decorate = getattr(lt, mode)
    doubled = (decorate() if called else decorate)(double)

    with lt.no_grad():
        assert doubled(w).requires_grad is (mode == "enable_grad")
    assert doubled(w).requires_grad is (mode == "enable_grad")


def test_a_loop_of_a_hundred_steps_changes_its_weights_in_place(lt: Tensors) -> None:
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(32, 4))
    x, y = lt.tensor(inputs), lt.tensor(inputs @ np.array([[1.0], [-2.0], [3.0], [0.5]]))
    w = lt.zeros(4, 1, dtype=lt.float64, requires_grad=True)
    losses = []
    for step in range(100):
        loss = (x.matmul(w).sub(y)).pow(2).mean()
        loss.backward()
        with lt.no_grad():
            w -= w.grad.mul(0.1)
        w.grad = None
        if step % 25 == 0:
            losses.append(loss.item())

    assert losses == sorted(losses, reverse=True)
    assert w.flatten().tolist() == pytest.approx([1.0, -2.0, 3.0, 0.5], abs=1e-3)


def test_a_handle_is_copied_and_not_sent(lt: Tensors) -> None:
    x = lt.tensor([1.0, 2.0], requires_grad=True)
    y = copy.deepcopy(x)
    with lt.no_grad():
        x += 1
    assert (y.tolist(), y.requires_grad) == ([1.0, 2.0], True)
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(x * 2)
    with pytest.raises(loom.NotSupported, match="a lazy tensor is a handle"):
        pickle.dumps(x)


def test_what_is_not_sent_is_said_by_the_next_read() -> None:
    lt = near_tensors()
    workers = lt._dispatcher._workers
    run, failed = workers.run, threading.Event()

    class Lost:
        def call_one(self, *args: Any) -> Any:
            failed.set()
            raise loom.SessionClosed("the session is over")

    workers.run = Lost()
    lt.ones(1)
    assert failed.wait(10)
    workers.run = run
    with pytest.raises(loom.ProtocolMismatch):  # the batch is missing
        lt.ones(1).item()


def test_a_seed_gives_the_same_numbers(lt: Tensors) -> None:
    lt.seed(5)
    first = lt.randn(3).tolist()
    lt.seed(5)
    assert lt.randn(3).tolist() == first


def test_a_reset_frees_all_that_has_no_name() -> None:
    lt = near_tensors()
    w, x = lt.tensor([1.0]), lt.ones(1000)
    y = x + w
    lt.named["w"] = w
    lt.reset()
    assert (lt.memory(), lt._dispatcher.bytes) == ({}, 0)
    lt.synchronize()
    assert not lt._dispatcher._workers.values.tensors
    for gone in (y, x * 2.0):
        with pytest.raises(RuntimeError, match=r"freed by lt\.reset\(\): make it again"):
            gone.tolist()
    del w, x, y, gone
    assert lt.ones(2).tolist() == [1.0, 1.0]
    assert lt._dispatcher._workers.values.kept["w"][0].tolist() == [1.0]


def test_a_tensor_is_awaited() -> None:
    lt = near_tensors()

    async def read() -> list[Any]:
        loss = lt.tensor([1.0, 2.0]).sum()
        return [await loss, await lt.ones(2), await loss.aitem()]

    assert asyncio.run(read()) == [3.0, [1.0, 1.0], 3.0]


def test_processes_compute_with_so_many_threads() -> None:
    lt, before = near_tensors(), torch.get_num_threads()
    try:
        lt.init(threads=before + 1)
        lt.synchronize()
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
