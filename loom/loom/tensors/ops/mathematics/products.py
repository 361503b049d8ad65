"""Products of vectors and matrices beside those of `loom.tensors.ops.linear`, and matrices of a pattern."""

from __future__ import annotations

from loom.tensors.dtypes import Kind
from loom.tensors.metas import broadcast, wrapped
from loom.tensors.op import function, method
from loom.tensors.tensor import Tensor


@method
def ger(self: Tensor, vec2: Tensor) -> Tensor:
    """Return the outer product of two vectors."""
    return self.outer(vec2)  # type: ignore[no-any-return]


@method
def vdot(self: Tensor, other: Tensor) -> Tensor:
    """Return the product of two vectors."""
    return self.dot(other)  # type: ignore[no-any-return]


@method
def inner(self: Tensor, other: Tensor) -> Tensor:
    """Return the products of the vectors along the last dimensions."""
    if not self.dim() or not other.dim():
        return self * other
    if self.shape[-1] != other.shape[-1]:
        raise RuntimeError(
            "inner() the last dimension must match on both input tensors but got shapes "
            f"{list(self.shape)} and {list(other.shape)}"
        )
    if self.dim() == other.dim() == 1:
        return self.dot(other)  # type: ignore[no-any-return]
    return self._home.tensordot(self, other, ([-1], [-1]))  # type: ignore[no-any-return]


@method
def addmv(self: Tensor, mat: Tensor, vec: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return ``beta * self + alpha * mat @ vec``."""
    return _sum(self, mat.mv(vec), beta, alpha)


@method
def addr(self: Tensor, vec1: Tensor, vec2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return ``beta * self + alpha * outer(vec1, vec2)``."""
    for name, each in (("vec1", vec1), ("vec2", vec2)):
        if each.dim() != 1:
            raise RuntimeError(f"addr: Expected 1-D argument {name}, but got {each.dim()}-D")
    return _sum(self, vec1.outer(vec2), beta, alpha)


@method
def addbmm(self: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return ``beta * self + alpha * sum(batch1 @ batch2)``, the sum over the batch."""
    return _sum(self, batch1.bmm(batch2).sum(0), beta, alpha)


def _sum(one: Tensor, product: Tensor, beta: float, alpha: float) -> Tensor:
    if broadcast(one.shape, product.shape) != product.shape:
        raise RuntimeError(
            f"The expanded size of the tensor ({list(product.shape)}) must match the existing size "
            f"({list(one.shape)})"
        )
    if one.dtype is not product.dtype:
        raise RuntimeError(
            f"self and the product must have the same dtype, but got {one.dtype.name} and {product.dtype.name}"
        )
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + (one if beta == 1 else one * beta)


@method
def kron(self: Tensor, other: Tensor) -> Tensor:
    """Return the Kronecker product."""
    many = max(self.dim(), other.dim())
    left, right = ((1,) * (many - each.dim()) + each.shape for each in (self, other))
    pairs = [tuple(size for pair in zip(one, two, strict=True) for size in pair) for one, two in
             ((left, (1,) * many), ((1,) * many, right))]  # fmt: skip
    product = self.reshape(pairs[0]) * other.reshape(pairs[1])
    return product.reshape([one * two for one, two in zip(left, right, strict=True)])  # type: ignore[no-any-return]


@method
def cross(self: Tensor, other: Tensor, dim: int | None = None) -> Tensor:
    """Return the cross products of vectors of three elements, along the first such dimension if none is given."""
    if self.dim() != other.dim():
        raise RuntimeError(
            f"linalg.cross: inputs must have the same number of dimensions. Got {self.dim()} and {other.dim()}"
        )
    if dim is None:
        if 3 not in self.shape:
            raise RuntimeError("no dimension of size 3 in input")
        dim = self.shape.index(3)
    place = wrapped(dim, self.dim())
    if self.shape[place] != 3 or other.shape[place] != 3:
        raise RuntimeError(
            f"linalg.cross: inputs dimension {dim} must have length 3. "
            f"Got {self.shape[place]} and {other.shape[place]}"
        )
    return self.roll(-1, place) * other.roll(-2, place) - self.roll(-2, place) * other.roll(-1, place)  # type: ignore[no-any-return]


@method
def trace(self: Tensor) -> Tensor:
    """Return the sum of a matrix's diagonal."""
    if self.dim() != 2:
        raise RuntimeError(f"trace: expected a matrix, but got tensor with dim {self.dim()}")
    if self.dtype.kind is Kind.BOOL:
        raise NotImplementedError("\"trace\" not implemented for 'Bool'")
    return self.diagonal().sum()  # type: ignore[no-any-return]


@method
def diag(self: Tensor, diagonal: int = 0) -> Tensor:
    """Return a matrix with a vector as its diagonal; of a matrix its diagonal."""
    if self.dim() not in (1, 2):
        raise RuntimeError(f"diag(): Supports 1D or 2D tensors. Got {self.dim()}D")
    if self.dim() == 1:
        return self.diag_embed(diagonal)  # type: ignore[no-any-return]
    return self.diagonal(diagonal).clone()  # type: ignore[no-any-return]


@method
def diagflat(self: Tensor, offset: int = 0) -> Tensor:
    """Return a matrix with all elements in a row as its diagonal."""
    return self.reshape(-1).diag_embed(offset)  # type: ignore[no-any-return]


@function
def block_diag(*tensors: Tensor) -> Tensor:
    """Return a matrix with matrices along its diagonal, and zeros beside them."""
    for place, each in enumerate(tensors):
        if each.dim() > 2:
            raise RuntimeError(
                "torch.block_diag: Input tensors must have 2 or fewer dimensions. Input "
                f"{place} has {each.dim()} dimensions"
            )
    blocks = [each if each.dim() == 2 else each.reshape(1, -1) for each in tensors]
    width = sum(each.shape[1] for each in blocks)
    rows, before = [], 0
    for each in blocks:
        rows.append(each._home.pad(each, (before, width - before - each.shape[1])))
        before += each.shape[1]
    return blocks[0]._home.cat(rows)  # type: ignore[no-any-return]
