"""The functions of `torch.linalg`: inverses, equations, determinants, factors, and their gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

from loom.tensors.metas import Meta, Shape, broadcast
from loom.tensors.op import method, methods
from loom.tensors.ops.mathematics.complexes import check_no_complex
from loom.tensors.ops.mathematics.matrices import Metas, by_columns, checked, op_of, scaled, transposed
from loom.tensors.ops.mathematics.singular import svd, svdvals
from loom.tensors.tensor import Tensor


class SLogDet(NamedTuple):
    """A determinant as its sign and the logarithm of its size."""

    sign: Tensor
    logabsdet: Tensor


class Eigen(NamedTuple):
    """Eigenvalues in ascending order, and the eigenvectors in columns."""

    eigenvalues: Tensor
    eigenvectors: Tensor


class QR(NamedTuple):
    """A matrix with orthonormal columns, and an upper triangular one."""

    Q: Tensor
    R: Tensor


# Inverses and equations


def _inverse_rule(metas: Metas, static: Any) -> Meta:
    (meta,) = metas
    checked("inv", meta)
    return by_columns(meta.shape, meta)


def _inverse_backward(node: Any, grad: Tensor) -> tuple[Tensor]:
    turned = transposed(node.result())
    return (-turned.matmul(grad).matmul(turned),)


_inverse = op_of("inv", _inverse_rule, _inverse_backward, (), (0,))


def inv(A: Tensor) -> Tensor:  # noqa: N803
    """Return the inverses of square matrices; a singular one fails in the cluster."""
    return _inverse((A,))


def _is_vector(one: Shape, other: Shape) -> bool:
    return len(other) == 1 or (len(one) - 1 == len(other) and other == one[:-1])


def _solution_rule(metas: Metas, static: Any) -> Meta:
    one, other = metas
    checked("solve", one)
    if one.dtype is not other.dtype:
        raise RuntimeError(
            f"linalg.solve: Expected A and B to have the same dtype, but found A of type {one.dtype.scalar_name} "
            f"and B of type {other.dtype.scalar_name} instead"
        )
    if not other.shape:
        raise RuntimeError("linalg.solve: The input tensor B must have at least 1 dimension.")
    size = one.shape[-1]
    shape = (*other.shape, 1) if _is_vector(one.shape, other.shape) else other.shape
    if shape[-2] != size:
        raise RuntimeError(
            f"linalg.solve: Incompatible shapes of A and B for the equation AX = B ({size}x{size} and "
            f"{shape[-2]}x{shape[-1]})"
        )
    found = (*broadcast(one.shape[:-2], shape[:-2]), *shape[-2:])
    return by_columns(found if shape is other.shape else found[:-1], one)


def _solution_backward(node: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    one, other = node[0], node.metas[1].shape
    vector = _is_vector(one.shape, other)
    solved = solve(transposed(one), grad)
    if not node.needs(0):
        return None, solved
    result = node.result()
    if vector:
        return -solved.unsqueeze(-1).matmul(result.unsqueeze(-2)), solved
    return -solved.matmul(transposed(result)), solved


_solve = op_of("solve", _solution_rule, _solution_backward, (0,), (0,))


def solve(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:  # noqa: N803
    """Return ``X`` of ``A @ X = B``, or of ``X @ A = B`` if not ``left``.

    Raises:
        RuntimeError: shapes or dtypes do not fit. A singular matrix fails in the cluster.
    """
    if left:
        return _solve((A, B))
    if B.dim() < 2:
        raise RuntimeError("linalg.solve: The input tensor B must have at least 2 dimensions.")
    if _is_vector(A.shape, B.shape):
        raise RuntimeError(
            "linalg.solve: Vector broadcasting of the left hand side is not supported for left=False. In this case "
            "linalg.solve is equivalent to B / A.squeeze(-1)"
        )
    return transposed(_solve((transposed(A), transposed(B))))


def _triangular_rule(metas: Metas, static: Any) -> Meta:
    one, other = metas
    checked("solve_triangular", one)
    if len(other.shape) < 2:
        raise RuntimeError("linalg.solve_triangular: The input tensor B must have at least 2 dimensions.")
    if one.dtype is not other.dtype:
        raise RuntimeError(
            f"linalg.solve_triangular: Expected A and B to have the same dtype, but found A of type "
            f"{one.dtype.scalar_name} and B of type {other.dtype.scalar_name} instead"
        )
    size, (rows, columns) = one.shape[-1], other.shape[-2:]
    left = dict(static)["left"]
    if size != (rows if left else columns):
        equation = "AX = B" if left else "XA = B"
        raise RuntimeError(
            f"linalg.solve_triangular: Incompatible shapes of A and B for the equation {equation} "
            f"({size}x{size} and {rows}x{columns})"
        )
    return by_columns((*broadcast(one.shape[:-2], other.shape[:-2]), rows, columns), one)


def _triangular_backward(node: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    how = dict(node.static)
    of_other = solve_triangular(
        transposed(node[0]),
        grad,
        upper=not how["upper"],
        left=how["left"],
        unitriangular=how["unitriangular"],
    )
    if not node.needs(0):
        return None, of_other
    result = transposed(node.result())
    of_one = -of_other.matmul(result) if how["left"] else -result.matmul(of_other)
    beside = 1 if how["unitriangular"] else 0
    return of_one.triu(beside) if how["upper"] else of_one.tril(-beside), of_other


_solve_triangular = op_of("solve_triangular", _triangular_rule, _triangular_backward, (0,), (0,))


def solve_triangular(
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> Tensor:
    """Return ``X`` of ``A @ X = B``, or of ``X @ A = B`` if not ``left``, of triangular matrices.

    Args:
        A: of them only the upper or the lower half is read.
        B: matrices.
        upper: whether it is the upper half.
        left: on which side of ``X`` they are.
        unitriangular: whether the diagonal is taken for ones.

    Raises:
        RuntimeError: shapes or dtypes do not fit.
    """
    return _solve_triangular((A, B), (), (("upper", upper), ("left", left), ("unitriangular", unitriangular)))


# Determinants


def _determinant_rule(metas: Metas, static: Any) -> Meta:
    (meta,) = metas
    checked("det", meta)
    return Meta(meta.shape[:-2], meta.dtype)


_determinant = op_of(
    "det",
    _determinant_rule,
    lambda node, grad: (scaled(grad * node.result(), transposed(inv(node[0]))),),
    (0,),
    (0,),
)


@method
def det(self: Tensor) -> Tensor:
    """Return the determinants of square matrices. That of a singular one has no gradient: the read of it fails."""
    return _determinant((self,))


def _sign_rule(metas: Metas, static: Any) -> tuple[Meta, Meta]:
    (meta,) = metas
    checked("slogdet", meta)
    found = Meta(meta.shape[:-2], meta.dtype)
    return found, found


_sign_and_log = op_of(
    "slogdet",
    _sign_rule,
    lambda node, grads: (scaled(grads[1], transposed(inv(node[0]))) if 1 in grads else None,),
    (0,),
)


@method
def slogdet(self: Tensor) -> SLogDet:
    """Return the signs of determinants, and the logarithms of their sizes."""
    return SLogDet(*_sign_and_log.several((self,)))


@method
def logdet(self: Tensor) -> Tensor:
    """Return the logarithms of determinants; nan where one is negative."""
    check_no_complex("logdet", self)
    sign, size = slogdet(self)
    return self._home.where(sign.eq(-1), float("nan"), size)  # type: ignore[no-any-return]


# Factors


def _cholesky_rule(metas: Metas, static: Any) -> Meta:
    (meta,) = metas
    checked("cholesky", meta)
    return by_columns(meta.shape, meta)


def _cholesky_backward(node: Any, grad: Tensor) -> tuple[Tensor]:
    lower, of_lower = node.result(), grad
    if dict(node.static)["upper"]:
        lower, of_lower = transposed(lower), transposed(grad)
    inner = transposed(lower).matmul(of_lower).tril()
    inner = inner - 0.5 * inner.diagonal(0, -2, -1).diag_embed()
    inverse = inv(lower)
    found = transposed(inverse).matmul(inner).matmul(inverse)
    return (0.5 * (found + transposed(found)),)


_cholesky = op_of("cholesky", _cholesky_rule, _cholesky_backward, (), (0,))


def cholesky(A: Tensor, *, upper: bool = False) -> Tensor:  # noqa: N803
    """Return the lower triangular factors of positive definite matrices, or the upper ones."""
    return _cholesky((A,), (), (("upper", upper),))


def _qr_rule(metas: Metas, static: Any) -> tuple[Meta, Meta]:
    (meta,) = metas
    checked("qr", meta, square=False)
    *batch, rows, columns = meta.shape
    mode = dict(static)["mode"]
    if mode not in ("reduced", "complete"):
        raise RuntimeError(
            f"qr received unrecognized mode '{mode}' but expected one of 'reduced' (default), 'r', or 'complete'"
        )
    inner = rows if mode == "complete" else min(rows, columns)
    return by_columns((*batch, rows, inner), meta), by_columns((*batch, inner, columns), meta)


def _qr_backward(node: Any, grads: Any) -> tuple[Tensor]:
    q, r = node.result(0), node.result(1)
    rows, columns = node.metas[0].shape[-2:]
    if dict(node.static)["mode"] == "complete" and rows > columns:
        raise RuntimeError("The QR decomposition is not differentiable when mode='complete' and nrows > ncols")
    of_q, of_r = grads.get(0), grads.get(1)
    rest = None
    if rows < columns:  # the last columns are Q times those of R
        rest = None if of_r is None else of_r.narrow(-1, rows, columns - rows)
        last = node[0].narrow(-1, rows, columns - rows)
        r, of_r = r.narrow(-1, 0, rows), None if of_r is None else of_r.narrow(-1, 0, rows)
        if rest is not None:
            through = last.matmul(transposed(rest))
            of_q = through if of_q is None else of_q + through
    lower: Any = 0 if of_r is None else r.matmul(transposed(of_r))
    lower = lower if of_q is None else lower - transposed(of_q).matmul(q)
    symmetric = lower.tril() + transposed(lower.tril(-1))
    found = q.matmul(symmetric) if of_q is None else of_q + q.matmul(symmetric)
    found = transposed(solve(r, transposed(found)))
    if rows >= columns:
        return (found,)
    last = q.matmul(rest) if rest is not None else node.home.zeros_like(last)
    return (node.home.cat([found, last], -1),)


_qr = op_of("qr", _qr_rule, _qr_backward, (0,), (0, 1))


def qr(A: Tensor, mode: str = "reduced") -> QR:  # noqa: N803
    """Return the factors ``Q`` and ``R`` of matrices; "reduced" or "complete" ones."""
    return QR(*_qr.several((A,), (), (("mode", mode),)))


# Eigenvalues of symmetric matrices


def _eigen_rule(metas: Metas, static: Any) -> tuple[Meta, Meta]:
    (meta,) = metas
    checked("eigh", meta)
    if dict(static)["UPLO"] not in ("L", "U"):
        raise RuntimeError(f"Expected UPLO argument to be 'L' or 'U', but got {dict(static)['UPLO']}")
    return Meta(meta.shape[:-1], meta.dtype), by_columns(meta.shape, meta)


def _eigen_backward(node: Any, grads: Any) -> tuple[Tensor]:
    values, vectors = node.result(0), node.result(1)
    turned = transposed(vectors)
    inner = grads[0].diag_embed() if 0 in grads else None
    if 1 in grads:
        gaps = values.unsqueeze(-2) - values.unsqueeze(-1)
        gaps = gaps + node.home.full(gaps.shape[-1:], float("inf"), dtype=values.dtype).diag_embed()
        part = turned.matmul(grads[1]) / gaps
        inner = part if inner is None else inner + part
    return (vectors.matmul(inner).matmul(turned),)


_eigen = op_of("eigh", _eigen_rule, _eigen_backward, (), (0, 1))


def eigh(A: Tensor, UPLO: str = "L") -> Eigen:  # noqa: N803
    """Return the eigenvalues and eigenvectors of symmetric matrices, of which the lower or upper half is read."""
    return Eigen(*_eigen.several((A,), (), (("UPLO", UPLO),)))


def eigvalsh(A: Tensor, UPLO: str = "L") -> Tensor:  # noqa: N803
    """Return the eigenvalues of symmetric matrices in ascending order."""
    return eigh(A, UPLO).eigenvalues


linalg = SimpleNamespace(
    cholesky=cholesky,
    det=det,
    eigh=eigh,
    eigvalsh=eigvalsh,
    inv=inv,
    qr=qr,
    slogdet=slogdet,
    solve=solve,
    solve_triangular=solve_triangular,
    svd=svd,
    svdvals=svdvals,
)
"""What `loom.tensors.tensors.Tensors.linalg` has."""

methods["inverse"] = inv
