"""Tensors that are spread over four processes of a mesh."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import loom
from loom.tensors import Replicate, Shard, layout_rules
from loom.tensors.tensors import Tensors
from tests.support.near_tensors import NearWorkers, near_tensors
from tests.support.torch_agreement import to_torch


@pytest.fixture(scope="module")
def lt() -> Iterator[Tensors]:
    with NearWorkers({"hosts": 1, "gpus": 4}) as workers:
        yield Tensors(workers)


@pytest.fixture(scope="module")
def squared() -> Iterator[Tensors]:
    with NearWorkers({"hosts": 2, "gpus": 2}) as workers:
        yield Tensors(workers)


def rows(count: int = 6, columns: int = 5) -> torch.Tensor:
    return torch.arange(float(count * columns)).reshape(count, columns)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Shard(-1), Replicate()])
def test_a_tensor_is_spread_and_gathered(lt: Tensors, placement: Any) -> None:
    x = lt.tensor(rows(), placements=[placement])
    expected = Shard(1) if placement == Shard(-1) else placement
    assert x.placements == (expected,)
    assert (x.shape, x.strides) == ((6, 5), (5, 1))
    assert torch.equal(to_torch(x), rows())
    assert x.full_tensor().placements == (Replicate(),)
    assert torch.equal(to_torch(x.redistribute([Shard(0)]).redistribute([Shard(1)])), rows())


def test_each_process_has_its_part_only(lt: Tensors) -> None:
    x = lt.zeros(8, 100, placements=[Shard(0)])
    y = lt.zeros(8, 100)
    assert x.placements == (Shard(0),)
    before = lt.memory_by_process()
    del x
    after = lt.memory_by_process()
    assert [one - other for one, other in zip(before, after, strict=True)] == [800] * 4
    del y


def test_a_mesh_of_two_dimensions(squared: Tensors) -> None:
    data = rows(8, 6)
    assert squared.mesh == {"hosts": 2, "gpus": 2}
    x = squared.tensor(data, placements=[Shard(0), Shard(1)])
    y = squared.tensor(data, placements=[Replicate(), Shard(0)])
    found = x @ y.t()
    assert torch.equal(to_torch(found), data @ data.t())
    assert (x.placements, y.placements) == ((Shard(0), Shard(1)), (Replicate(), Shard(0)))


def test_torchs_own_placements_are_taken(lt: Tensors) -> None:
    from torch.distributed import tensor

    assert lt.zeros(4, placements=[tensor.Shard(0)]).placements == (Shard(0),)
    assert lt.zeros(4, placements=[tensor.Replicate(), tensor.Shard(0)]).placements == (Shard(0),)


def test_placements_that_do_not_fit_are_refused(lt: Tensors) -> None:
    with pytest.raises(ValueError, match=r"same length as `device_mesh.ndim`.*'gpus': 4"):
        lt.zeros(4, placements=[Shard(0)] * 3)
    with pytest.raises(IndexError, match="out of range"):
        lt.zeros(4).redistribute([Shard(1)])
    with pytest.raises(TypeError, match="only operations give partial sums"):
        lt.zeros(4, placements=[torch.distributed.tensor.Partial()])
    with pytest.raises(TypeError, match="a placement is Shard"):
        lt.zeros(4, placements=[0])
    assert lt.ones(2).tolist() == [1.0, 1.0]


def test_in_one_process_a_placement_means_nothing() -> None:
    lt = near_tensors()
    x = lt.ones(4, 2, placements=[Shard(0)])
    assert (x.placements, x.redistribute([Shard(1)]).tolist()) == ((), [[1.0, 1.0]] * 4)
    y = x.full_tensor()
    y.mul_(3.0)
    assert x.tolist() == [[1.0, 1.0]] * 4


@pytest.mark.parametrize("size", [(3, 1), (2, 0)])
def test_what_is_spread_lies_in_rows_where_a_size_is_one_or_none(lt: Tensors, size: tuple[int, int]) -> None:
    spread = lt.zeros(size[::-1]).T.redistribute([Shard(0)])
    assert spread.strides == torch.zeros(size).stride()
    assert spread.movedim(0, 0).strides == spread.strides  # of the first one the workers tell


@pytest.mark.parametrize("placements", [(Shard(0), Replicate()), (Replicate(), Shard(0)), (Shard(1), Shard(0))])
def test_second_gradients_of_a_layer_norm(lt: Tensors, placements: tuple[Any, Any]) -> None:
    def second(m: Any, x: Any, weight: Any) -> Any:
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        norm, grad = (m.layer_norm, m.grad) if m is lt else (torch.nn.functional.layer_norm, torch.autograd.grad)
        grads = grad((norm(x, (4,), weight) ** 2).sum(), [x, weight], create_graph=True)
        (grads[0] ** 2).sum().add((grads[1] ** 2).sum()).backward()
        return x.grad, weight.grad

    x, weight = rows(8, 4).double().sin(), torch.linspace(1, 2, 4, dtype=torch.float64)
    given = (lt.tensor(each, placements=[how]) for each, how in zip((x, weight), placements, strict=True))
    for found, wanted in zip(second(lt, *given), second(torch, x, weight), strict=True):
        assert torch.allclose(to_torch(found), wanted)


def test_what_is_redistributed_has_memory_of_its_own(lt: Tensors) -> None:
    for placement in (Shard(0), Replicate()):
        for other in (Shard(0), Replicate()):
            x = lt.tensor(rows(), placements=[placement])
            y = x.redistribute([other])
            y.mul_(0.0)
            assert torch.equal(to_torch(x), rows())


def test_what_is_whole_needs_no_group() -> None:
    with NearWorkers({"gpus": 2}) as workers:
        lt = Tensors(workers)
        x = lt.ones(2)
        y = x.redistribute([Replicate()]).mul_(2.0)
        assert (x.full_tensor().tolist(), y.tolist(), x.placements) == ([1.0, 1.0], [2.0, 2.0], (Replicate(),))


def test_gradients_go_through_a_redistribution(lt: Tensors) -> None:
    x = lt.tensor(rows(), requires_grad=True, placements=[Shard(0)])
    (x.redistribute([Shard(1)]) * x.full_tensor()).sum().backward()
    assert torch.equal(to_torch(x.grad), 2 * rows())


def test_a_view_and_its_base_change_together(lt: Tensors) -> None:
    for placement in (Shard(0), Shard(1)):
        expected = rows()
        x = lt.tensor(expected.clone(), placements=[placement])
        mine, theirs = [x[1], x[2:4], x.t(), x[:, 0]], [expected[1], expected[2:4], expected.t(), expected[:, 0]]
        pairs = list(zip(mine, theirs, strict=True))
        for step, (one, other) in enumerate(pairs):
            one.add_(10.0 * (step + 1))
            other.add_(10.0 * (step + 1))
        x.mul_(2.0)
        expected.mul_(2.0)
        x[0] = 7.0
        expected[0] = 7.0
        assert torch.equal(to_torch(x), expected)
        for one, other in pairs:
            assert torch.equal(to_torch(one), other)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1)])
def test_a_view_changes_in_place_as_part_of_a_graph(lt: Tensors, placement: Any) -> None:
    def derivatives(grad: Any, x: Any, y: Any) -> list[float]:
        z = x * 1
        row, other = z[1], z.t()
        row.mul_(y)
        (first,) = grad([(other * other).sum() * y], [y], create_graph=True)
        (second,) = grad([first], [y])
        return [first.item(), second.item()]

    elements = torch.arange(16.0).reshape(4, 4)
    expected = derivatives(torch.autograd.grad, elements, torch.tensor(2.0, requires_grad=True))
    x = lt.tensor(elements).redistribute([placement])
    assert derivatives(lt.grad, x, lt.tensor(2.0, requires_grad=True)) == expected


def test_a_view_of_a_view_and_one_of_several_change_too(lt: Tensors) -> None:
    expected = rows(4, 4)
    x = lt.tensor(expected.clone(), placements=[Shard(0)])
    first, second = x.split(2)
    one, other = expected.split(2)
    inner, its = second[1][1:3], other[1][1:3]
    inner.zero_()
    its.zero_()
    first.t().mul_(3.0)
    one.t().mul_(3.0)
    for mine, theirs in ((x, expected), (first, one), (second, other), (inner, its)):
        assert torch.equal(to_torch(mine), theirs)


def test_a_whole_tensor_changes_by_one_that_is_spread(lt: Tensors) -> None:
    x = lt.tensor(rows())
    view = x[1]
    x.add_(lt.tensor(rows(), placements=[Shard(0)]))
    assert x.placements == (Replicate(),)
    assert torch.equal(to_torch(x), 2 * rows())
    assert torch.equal(to_torch(view), 2 * rows()[1])


def test_what_no_dimension_cuts_is_whole(lt: Tensors) -> None:
    x = lt.tensor(rows(8, 4), placements=[Shard(0)])
    w = lt.ones(3, 4)
    assert (x.sum().placements, x.mean(0).placements, x.sum(1).placements) == (
        (Replicate(),), (Replicate(),), (Shard(0),)
    )  # fmt: skip
    assert lt.linear(x, w).placements == (Shard(0),)


def test_what_torch_gets_wrong_is_right(lt: Tensors) -> None:
    data = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    x, theirs = lt.tensor(data, requires_grad=True, placements=[Shard(0)]), data.clone().requires_grad_()
    assert (x.argmax().item(), x.detach().gt(9.0).any().item()) == (int(data.argmax()), False)
    assert x.detach().mul(0).to(lt.uint8).add(1).any().item() == 1
    torch.testing.assert_close(to_torch(x.mean(None, True)), data.mean().reshape(1, 1))
    for one, home in ((x, lt), (theirs, torch.nn.functional)):
        home.huber_loss(one, one.detach() * 0.0).backward()
    torch.testing.assert_close(to_torch(x.grad), theirs.grad)


def test_a_division_of_ints_in_place(lt: Tensors) -> None:
    for placement in (Shard(0), Shard(1)):
        x = lt.arange(50).view(10, 5).redistribute([placement]).clone()
        x.floor_divide_(3)
        assert x.tolist() == (rows(10).long() // 3).tolist()


def test_gradients_of_a_vector_and_a_matrix(lt: Tensors) -> None:
    for placement in (Shard(0), Replicate()):
        x = lt.tensor(rows(1, 10)[0], placements=[placement], requires_grad=True)
        w = lt.tensor(rows(10, 5), placements=[Shard(0)], requires_grad=True)
        (x @ w).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == rows(10, 5).sum(1).tolist()


def powers(m: Any, x: Any, y: Any) -> Any:
    return x.pow(y[0, 0].detach())


def mapped(m: Any, x: Any, y: Any) -> Any:
    return (m.nn.functional if m is torch else m).linear(x, y)


@pytest.mark.parametrize("work", [powers, mapped])
def test_gradients_of_complex_numbers(lt: Tensors, work: Any) -> None:
    def gradients(m: Any, *how: Any) -> Any:
        leaves = [m.tensor(each.numpy() / 7 + 1 + 1j) for each in (rows(1, 8)[0], rows(8, 8))]
        leaves = [(each.redistribute(*how) if how else each).detach().requires_grad_() for each in leaves]
        found = work(m, *leaves)
        (found * found.conj()).real.sum().backward()
        return leaves[0].grad.tolist()

    torch.testing.assert_close(gradients(lt, [Shard(0)]), gradients(torch), rtol=1e-4, atol=1e-4)


def test_what_torch_cannot_spread_runs_on_whole_tensors(lt: Tensors) -> None:
    x = lt.tensor(rows(4, 4) + 20 * torch.eye(4), placements=[Shard(0)])
    found = lt.call("linalg.inv", x)
    torch.testing.assert_close(to_torch(found), torch.linalg.inv(rows(4, 4) + 20 * torch.eye(4)))


def test_a_product_with_an_empty_tensor_is_computed(lt: Tensors) -> None:
    y = lt.ones(3, 4, placements=[Shard(1)])
    found = lt.einsum("abc,cd->abd", lt.ones(0, 3, 3), y)  # `DTensor` never returns from a view of (0, 3)
    assert torch.equal(to_torch(found), torch.zeros(0, 3, 4))


def test_a_failure_of_what_is_spread_is_told_and_the_rest_lives(lt: Tensors) -> None:
    x = lt.zeros(4, 4, placements=[Shard(0)])
    bad = lt.call("linalg.cholesky", x)
    with pytest.raises(RuntimeError, match="cholesky") as caught:
        bad.tolist()
    assert isinstance(caught.value, loom.OperationFailed)
    assert x.add(1.0).sum().item() == 16.0
    with pytest.raises(RuntimeError, match="cholesky"):
        lt.synchronize()


def test_random_numbers_are_the_same_everywhere_and_others_in_each_part(lt: Tensors) -> None:
    x = lt.randn(8, 50)
    assert torch.equal(to_torch(x.redistribute([Shard(0)])), to_torch(x))  # each process's own rows
    parts = to_torch(lt.randn(8, 50, placements=[Shard(0)])).reshape(4, -1)
    assert len({tuple(each.tolist()) for each in parts}) == 4
    assert 0.8 < float(parts.std()) < 1.2
    kept = to_torch(lt.dropout(lt.ones(8, 50, placements=[Shard(0)]), 0.5)).reshape(4, -1)
    assert len({tuple(each.tolist()) for each in kept}) == 4
    y = lt.rand(8, 50)  # the processes still draw the same
    assert torch.equal(to_torch(y.redistribute([Shard(0)])), to_torch(y))


def test_a_seed_gives_the_same_parts_again(lt: Tensors) -> None:
    def drawn() -> list[Any]:
        lt.seed(5)
        return [lt.rand(8, placements=[Shard(0)]).tolist(), lt.rand(2).tolist()]

    assert drawn() == drawn()


def test_a_large_product_is_computed_by_all(lt: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_rules, "LARGE", 8 * 8 * 8)
    data = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x, w = lt.tensor(data), lt.tensor(data.t(), requires_grad=True)
    y = x @ w
    assert y.placements == (Shard(0),)
    torch.testing.assert_close(to_torch(y), data @ data.t())
    y.pow(2).sum().backward()
    theirs = data.t().clone().requires_grad_()
    (data @ theirs).pow(2).sum().backward()
    torch.testing.assert_close(to_torch(w.grad), theirs.grad)
    assert (lt.ones(4, 4) @ lt.ones(4, 4)).placements == (Replicate(),)


def test_training_on_a_batch_that_is_spread_is_the_same(lt: Tensors) -> None:
    generator = torch.Generator().manual_seed(2)
    data, goal = (torch.randn(16, n, dtype=torch.float64, generator=generator) for n in (6, 3))
    start = torch.randn(3, 6, dtype=torch.float64, generator=generator)

    def losses(home: Any, x: Any, y: Any, w: Any) -> list[float]:
        optimizer = home.optim.AdamW([w], lr=0.1)
        found = []
        for _ in range(5):
            loss = ((x @ w.t()).tanh() - y).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    expected = losses(torch, data, goal, start.clone().requires_grad_())
    for weights in (Replicate(), Shard(0), Shard(1)):
        w = lt.tensor(start, requires_grad=True, placements=[weights])
        x, y = lt.tensor(data, placements=[Shard(0)]), lt.tensor(goal, placements=[Shard(0)])
        assert losses(lt, x, y, w) == pytest.approx(expected, rel=1e-9)
        assert w.placements == (weights,)


@pytest.mark.parametrize("images", [8, 7, 3])
def test_each_process_computes_some_images(lt: Tensors, images: int) -> None:
    generator = torch.Generator().manual_seed(3)
    data = torch.randn(images, 2, 6, 6, dtype=torch.float64, generator=generator)
    kernel, bias = (torch.randn(*size, dtype=torch.float64, generator=generator) for size in ((3, 2, 3, 3), (3,)))

    def work(home: Any, x: Any, w: Any, b: Any) -> Any:
        functions = home.nn.functional if home is torch else home
        made = functions.max_pool2d(functions.conv2d(x, w, b, padding=1), 2)
        found = functions.avg_pool2d(made, 3).pow(2).sum()
        found.backward()
        return made

    x = lt.tensor(data, requires_grad=True, placements=[Shard(0)])
    w, b = lt.tensor(kernel, requires_grad=True), lt.tensor(bias, requires_grad=True)
    theirs = [each.clone().requires_grad_() for each in (data, kernel, bias)]
    made, expected = work(lt, x, w, b), work(torch, *theirs)
    torch.testing.assert_close(to_torch(made), expected.detach())
    for mine, its in zip((x, w, b), theirs, strict=True):
        torch.testing.assert_close(to_torch(mine.grad), its.grad)
    assert made.placements == ((Replicate() if images == 3 else Shard(0)),)
    assert w.grad.placements == (Replicate(),)


def test_a_compiled_step_is_the_same_on_parts(lt: Tensors) -> None:
    w = lt.tensor(rows(3, 4) * 0.01, requires_grad=True, placements=[Shard(0)])
    theirs = (rows(3, 4) * 0.01).requires_grad_()
    x, data = lt.tensor(rows(8, 4) * 0.1, placements=[Shard(0)]), rows(8, 4) * 0.1

    @lt.compile
    def step() -> Any:
        loss = (x @ w.t()).pow(2).mean()
        loss.backward()
        with lt.no_grad():
            w.sub_(w.grad * 0.1)
        w.grad = None
        return loss

    for _ in range(6):
        expected = (data @ theirs.t()).pow(2).mean()
        expected.backward()
        with torch.no_grad():
            theirs.sub_(theirs.grad * 0.1)
        theirs.grad = None
        assert step().item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_process_that_fails_alone_keeps_no_other_waiting() -> None:
    with NearWorkers({"gpus": 2}) as workers:
        lt = Tensors(workers)
        x = lt.ones(4, placements=[Shard(0)])
        whole = lt.ones(2)
        lt.synchronize()
        workers.limit(1)
        lost = lt.empty(1 << 28)  # nothing is written to it
        with pytest.raises(RuntimeError):
            (x.full_tensor() + lost.sum()).tolist()
        assert whole.add(1.0).tolist() == [2.0, 2.0]
        with pytest.raises(RuntimeError, match="no group any more"):
            x.full_tensor().tolist()
