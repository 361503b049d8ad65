"""Reads of lazy tensors: what waits, for what, and what the caller is told; and what is only queued."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import loom
from loom.errors import OperationFailed
from loom.tensors.tensors import Tensors
from tests.support.near_tensors import NearWorker, near_tensors
from tests.support.torch_agreement import to_torch


class Watched(NearWorker):
    """A worker that keeps a list of what it was asked for, and may be dead."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.dead = False
        for name in ("run", "read"):
            self._watch(name)

    def _watch(self, name: str) -> None:
        endpoint: Any = getattr(self, name)
        work: Callable[..., list[Any]] = endpoint._work

        def watched(*args: Any) -> list[Any]:
            if self.dead:
                raise loom.SupervisionError("the process of rank 0 is dead")
            self.asked.append(name)
            return work(*args)

        endpoint._work = watched


@pytest.fixture
def worker() -> Watched:
    return Watched()


@pytest.fixture
def queue(worker: Watched) -> Tensors:
    return Tensors(worker)


def test_what_is_queued_is_done_in_its_order_and_nobody_waits(queue: Tensors, worker: Watched) -> None:
    total = queue.zeros(())
    for number in range(50):
        total = total * 2 + number
    read = worker.asked.count("read")

    assert read == 0
    expected = 0.0
    for number in range(50):
        expected = expected * 2 + number
    assert total.item() == pytest.approx(expected)
    assert worker.asked.count("read") == 1


def test_item_and_tolist_wait_and_their_twins_are_awaited(queue: Tensors) -> None:
    x = queue.tensor([[1.0, 2.0], [3.0, 4.0]])

    async def read() -> Any:
        return await x.sum().aitem(), await (x @ x).atolist()

    assert (x.sum().item(), (x @ x).tolist()) == asyncio.run(read()) == (10.0, [[7.0, 10.0], [15.0, 22.0]])


def test_each_read_has_its_own_answer(queue: Tensors) -> None:
    made = [queue.full((2,), float(number)) for number in range(20)]

    async def read() -> list[Any]:
        return await asyncio.gather(*(one.atolist() for one in reversed(made)))

    assert asyncio.run(read()) == [[float(number)] * 2 for number in reversed(range(20))]


def test_a_backward_only_queues(queue: Tensors, worker: Watched) -> None:
    x = queue.tensor([1.0, 2.0, 3.0], requires_grad=True)
    queue.synchronize()
    before = list(worker.asked)

    loss = (x * x).exp().sum()
    loss.backward()

    assert worker.asked.count("read") == before.count("read")
    found = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    (found * found).exp().sum().backward()
    assert x.grad is not None
    assert found.grad is not None
    assert torch.allclose(to_torch(x.grad), found.grad)
    assert worker.asked.count("read") <= before.count("read") + 1


def test_a_failure_is_told_at_the_next_read_with_the_line_that_queued_it(queue: Tensors) -> None:
    good = queue.ones(2)
    bad = queue.call("linalg.cholesky", queue.zeros(2, 2)); here = sys._getframe().f_lineno  # fmt: skip  # noqa: E702
    depends = queue.call("add", bad, good)

    assert good.tolist() == [1.0, 1.0]
    with pytest.raises(RuntimeError, match=r"linalg\.cholesky") as caught:
        depends.tolist()
    assert f"{Path(__file__).name}:{here}" in str(caught.value)
    assert good.add(1.0).tolist() == [2.0, 2.0]


def test_a_dead_worker_is_told_at_the_read(queue: Tensors, worker: Watched) -> None:
    x = queue.ones(2)
    assert x.tolist() == [1.0, 1.0]

    worker.dead = True

    with pytest.raises(loom.SupervisionError, match="is dead"):
        x.add(1.0).tolist()


def test_two_matrices_are_multiplied_while_something_else_is_done(queue: Tensors, worker: Watched) -> None:
    a, b = queue.randn(128, 128), queue.randn(128, 128)
    c = a @ b
    corner = c[:2, :2] * 2
    done_meanwhile = sum(range(1000))

    assert (c.shape, corner.shape, done_meanwhile) == ((128, 128), (2, 2), 499500)
    assert "read" not in worker.asked
    assert torch.allclose(to_torch(c), to_torch(a) @ to_torch(b), atol=1e-3)
    assert torch.allclose(to_torch(corner), 2 * to_torch(c)[:2, :2])


def test_a_singular_matrix_is_said_by_the_next_read() -> None:
    lt = near_tensors()
    found = lt.linalg.inv(lt.ones(2, 2))
    with pytest.raises(loom.OperationFailed, match=r"linalg\.inv.*singular"):
        found.tolist()
    with pytest.raises(loom.OperationFailed, match="singular"):
        lt.synchronize()


