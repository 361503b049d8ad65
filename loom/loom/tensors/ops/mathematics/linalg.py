"""The functions of `torch.linalg`: inverses, equations, determinants, factors, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from loom.tensors.dtypes import Kind
from loom.tensors.metas import Meta, Shape, broadcast, contiguous_strides
from loom.tensors.op import Op, method, methods
from loom.tensors.tensor import Tensor

Metas = Sequence[Meta]


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


def _by_columns(shape: Shape, like: Meta) -> Meta:
    """Return what torch's routines give: matrices whose columns lie in memory one after the other."""
    if len(shape) < 2:
        return Meta(shape, like.dtype)
    *batch, rows, columns = shape
    strides = contiguous_strides((*batch, columns, rows))
    return Meta(shape, like.dtype, (*strides[:-2], 1, max(rows, 1)))


def _checked(name: str, meta: Meta, square: bool = True) -> None:
    shape = meta.shape
    if len(shape) < 2:
        raise RuntimeError(f"linalg.{name}: The input tensor A must have at least 2 dimensions.")
    if square and shape[-1] != shape[-2]:
        raise RuntimeError(
            f"linalg.{name}: A must be batches of square matrices, but they are {shape[-2]} by {shape[-1]} matrices"
        )
    if meta.dtype.kind < Kind.FLOAT:
        kind = meta.dtype.scalar_name
        if name == "eigh":
            raise NotImplementedError(f"\"linalg_eigh_cpu\" not implemented for '{kind}'")
        raise RuntimeError(f"linalg.{name}: Expected a floating point or complex tensor as input. Got {kind}")


def _op(name: str, rule: Callable[[Metas, Any], Any], *args: Any) -> Op:
    return Op(f"linalg.{name}", lambda metas, numbers, static: rule(metas, static), *args)


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(-2, -1)  # type: ignore[no-any-return]


def _scaled(factor: Tensor, matrix: Tensor) -> Tensor:
    scaled: Tensor = factor.unsqueeze(-1).unsqueeze(-1) * matrix
    return scaled


# Inverses and equations


def _inverse_rule(metas: Metas, static: Any) -> Meta:
    (meta,) = metas
    _checked("inv", meta)
    return _by_columns(meta.shape, meta)


def _inverse_backward(node: Any, grad: Tensor) -> tuple[Tensor]:
    turned = _transposed(node.result())
    return (-turned.matmul(grad).matmul(turned),)


_inverse = _op("inv", _inverse_rule, _inverse_backward, (), (0,))


def inv(A: Tensor) -> Tensor:  # noqa: N803
    """Return the inverses of square matrices; a singular one fails in the cluster."""
    return _inverse((A,))


def _is_vector(one: Shape, other: Shape) -> bool:
    return len(other) == 1 or (len(one) - 1 == len(other) and other == one[:-1])


def _solution_rule(metas: Metas, static: Any) -> Meta:
    one, other = metas
    _checked("solve", one)
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
    return _by_columns(found if shape is other.shape else found[:-1], one)


