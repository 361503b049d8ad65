"""What is done in place to a view becomes part of the history of the whole, and of its other views, as in torch."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from loom.tensors.tensors import Tensors
from tests.support.near_tensors import near_tensors
from tests.support.torch_agreement import Operand, agree, given, operands, plain, settled, to_torch

VIEWS: list[Any] = [
    lambda x: x[1],
    lambda x: x[1:],
    lambda x: x[..., 1:3],
    lambda x: x.t(),
    lambda x: x.view(-1)[2:10],
    lambda x: x.diagonal(),
    lambda x: x.unsqueeze(0)[0, ::2],
    lambda x: x.reshape(2, 6)[:, 1:].transpose(0, 1),
]

CHANGES: list[Any] = [
    lambda view, y: view.mul_(y),
    lambda view, y: view.add_(y * y, alpha=2),
    lambda view, y: view.sin_(),
    lambda view, y: view.exp_(),
    lambda view, y: view.fill_(3),
    lambda view, y: view.copy_(y.expand(view.shape)),
    lambda view, y: view.zero_(),
    lambda view, y: view.masked_fill_(view > 0, y),
    lambda view, y: view.__setitem__(0, y),
    lambda view, y: view.__setitem__((..., slice(0, 1)), y * 2),
]


@given(st.data())
def test_a_change_of_a_view(lt: Tensors, data: Any) -> None:
    x = data.draw(operands((3, 4), [torch.float64], views=False))
    y = data.draw(operands((), [torch.float64], grad=True))
    view, other = (data.draw(st.sampled_from(VIEWS)) for _ in range(2))
    change = data.draw(st.sampled_from(CHANGES))

    def work(ns: Any, x: Any, y: Any) -> Any:
        z = x * 1
        before, part = other(z), view(z)
        change(part, y)
        return z * z, before * before, part * part, other(z) * y

    agree(lt, work, [x, y])


def part_of_zeros(ns: Any, x: Any, y: Any) -> Any:
    z = ns.zeros(3, 4, dtype=x.dtype)
    state = y * 1
    for place in range(3):
        state = (state * x[place]).sin()
        z[place] = state
        z[place][1:].mul_(state[1:])
    return z * z


def augmented(ns: Any, x: Any, y: Any) -> Any:
    z = x * 1
    z[1:3] *= y
    z.view(12)[2:6] += y * y
    z[0, 1] -= 2
    return z * z


def part_of_part(ns: Any, x: Any, y: Any) -> Any:
    z = x * 1
    rows = z[1:]
    row = rows[0]
    row.mul_(y)
    rows.sin_()
    return z * z, rows * rows, row * row


def saved_before(ns: Any, x: Any, y: Any) -> Any:
    z = x * 1
    square = z[0] * z[0]
    z[1].mul_(y)
    return square


@pytest.mark.parametrize("work", [part_of_zeros, augmented, part_of_part])
def test_programs(lt: Tensors, work: Any) -> None:
    agree(lt, work, [rows(), plain(torch.arange(4.0, dtype=torch.float64) / 2 + 0.1, True)])


def rows() -> Operand:
    return plain(torch.linspace(-1, 2, 12, dtype=torch.float64).reshape(3, 4), True)


def a_leaf(ns: Any, x: Any) -> Any:
    x[0].mul_(2)


def several(ns: Any, x: Any) -> Any:
    (x * 1).unbind(0)[0].mul_(2)


def one_of_several_from_before(ns: Any, x: Any) -> Any:
    z = x * 1
    row = z.unbind(0)[0]
    z.mul_(2)
    return row * 2


def made_without_gradients(ns: Any, x: Any) -> Any:
    z = x * 1
    with ns.no_grad():
        row = z[0]
    row.mul_(x[0])


def made_without_gradients_before(ns: Any, x: Any) -> Any:
    z = x * 1
    with ns.no_grad():
        row = z[0]
    z.mul_(2)
    return row * 1


def expanded(ns: Any, x: Any) -> Any:
    (x[:1] * 1).expand(3, 4).mul_(x)


@pytest.mark.parametrize(
    "work",
    [a_leaf, several, one_of_several_from_before, made_without_gradients, made_without_gradients_before, expanded],
)
def test_what_torch_refuses(work: Any) -> None:
    with pytest.raises(RuntimeError):
        work(torch, rows().of_torch())
    lt = near_tensors()
    x = rows().of_loom(lt)

    def done() -> None:
        settled((work(lt, x), x))
        lt.synchronize()

    with pytest.raises(RuntimeError):
        done()


def test_what_was_saved_of_a_changed_tensor_is_refused(lt: Tensors) -> None:
    y = plain(torch.ones(4, dtype=torch.float64), True)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        saved_before(torch, rows().of_torch(), y.of_torch()).sum().backward()
    saved_before(lt, x := rows().of_loom(lt), y.of_loom(lt)).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        settled(x.grad)


def test_a_view_follows_its_base(lt: Tensors) -> None:
    def gradient(m: Any) -> Any:
        z = m.zeros(2)
        view = z[0]
        assert not view.requires_grad
        z.add_(m.ones(2, requires_grad=True))
        assert view.requires_grad
        assert not view.is_leaf
        z[1:].mul_(2)
        view.retain_grad()
        (view * 3).backward()
        return None if view.grad is None else view.grad.tolist()

    assert gradient(lt) == gradient(torch)


def test_an_index_that_has_changed_leaves_a_view(lt: Tensors) -> None:
    z, place = lt.zeros(2), lt.tensor(0)
    view = z[place]
    place.add_(1)
    x = lt.ones(2, requires_grad=True)
    z.add_(x)
    view.sum().backward()
    assert x.grad.tolist() == [1.0, 0.0]  # the view is torch's, of the place that it was made of


def test_what_is_changed_does_not_keep_itself_alive(lt: Tensors) -> None:
    z = lt.ones(3, requires_grad=True) * 1
    for place in range(1, 3):
        z[place].mul_(z[place - 1])
    gone = weakref.ref(z)
    gc.disable()
    try:
        total = z.sum()
        del z
        assert gone() is None
    finally:
        gc.enable()
    del total


# Random programs


def run(ns: Any, seed: int, leaves: list[Any]) -> Any:
    """Make tensors and views of them, change some in place, and return a sum of all."""
    chosen = random.Random(seed)
    found = [each * 1 for each in leaves]
    for _ in range(chosen.randrange(4, 12)):
        one, other = chosen.choice(found), chosen.choice(found)
        match chosen.randrange(8):
            case 0:
                found.append(one * 0.5 + other.sum() * 0.1)
            case 1:
                found.append(one[1:3] if one.dim() and one.shape[0] > 3 else one * 2)
            case 2:
                found.append(one.t() if one.dim() == 2 else one.unsqueeze(0))
            case 3:
                found.append(one[chosen.randrange(one.shape[0])] if one.dim() else one * one)
            case 4:
                one.mul_(chosen.choice([2, -1, 0.5]))
            case 5:
                one.add_(other.sum())
            case 6:
                one.copy_(one.detach() * 0.5) if chosen.randrange(2) else one.zero_()
            case 7 if one.dim():
                one[0] = other.sum()
    chosen.shuffle(found)
    total = found[0].sum()
    for each in found[1:]:
        total = total + (each * each).mean()
    return total


def outcome(ns: Any, seed: int, leaves: list[Any]) -> Any:
    try:
        total = run(ns, seed, leaves)
        total.backward()
        settled([each.grad for each in leaves])
    except RuntimeError:
        return None
    return total


def test_random_programs(lt: Tensors) -> None:
    torch.manual_seed(0)
    done = 0
    for seed in range(60):
        data = [torch.randn(4, size, dtype=torch.float64) for size in (5, 6)]
        theirs = [each.clone().requires_grad_() for each in data]
        ours = [plain(each, True).of_loom(lt) for each in data]  # spread over several processes, if there are
        expected, found = outcome(torch, seed, theirs), outcome(lt, seed, ours)
        assert (expected is None) == (found is None), seed
        if expected is None:
            continue
        done += 1
        torch.testing.assert_close(to_torch(found), expected.detach())
        for one, other in zip(theirs, ours, strict=True):
            if one.grad is None or other.grad is None:
                assert one.grad is None or not one.grad.any()
                assert other.grad is None or not to_torch(other.grad).any()
            else:
                torch.testing.assert_close(to_torch(other.grad), one.grad)
    assert done > 20