PROGRAM = """
import sys
for name in ("torch", "numpy", "monarch"):
    sys.modules[name] = None

from loom.errors import OperationFailed
from loom.tensors.tensors import Tensors

class Endpoint:
    def call(self, *args): return self
    call_one = call
    def get(self, timeout=None): return {}
class Mesh:
    sizes = {"gpus": 1}
    begin = run = read = Endpoint()
    def __len__(self): return 1
lt = Tensors(Mesh())
w = lt.randn(4, 2, requires_grad=True)
loss = (lt.ones(3, 4) @ w).relu().pow(2).mean()
loss.backward()
with lt.no_grad():
    w -= w.grad * 0.1
print(loss.shape, w.shape, w.grad.dtype is lt.float32)
"""


def test_a_training_step_is_queued_by_a_program_without_torch() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "() (4, 2) True\n"


BOUND = 30.0
"""Seconds for a caller that nothing holds."""


class _Held:
    """A future that has no result before an event."""

    def __init__(self, released: threading.Event, result: Any) -> None:
        self._released = released
        self._result = result

    def get(self, timeout: float | None = None) -> Any:
        if not self._released.wait(timeout):
            raise TimeoutError
        return self._result


class HeldWorkers:
    """Stands where a mesh of workers stands that answer nothing before they are released."""

    def __init__(self, count: int) -> None:
        self.sizes = {"gpus": count}
        self.released = threading.Event()
        self.asked: list[str] = []

    def __len__(self) -> int:
        return self.sizes["gpus"]

    def slice(self, **dimensions: int) -> HeldWorkers:
        return self

    def __getattr__(self, name: str) -> Any:
        if name not in ("begin", "join", "meet", "read", "run"):
            raise AttributeError(name)

        def call(*args: Any) -> _Held:
            self.asked.append(name)
            return _Held(self.released, {rank: ([], []) for rank in range(len(self))})

        return SimpleNamespace(call=call, call_one=call)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_first_large_product_holds_nobody(count: int) -> None:
    workers = HeldWorkers(count)
    lt = Tensors(workers)
    shapes: list[Any] = []

    def work() -> None:
        x = lt.ones(2048, 1024, requires_grad=True)
        y = x @ lt.ones(1024, 2048)  # spread over the processes, which have to meet first
        for _ in range(200):
            y = y * 2
        y.sum().backward()
        lt.init(threads=1)
        shapes.extend([y.shape, x.grad.shape if x.grad is not None else None])

    caller = threading.Thread(target=work, daemon=True)
    caller.start()
    caller.join(BOUND)
    held = caller.is_alive()
    workers.released.set()
    caller.join(BOUND)
    assert not held
    assert shapes == [(2048, 2048), (2048, 1024)]
    assert (count == 1) == ("meet" not in workers.asked)


def test_the_examples_of_the_first_design(lt: Tensors) -> None:
    lt.init()
    a, b = lt.randn([128, 128]), lt.randn([128, 128])
    c = a.matmul(b)

    async def array() -> Any:
        return await c

    assert len(asyncio.run(array())) == 128


def test_the_training_of_the_first_design(lt: Tensors) -> None:
    data = torch.Generator().manual_seed(0)
    x, target, first = (torch.randn(4, 4, generator=data) for _ in range(3))

    async def losses(m: Any) -> list[float]:
        given, wanted, w = (m.tensor(each.numpy()) for each in (x, target, first))
        b, found = m.zeros(4), []
        w.requires_grad_()
        for step in range(30):
            y = given.matmul(w).add(b)
            loss = y.sub(wanted).pow(2).mean()
            loss.backward()

            if m is torch:
                with torch.no_grad():
                    w = w.sub(w.grad.mul(0.1))
                w.requires_grad_()
            else:
                w = m.no_grad(lambda: w.sub(w.grad.mul(0.1)))  # noqa: B023 - it is called at once
                assert w.is_leaf
            if step % 10 == 0:
                found.append(loss.item() if m is torch else await loss)
        return found

    assert asyncio.run(losses(lt)) == pytest.approx(asyncio.run(losses(torch)))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["to_sparse", "to_sparse_csr"])
def test_a_tensor_without_strides_is_told_to_nobody_else(lt: Tensors, name: str) -> None:
    x = lt.tensor([[1.0, 0.0], [3.0, 4.0]])
    odd, after = lt.call(f"torch.Tensor.{name}", x), x + 1
    assert after.tolist() == [[2.0, 1.0], [4.0, 5.0]]
    with pytest.raises(OperationFailed, match=r"it cannot be read: can't convert Sparse.*\.to_dense\(\)"):
        odd.tolist()
    assert odd.to_dense().tolist() == x.tolist()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_dtype_that_is_not_known_here_is_told_to_nobody_else(lt: Tensors) -> None:
    halves = lt.ones(2, dtype=lt.float16)
    odd, after = lt.complex(halves, halves), lt.fft.fft(lt.ones(4))
    assert lt.ones(3).sum().item() == 3.0
    assert after.shape == (4,)
    with pytest.raises(TypeError, match="there is no dtype 'complex32'"):
        _ = odd.shape
    assert odd.abs().tolist() == pytest.approx([2**0.5] * 2, rel=1e-3)
