"""Layers and losses. Those with parameters make them in the mesh that `Tensors.nn` belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod, sqrt
from typing import Any

from loom.tensors.nn import utils
from loom.tensors.nn.module import Module, ModuleList, Parameter, Sequential
from loom.tensors.tensor import Tensor


class _Made(Module):
    """A module with parameters of its own."""

    _lt: Any
    """The lazy tensors among which they are."""

    def _uniform(self, shape: Sequence[int], bound: float, dtype: Any) -> Parameter:
        drawn = self._lt.rand(tuple(shape), dtype=dtype)
        return Parameter(drawn.mul(2 * bound).sub(bound))


class Linear(_Made):
    """``x @ weight.T + bias``."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, dtype: Any = None) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        bound = 1 / sqrt(in_features) if in_features else 0.0
        self.weight = self._uniform((out_features, in_features), bound, dtype)
        self.register_parameter("bias", self._uniform((out_features,), bound, dtype) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        return self._lt.linear(x, self.weight, self.bias)  # type: ignore[no-any-return]


class Embedding(_Made):
    """Rows of a table by their numbers."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, dtype: Any = None
    ) -> None:
        super().__init__()
        self.padding_idx = padding_idx
        weight = self._lt.randn(num_embeddings, embedding_dim, dtype=dtype)
        if padding_idx is not None:
            weight[padding_idx] = 0.0
        self.weight = Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return self._lt.embedding(x, self.weight, self.padding_idx)  # type: ignore[no-any-return]


class LayerNorm(_Made):
    """Each group of the last dimensions with mean 0 and variance 1, then scaled and moved."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.normalized_shape, self.eps = shape, eps
        weight = Parameter(self._lt.ones(shape, dtype=dtype)) if elementwise_affine else None
        self.register_parameter("weight", weight)
        moved = Parameter(self._lt.zeros(shape, dtype=dtype)) if elementwise_affine and bias else None
        self.register_parameter("bias", moved)

    def forward(self, x: Tensor) -> Tensor:
        return self._lt.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)  # type: ignore[no-any-return]


