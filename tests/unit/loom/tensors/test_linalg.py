"""Inverses, equations, determinants and factors of matrices agree with torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st

import loom
from loom.tensors.tensors import Tensors
from tests.support.near_tensors import near_tensors
from tests.support.torch_agreement import (
    Operand,
    agree,
    agree_with_either_backward,
    given,
    operands,
    plain,
)

BATCHES = st.sampled_from([(), (), (2,), (3, 2), (0,)])
DTYPES = st.sampled_from([torch.float64, torch.float32])


@st.composite
def matrices(
    draw: Any, rows: int, columns: int, batch: tuple[int, ...] | None = None, dtype: Any = None
) -> Operand:
    """Draw matrices that are far from singular."""
    size = (*(draw(BATCHES) if batch is None else batch), rows, columns)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    made = torch.rand(size, generator=generator, dtype=torch.float64) - 0.5
    made = made + 2 * torch.eye(rows, columns, dtype=torch.float64)
    return plain(made.to(draw(DTYPES) if dtype is None else dtype), draw(st.booleans()))


def positive(x: Any) -> Any:
    """Return symmetric matrices that are positive definite, of any square ones."""
    return x @ x.transpose(-2, -1)


SQUARE: dict[str, Any] = {
    "inv": lambda ns, x: ns.linalg.inv(x),
    "inverse": lambda ns, x: x.inverse(),
    "det": lambda ns, x: ns.linalg.det(x),
    "det as a method": lambda ns, x: x.det(),
    "slogdet": lambda ns, x: ns.linalg.slogdet(x)[1],
    "its sign": lambda ns, x: ns.slogdet(x)[0].detach(),
    "logdet": lambda ns, x: ns.logdet(x),
    "cholesky": lambda ns, x: ns.linalg.cholesky(positive(x)),
    "upper cholesky": lambda ns, x: ns.linalg.cholesky(positive(x), upper=True),
    "eigh": lambda ns, x: ns.linalg.eigh(positive(x))[1].abs(),
    "eigenvalues": lambda ns, x: ns.linalg.eigh(positive(x), "U").eigenvalues,
    "eigvalsh": lambda ns, x: ns.linalg.eigvalsh(positive(x)),
}


@pytest.mark.parametrize("name", SQUARE)
@given(st.data())
def test_of_square_matrices(lt: Tensors, name: str, data: Any) -> None:
    size = data.draw(st.integers(1, 4))
    agree_with_either_backward(lt, SQUARE[name], [data.draw(matrices(size, size))], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", [name for name in SQUARE if "cholesky" not in name and "eig" not in name])
@given(operands(dtypes=(torch.float64, torch.int64)))
def test_what_is_no_square_matrix_is_refused(lt: Tensors, name: str, x: Operand) -> None:
    if len(x.size) < 2 or x.size[-1] != x.size[-2] or x.memory.dtype is torch.int64:
        agree(lt, SQUARE[name], [x])


@pytest.mark.parametrize("name", ["cholesky", "eigh", "qr"])
@pytest.mark.parametrize("x", [torch.ones(3), torch.ones(2, 3), torch.ones(2, 2, dtype=torch.int64)])
def test_what_has_no_factors_is_refused(lt: Tensors, name: str, x: torch.Tensor) -> None:
    agree(lt, lambda ns, x: tuple(getattr(ns.linalg, name)(x))[-1].abs(), [plain(x)])


@pytest.mark.parametrize("mode", ["reduced", "complete", "other"])
@pytest.mark.parametrize("part", [0, 1, slice(2)])
@given(st.data())
def test_qr(lt: Tensors, part: Any, mode: str, data: Any) -> None:
    rows, columns = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    x = data.draw(matrices(rows, columns, dtype=torch.float64))
    if mode == "complete" and rows > columns:
        x = plain(x.of_torch().detach())
    agree_with_either_backward(lt, lambda ns, x: ns.linalg.qr(x, mode)[part], [x], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("part", ["values", "left", "right", "all"])
@given(st.data())
def test_svd(lt: Tensors, part: str, full: bool, data: Any) -> None:
    rows, columns = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    x = data.draw(matrices(rows, columns, dtype=torch.float64))

    def work(ns: Any, x: Any) -> Any:
        # Without a part that is the same for all vectors, of which no gradient is known.
        u, s, v = ns.linalg.svd(x, full)
        least = min(rows, columns)
        u, v = u[..., :least].abs(), v[..., :least, :].abs()
        return {"values": s, "left": u, "right": v, "all": (u @ s.diag_embed() @ v, s)}[part]

    agree_with_either_backward(lt, work, [x], rtol=1e-4, atol=1e-4, strides=False)


@given(st.data())
def test_singular_values(lt: Tensors, data: Any) -> None:
    x = data.draw(matrices(data.draw(st.integers(0, 4)), data.draw(st.integers(1, 4)), dtype=torch.float64))
    agree_with_either_backward(lt, lambda ns, x: ns.linalg.svdvals(x), [x], rtol=1e-4, atol=1e-4)
    agree(lt, lambda ns, x: ns.linalg.svd(x).U.detach(), [x], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("unitriangular", [False, True])
@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("left", [False, True])
@given(st.data())
def test_triangular_equations(lt: Tensors, left: bool, upper: bool, unitriangular: bool, data: Any) -> None:
    size, others = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    batch = data.draw(st.sampled_from([(), (2,)]))
    dtype = data.draw(DTYPES)  # of both: torch misreads the memory of a second one
    one = data.draw(matrices(size, size, batch, dtype))
    inner = (size, others) if left else (others, size)
    shape = data.draw(st.sampled_from([inner, inner, (*batch, *inner), (size + 1, size + 1), (size,)]))
    other = data.draw(operands(shape, (dtype,)))

    def work(ns: Any, x: Any, y: Any) -> Any:
        return ns.linalg.solve_triangular(x, y, upper=upper, left=left, unitriangular=unitriangular)

    agree_with_either_backward(lt, work, [one, other], rtol=1e-3, atol=1e-3)


@given(st.data())
def test_equations(lt: Tensors, data: Any) -> None:
    size, columns = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    batch = data.draw(st.sampled_from([(), (2,)]))
    dtype = data.draw(DTYPES)
    one = data.draw(matrices(size, size, batch, dtype))
    other = data.draw(
        operands(
            data.draw(
                st.sampled_from(
                    [(size,), (*batch, size), (*batch, size, columns), (size, columns), (size + 1, columns), ()]
                )
            ),
            (dtype,),
        )
    )
    for left in (True, False):
        agree_with_either_backward(
            lt,
            lambda ns, x, y, left=left: ns.linalg.solve(x, y, left=left),
            [one, other],
            rtol=1e-3,
            atol=1e-3,
            strides=left,
        )


def test_a_singular_matrix_is_said_by_the_next_read() -> None:
    lt = near_tensors()
    found = lt.linalg.inv(lt.ones(2, 2))
    with pytest.raises(loom.OperationFailed, match=r"linalg\.inv.*singular"):
        found.tolist()
    with pytest.raises(loom.OperationFailed, match="singular"):
        lt.synchronize()
