"""Layers and losses. Those with parameters make them in the mesh that `Tensors.nn` belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod, sqrt
from typing import Any

from loom.tensors.learned import call
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


class RMSNorm(_Made):
    """Each group of the last dimensions divided by its root mean square, then scaled."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.normalized_shape, self.eps = shape, eps
        weight = Parameter(self._lt.ones(shape, dtype=dtype)) if elementwise_affine else None
        self.register_parameter("weight", weight)

    def forward(self, x: Tensor) -> Tensor:
        return self._lt.rms_norm(x, self.normalized_shape, self.weight, self.eps)  # type: ignore[no-any-return]


class GroupNorm(_Made):
    """Each group of channels with mean 0 and variance 1, then each channel scaled and moved."""

    def __init__(
        self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True, dtype: Any = None
    ) -> None:
        super().__init__()
        if num_channels % num_groups:
            raise ValueError("num_channels must be divisible by num_groups")
        self.num_groups, self.eps = num_groups, eps
        self.register_parameter("weight", Parameter(self._lt.ones(num_channels, dtype=dtype)) if affine else None)
        self.register_parameter("bias", Parameter(self._lt.zeros(num_channels, dtype=dtype)) if affine else None)

    def forward(self, x: Tensor) -> Tensor:
        return self._lt.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)  # type: ignore[no-any-return]


class _BatchNorm(_Made):
    """Each channel with mean 0 and variance 1 over the batch, then scaled and moved."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        lt = self._lt
        self.eps, self.momentum, self.track_running_stats = eps, momentum, track_running_stats
        self.register_parameter("weight", Parameter(lt.ones(num_features, dtype=dtype)) if affine else None)
        self.register_parameter("bias", Parameter(lt.zeros(num_features, dtype=dtype)) if affine else None)
        self.register_buffer("running_mean", lt.zeros(num_features, dtype=dtype) if track_running_stats else None)
        self.register_buffer("running_var", lt.ones(num_features, dtype=dtype) if track_running_stats else None)
        self.register_buffer("num_batches_tracked", lt.tensor(0) if track_running_stats else None)
        self._seen = 0

    def forward(self, x: Tensor) -> Tensor:
        momentum = self.momentum
        if self.training and self.track_running_stats:
            self._seen += 1
            self.num_batches_tracked.add_(1)
            momentum = 1 / self._seen if momentum is None else momentum
        return self._lt.batch_norm(  # type: ignore[no-any-return]
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training or not self.track_running_stats,
            momentum or 0.0,
            self.eps,
        )


class _Conv(_Made):
    """A convolution over some dimensions."""

    dimensions: int
    transposed = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | str = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool = True,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        kernel = (kernel_size,) * self.dimensions if isinstance(kernel_size, int) else tuple(kernel_size)
        self._how = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        outer, inner = (in_channels, out_channels) if self.transposed else (out_channels, in_channels)
        shape = (outer, inner // groups, *kernel)
        bound = 1 / sqrt(shape[1] * prod(kernel))
        self.weight = self._uniform(shape, bound, dtype)
        self.register_parameter("bias", self._uniform((out_channels,), bound, dtype) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        name = f"conv{'_transpose' if self.transposed else ''}{self.dimensions}d"
        return getattr(self._lt, name)(x, self.weight, self.bias, **self._how)  # type: ignore[no-any-return]


class _Recurrent(_Made):
    """Layers that go through a sequence, each with what it has seen so far."""

    function: str
    gates: int

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.num_layers, self.batch_first = hidden_size, num_layers, batch_first
        self.bias, self.dropout, self.bidirectional = bias, dropout, bidirectional
        self._names: list[str] = []
        ways = 2 if bidirectional else 1
        for layer in range(num_layers):
            size = input_size if layer == 0 else hidden_size * ways
            for way in ("", "_reverse")[:ways]:
                shapes = {"weight_ih": (size,), "weight_hh": (hidden_size,)}
                for name, rest in {**shapes, **({"bias_ih": (), "bias_hh": ()} if bias else {})}.items():
                    key = f"{name}_l{layer}{way}"
                    bound = 1 / sqrt(hidden_size) if hidden_size else 0.0
                    self._names.append(key)
                    self.register_parameter(key, self._uniform((self.gates * hidden_size, *rest), bound, dtype))

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Return the results of each place of the sequence, and the state after the last one."""
        alone = x.dim() == 2
        batch = 0 if self.batch_first else 1
        x = x.unsqueeze(batch) if alone else x
        several = self.function == "lstm"
        if state is None:
            ways = self.num_layers * (2 if self.bidirectional else 1)
            zeros = self._lt.zeros(ways, x.shape[batch], self.hidden_size, dtype=x.dtype)
            states = [zeros] * (2 if several else 1)
        else:
            states = [each.unsqueeze(1) if alone else each for each in (state if several else (state,))]
        weights = [getattr(self, name) for name in self._names]
        how = (self.bias, self.num_layers, self.dropout, self.training, self.bidirectional, self.batch_first)
        given = tuple(states) if several else states[0]
        out, *after = call(self._lt, self.function, (x, given, weights, *how), {}, "3" if several else "2")
        if alone:
            out, after = out.squeeze(batch), [each.squeeze(1) for each in after]
        return out, tuple(after) if several else after[0]


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
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits", "HuberLoss": "huber_loss", "KLDivLoss": "kl_div",
    "MaxPool1d": "max_pool1d", "MaxPool2d": "max_pool2d", "AvgPool1d": "avg_pool1d", "AvgPool2d": "avg_pool2d",
    "AdaptiveAvgPool1d": "adaptive_avg_pool1d", "AdaptiveAvgPool2d": "adaptive_avg_pool2d", "Mish": "mish",
    "Hardtanh": "hardtanh", "ReLU6": "relu6", "LogSigmoid": "logsigmoid", "Softsign": "softsign", "SELU": "selu",
    "Hardswish": "hardswish", "Upsample": "interpolate", "PixelShuffle": "pixel_shuffle",
    "CosineSimilarity": "cosine_similarity",
}  # fmt: skip

PLAIN: dict[str, type] = {
    each.__name__: each for each in (Dropout, Flatten, Identity, Module, ModuleList, Parameter, Sequential)
} | {name: type(name, (_Function,), {"name": function}) for name, function in FUNCTIONS.items()}
"""Modules without parameters of their own, and what modules are made with."""

MADE: dict[str, type] = {
    each.__name__: each for each in (Embedding, GroupNorm, LayerNorm, Linear, MultiheadAttention, RMSNorm)
}
for _dimensions in (1, 2, 3):
    _name = f"BatchNorm{_dimensions}d"
    MADE[_name] = type(_name, (_BatchNorm,), {})
    for _prefix, _transposed in (("Conv", False), ("ConvTranspose", True)):
        _name = f"{_prefix}{_dimensions}d"
        MADE[_name] = type(_name, (_Conv,), {"dimensions": _dimensions, "transposed": _transposed})
for _name, _function_name, _gates in (("RNN", "rnn_tanh", 1), ("LSTM", "lstm", 4), ("GRU", "gru", 3)):
    MADE[_name] = type(_name, (_Recurrent,), {"function": _function_name, "gates": _gates})


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