class Conv2d(_Made):
    """A convolution over two dimensions."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        kernel = (kernel_size, kernel_size) if isinstance(kernel_size, int) else tuple(kernel_size)
        self._how = (stride, padding, dilation, groups)
        bound = 1 / sqrt(in_channels // groups * prod(kernel))
        self.weight = self._uniform((out_channels, in_channels // groups, *kernel), bound, dtype)
        self.register_parameter("bias", self._uniform((out_channels,), bound, dtype) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        return self._lt.conv2d(x, self.weight, self.bias, *self._how)  # type: ignore[no-any-return]


class MultiheadAttention(_Made):
    """Attention of several heads, as `torch.nn.MultiheadAttention`, for queries, keys and values of one width."""

    def __init__(
        self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True, batch_first: bool = False,
        dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if embed_dim % num_heads:
            raise AssertionError("embed_dim must be divisible by num_heads")
        self.num_heads, self.dropout, self.batch_first = num_heads, dropout, batch_first
        self.in_proj_weight = self._uniform((3 * embed_dim, embed_dim), sqrt(6 / (4 * embed_dim)), dtype)
        zeros = Parameter(self._lt.zeros(3 * embed_dim, dtype=dtype)) if bias else None
        self.register_parameter("in_proj_bias", zeros)
        self.out_proj = self._lt.nn.Linear(embed_dim, embed_dim, bias=bias, dtype=dtype)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the result, and the weights, the mean of the heads', if they are wanted."""
        lt, first = self._lt, self.batch_first
        width = query.shape[-1]
        weights = self.in_proj_weight.chunk(3)
        biases = self.in_proj_bias.chunk(3) if self.in_proj_bias is not None else (None,) * 3
        parts = []
        for each, weight, bias in zip((query, key, value), weights, biases, strict=True):
            part = lt.linear(each, weight, bias)
            if part.dim() == 3 and not first:
                part = part.transpose(0, 1)
            parts.append(part.unflatten(-1, (self.num_heads, width // self.num_heads)).transpose(-3, -2))
        q, k, v = parts
        mask = attn_mask
        if mask is not None and mask.dtype.name == "bool":
            mask = mask.logical_not()  # here True means that a place is not looked at
        if is_causal and mask is None:
            mask = lt.ones(query.shape[-2 if first else 0], key.shape[-2 if first else 0]).tril().bool()
        dropped = self.dropout if self.training else 0.0
        if not need_weights:
            found, told = lt.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropped), None
        else:
            scores = q.matmul(k.transpose(-2, -1)).mul(1 / sqrt(q.shape[-1]))
            if mask is not None:
                hidden = mask.dtype.name == "bool"
                scores = scores.masked_fill(mask.logical_not(), float("-inf")) if hidden else scores.add(mask)
            told = scores.softmax(-1)
            if dropped:
                told = lt.dropout(told, dropped, True)
            found = told.matmul(v)
            told = told.mean(-3)
        found = found.transpose(-3, -2).flatten(-2)
        if found.dim() == 3 and not first:
            found = found.transpose(0, 1)
        return self.out_proj(found), told


class Dropout(Module):
    """Sets elements to zero at random, while it is trained."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return x.dropout(self.p, self.training)  # type: ignore[no-any-return]


class Flatten(Module):
    """Makes one dimension of several."""

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        super().__init__()
        self._dims = start_dim, end_dim

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(*self._dims)  # type: ignore[no-any-return]


class _Function(Module):
    """A function as a module; its further arguments are the function's."""

    name: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self._args, self._kwargs = args, kwargs

    def forward(self, *given: Tensor) -> Tensor:
        return getattr(given[0]._home, self.name)(*given, *self._args, **self._kwargs)  # type: ignore[no-any-return]


class Identity(Module):
    """Gives what it takes."""

    def forward(self, x: Any) -> Any:
        return x


FUNCTIONS = {
    "ReLU": "relu", "GELU": "gelu", "Tanh": "tanh", "Sigmoid": "sigmoid", "SiLU": "silu", "ELU": "elu",
    "LeakyReLU": "leaky_relu", "Softplus": "softplus", "Softmax": "softmax", "LogSoftmax": "log_softmax",
    "CrossEntropyLoss": "cross_entropy", "MSELoss": "mse_loss", "L1Loss": "l1_loss", "NLLLoss": "nll_loss",
    "SmoothL1Loss": "smooth_l1_loss", "BCELoss": "binary_cross_entropy",
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits", "MaxPool2d": "max_pool2d", "AvgPool2d": "avg_pool2d",
}  # fmt: skip

PLAIN: dict[str, type] = {
    each.__name__: each for each in (Dropout, Flatten, Identity, Module, ModuleList, Parameter, Sequential)
} | {name: type(name, (_Function,), {"name": function}) for name, function in FUNCTIONS.items()}
"""Modules without parameters of their own, and what modules are made with."""

MADE: dict[str, type] = {each.__name__: each for each in (Conv2d, Embedding, LayerNorm, Linear, MultiheadAttention)}


class Layers:
    """The modules of `Tensors.nn`: those with parameters make them in its mesh."""

    def __init__(self, lt: Any) -> None:
        self._lt = lt

    @property
    def functional(self) -> Any:
        """The functions, as in `torch.nn.functional`."""
        return self._lt

    utils = utils
    """What clips gradients, as in `torch.nn.utils`."""

    def __getattr__(self, name: str) -> Any:
        found = PLAIN.get(name)
        if found is None:
            if name not in MADE:
                raise AttributeError(f"there is no module {name!r} here; there are {', '.join(dir(self))}")
            found = type(name, (MADE[name],), {"_lt": self._lt, "__doc__": MADE[name].__doc__})
        self.__dict__[name] = found
        return found

    def __dir__(self) -> list[str]:
        return sorted((*PLAIN, *MADE, "functional", "utils"))