def _solution_backward(node: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    one, other = node[0], node.metas[1].shape
    vector = _is_vector(one.shape, other)
    solved = solve(_transposed(one), grad)
    if not node.needs(0):
        return None, solved
    result = node.result()
    if vector:
        return -solved.unsqueeze(-1).matmul(result.unsqueeze(-2)), solved
    return -solved.matmul(_transposed(result)), solved


_solve = _op("solve", _solution_rule, _solution_backward, (0,), (0,))


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
    return _transposed(_solve((_transposed(A), _transposed(B))))


# Determinants


def _determinant_rule(metas: Metas, static: Any) -> Meta:
    (meta,) = metas
    _checked("det", meta)
    return Meta(meta.shape[:-2], meta.dtype)


_determinant = _op(
    "det",
    _determinant_rule,
    lambda node, grad: (_scaled(grad * node.result(), _transposed(inv(node[0]))),),
    (0,),
    (0,),
)


@method
def det(self: Tensor) -> Tensor:
    """Return the determinants of square matrices. That of a singular one has no gradient: the read of it fails."""
    return _determinant((self,))


def _sign_rule(metas: Metas, static: Any) -> tuple[Meta, Meta]:
    (meta,) = metas
    _checked("slogdet", meta)
    found = Meta(meta.shape[:-2], meta.dtype)
    return found, found


_sign_and_log = _op(
    "slogdet",
    _sign_rule,
    lambda node, grads: (_scaled(grads[1], _transposed(inv(node[0]))) if 1 in grads else None,),
    (0,),
)


@method
def slogdet(self: Tensor) -> SLogDet:
    """Return the signs of determinants, and the logarithms of their sizes."""
    return SLogDet(*_sign_and_log.several((self,)))


@method
def logdet(self: Tensor) -> Tensor:
    """Return the logarithms of determinants; nan where one is negative."""
    sign, size = slogdet(self)
    return self._home.where(sign.eq(-1), float("nan"), size)  # type: ignore[no-any-return]


# Factors


def _cholesky_rule(metas: Metas, static: Any) -> Meta:
    (meta,) = metas
    _checked("cholesky", meta)
    return _by_columns(meta.shape, meta)


def _cholesky_backward(node: Any, grad: Tensor) -> tuple[Tensor]:
    lower, of_lower = node.result(), grad
    if dict(node.static)["upper"]:
        lower, of_lower = _transposed(lower), _transposed(grad)
    inner = _transposed(lower).matmul(of_lower).tril()
    inner = inner - 0.5 * inner.diagonal(0, -2, -1).diag_embed()
    inverse = inv(lower)
    found = _transposed(inverse).matmul(inner).matmul(inverse)
    return (0.5 * (found + _transposed(found)),)


_cholesky = _op("cholesky", _cholesky_rule, _cholesky_backward, (), (0,))


def cholesky(A: Tensor, *, upper: bool = False) -> Tensor:  # noqa: N803
    """Return the lower triangular factors of positive definite matrices, or the upper ones."""
    return _cholesky((A,), (), (("upper", upper),))


def _qr_rule(metas: Metas, static: Any) -> tuple[Meta, Meta]:
    (meta,) = metas
    _checked("qr", meta, square=False)
    *batch, rows, columns = meta.shape
    mode = dict(static)["mode"]
    if mode not in ("reduced", "complete"):
        raise RuntimeError(
            f"qr received unrecognized mode '{mode}' but expected one of 'reduced' (default), 'r', or 'complete'"
        )
    inner = rows if mode == "complete" else min(rows, columns)
    return _by_columns((*batch, rows, inner), meta), _by_columns((*batch, inner, columns), meta)


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
            through = last.matmul(_transposed(rest))
            of_q = through if of_q is None else of_q + through
    lower: Any = 0 if of_r is None else r.matmul(_transposed(of_r))
    lower = lower if of_q is None else lower - _transposed(of_q).matmul(q)
    symmetric = lower.tril() + _transposed(lower.tril(-1))
    found = q.matmul(symmetric) if of_q is None else of_q + q.matmul(symmetric)
    found = _transposed(solve(r, _transposed(found)))
    if rows >= columns:
        return (found,)
    last = q.matmul(rest) if rest is not None else node.home.zeros_like(last)
    return (node.home.cat([found, last], -1),)


_qr = _op("qr", _qr_rule, _qr_backward, (0,), (0, 1))


def qr(A: Tensor, mode: str = "reduced") -> QR:  # noqa: N803
    """Return the factors ``Q`` and ``R`` of matrices; "reduced" or "complete" ones."""
    return QR(*_qr.several((A,), (), (("mode", mode),)))


# Eigenvalues of symmetric matrices


def _eigen_rule(metas: Metas, static: Any) -> tuple[Meta, Meta]:
    (meta,) = metas
    _checked("eigh", meta)
    if dict(static)["UPLO"] not in ("L", "U"):
        raise RuntimeError(f"Expected UPLO argument to be 'L' or 'U', but got {dict(static)['UPLO']}")
    return Meta(meta.shape[:-1], meta.dtype), _by_columns(meta.shape, meta)


def _eigen_backward(node: Any, grads: Any) -> tuple[Tensor]:
    values, vectors = node.result(0), node.result(1)
    turned = _transposed(vectors)
    inner = grads[0].diag_embed() if 0 in grads else None
    if 1 in grads:
        gaps = values.unsqueeze(-2) - values.unsqueeze(-1)
        gaps = gaps + node.home.full(gaps.shape[-1:], float("inf"), dtype=values.dtype).diag_embed()
        part = turned.matmul(grads[1]) / gaps
        inner = part if inner is None else inner + part
    return (vectors.matmul(inner).matmul(turned),)


_eigen = _op("eigh", _eigen_rule, _eigen_backward, (), (0, 1))


def eigh(A: Tensor, UPLO: str = "L") -> Eigen:  # noqa: N803
    """Return the eigenvalues and eigenvectors of symmetric matrices, of which the lower or upper half is read."""
    return Eigen(*_eigen.several((A,), (), (("UPLO", UPLO),)))


def eigvalsh(A: Tensor, UPLO: str = "L") -> Tensor:  # noqa: N803
    """Return the eigenvalues of symmetric matrices in ascending order."""
    return eigh(A, UPLO).eigenvalues


linalg = SimpleNamespace(
    cholesky=cholesky, det=det, eigh=eigh, eigvalsh=eigvalsh, inv=inv, qr=qr, slogdet=slogdet, solve=solve
)
"""What `loom.tensors.tensors.Tensors.linalg` has."""

methods["inverse"] = inv
