"""Layers and losses. Those with parameters make them in the mesh that `Tensors.nn` belongs to.

A `TorchModule` is a module of torch's that the workers compute, such as ``LSTM`` or ``Transformer``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from inspect import isroutine
from math import prod, sqrt
from typing import Any

from loom.errors import NotSupported
from loom.tensors.call import call, function_at, sendable, sent
from loom.tensors.grad_modes import no_grad
from loom.tensors.layouts import Meta, dtype_named
from loom.tensors.names import MODULES
from loom.tensors.nn import utils
from loom.tensors.nn.module import Module, ModuleList, Parameter, Sequential
from loom.tensors.sending.encoding import Form, hashable
from loom.tensors.tensor import Tensor, Value

CONTAINERS: dict[str, type[Module]] = {"ModuleList": ModuleList, "Sequential": Sequential}


class TorchModule(Module):
    """A module whose parameters and parts have torch's names, and are tensors and modules here.

    The workers make the parameters, as the class of its name under ``torch.nn`` does. For their names, the first
    module of these arguments waits once.

    Raises:
        NotSupported: an argument is a tensor, a function, or a module of another kind.
        OperationFailed: torch refuses the arguments.
    """

    _lt: Any
    """The lazy tensors among which the parameters are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        named = tuple([(name, _recipe(each)) for name, each in sendable(kwargs).items()])
        recipe = (".module", type(self).__name__, tuple(map(_recipe, args)), named)
        parts, layouts = _described(self._lt, recipe)
        metas = [Meta(tuple(shape), dtype_named(kind), tuple(strides)) for kind, shape, strides, _ in layouts]
        made = iter(_made(self._lt, recipe, metas))
        known: dict[str, Module] = {"": self}
        for path, kind, attributes, parameters, buffers in parts:
            part = known.setdefault(path, CONTAINERS.get(kind, type(kind, (_Part,), {"_lt": self._lt}))())
            part.__dict__.update(attributes)
            if isinstance(part, TorchModule):
                part.__dict__["_made"] = recipe, path
            if path:
                before, _, name = path.rpartition(".")
                known[before].add_module(name, part)
            for key, wanted in parameters:
                part.register_parameter(key, None if wanted is None else Parameter(next(made), wanted))
            for key, wanted in buffers:
                part.register_buffer(key, None if wanted is None else next(made))
        for each in (*args, *kwargs.values()):
            if isinstance(each, Module):
                self._copy(each)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Module):
            raise NotSupported(f"the workers compute this module: it has no part {name!r} of yours")
        super().__setattr__(name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what torch's module gives. The first call of its kind waits once for how many tensors that are."""
        names, tensors, modes = [], [], []
        for path, module in self.named_modules():
            modes.append(module.training)
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    names.append(f"{path}.{key}" if path else key)
                    tensors.append(tensor)
        given = (*self.__dict__["_made"], tuple(modes), tuple(names), tensors, args)
        return call(self._lt, function_at(".forward", "?"), given, kwargs)

    def _copy(self, given: Module) -> None:
        """Give the parts that torch copies of a module the elements of that."""
        state = given.state_dict()
        with no_grad():
            for part in self.modules():
                own = part.state_dict() if type(part).__name__ == type(given).__name__ else {}
                for key, tensor in own.items():
                    tensor.copy_(state[key])


class _Part(TorchModule):
    """A part of a module that the workers compute."""

    def __init__(self) -> None:
        Module.__init__(self)


def _recipe(value: Any) -> Any:
    """Return an argument of a module as it travels: a module is its class and its arguments."""
    if isinstance(value, TorchModule) and value.__dict__["_made"][1] == "":
        return value.__dict__["_made"][0]
    if isinstance(value, (Tensor, Module)) or isroutine(value):
        raise NotSupported(f"a {type(value).__name__} is no argument of a module that the workers make")
    return tuple(map(_recipe, value)) if isinstance(value, (tuple, list)) else sent(value)


def _described(lt: Any, recipe: tuple[Any, ...]) -> Any:
    """Return the parts of a module and its tensors' layouts: see `loom.tensors.worker.functions.described`."""
    key = (".described", hashable(recipe))
    if key not in lt._known:
        lt._known[key] = lt._asked(Form(".described", (recipe,)), ())
    return lt._known[key]


def _made(lt: Any, recipe: tuple[Any, ...], metas: list[Meta]) -> list[Tensor]:
    """Return the parameters and buffers of a module, which the workers make."""
    form = lt._form(Form(".module", (recipe,), outs=len(metas)))
    first = lt._queue(form, (), (), [each.nbytes for each in metas]) if metas else 0
    return [Tensor(lt, Value(lt._pending, first + place), meta) for place, meta in enumerate(metas)]


class _Made(Module):
    """A module with parameters of its own."""

    _lt: Any
    """The lazy tensors among which they are."""

    def _uniform(self, shape: Sequence[int], bound: float, dtype: Any) -> Parameter:
        drawn = self._lt.rand(tuple(shape), dtype=dtype)
        return Parameter(drawn.mul(2 * bound).sub(bound))

    def _scale(self, shape: int | Sequence[int], weight: bool, bias: bool, dtype: Any) -> None:
        """Scale by a weight, at first ones, and move by a bias, at first zeros, if they are wanted."""
        lt = self._lt
        self.register_parameter("weight", Parameter(lt.ones(shape, dtype=dtype)) if weight else None)
        self.register_parameter("bias", Parameter(lt.zeros(shape, dtype=dtype)) if bias else None)


class Linear(_Made):
    """``x @ weight.T + bias``."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, dtype: Any = None) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        bound = 1 / sqrt(in_features) if in_features else 0.0
        self.weight = self._uniform((out_features, in_features), bound, dtype)
        self.register_parameter("bias", self._uniform((out_features,), bound, dtype) if bias else None)

    def forward(self, input: Tensor) -> Tensor:
        return self._lt.linear(input, self.weight, self.bias)  # type: ignore[no-any-return]


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

    def forward(self, input: Tensor) -> Tensor:
        return self._lt.embedding(input, self.weight, self.padding_idx)  # type: ignore[no-any-return]


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
        self._scale(shape, elementwise_affine, elementwise_affine and bias, dtype)

    def forward(self, input: Tensor) -> Tensor:
        return self._lt.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)  # type: ignore[no-any-return]


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
        *,
        bias: bool = True,
    ) -> None:
        super().__init__()
        lt = self._lt
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.track_running_stats = track_running_stats
        self._scale(num_features, affine, affine and bias, dtype)
        self.register_buffer("running_mean", lt.zeros(num_features, dtype=dtype) if track_running_stats else None)
        self.register_buffer("running_var", lt.ones(num_features, dtype=dtype) if track_running_stats else None)
        self.register_buffer("num_batches_tracked", lt.tensor(0) if track_running_stats else None)
        self._seen = 0

    def forward(self, input: Tensor) -> Tensor:
        momentum = self.momentum
        if self.training and self.track_running_stats:
            self._seen += 1
            self.num_batches_tracked.add_(1)
            momentum = 1 / self._seen if momentum is None else momentum
        return self._normed(input, self.training or not self.track_running_stats, momentum or 0.0)

    def _normed(self, input: Tensor, by_batch: bool, momentum: float) -> Tensor:
        running = self.running_mean, self.running_var
        return self._lt.batch_norm(  # type: ignore[no-any-return]
            input, *running, self.weight, self.bias, by_batch, momentum, self.eps
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
        padding_mode: str = "zeros",
        dtype: Any = None,
        **how: Any,
    ) -> None:
        super().__init__()
        if padding_mode != "zeros":
            raise NotSupported(f"convolutions pad with zeros here: pad the input, lt.pad(…, mode={padding_mode!r})")
        kernel = (kernel_size,) * self.dimensions if isinstance(kernel_size, int) else tuple(kernel_size)
        self._how = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, **how}
        outer, inner = (in_channels, out_channels) if self.transposed else (out_channels, in_channels)
        shape = (outer, inner // groups, *kernel)
        bound = 1 / sqrt(shape[1] * prod(kernel))
        self.weight = self._uniform(shape, bound, dtype)
        self.register_parameter("bias", self._uniform((out_channels,), bound, dtype) if bias else None)

    def forward(self, input: Tensor) -> Tensor:
        name = f"conv{'_transpose' if self.transposed else ''}{self.dimensions}d"
        return getattr(self._lt, name)(input, self.weight, self.bias, **self._how)  # type: ignore[no-any-return]


class _ConvTransposed(_Conv):
    """The gradient of a convolution by its input, as a layer."""

    transposed = True

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1, padding: int | Sequence[int] = 0, output_padding: int | Sequence[int] = 0,
        groups: int = 1, bias: bool = True, dilation: int | Sequence[int] = 1, padding_mode: str = "zeros",
        dtype: Any = None,
    ) -> None:  # fmt: skip
        shape = in_channels, out_channels, kernel_size, stride, padding, dilation, groups
        super().__init__(*shape, bias, padding_mode, dtype, output_padding=output_padding)


class _Dropping(Module):
    """Sets elements to zero at random, while it is trained."""

    function: str

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        self.p, self.inplace = p, inplace

    def forward(self, input: Tensor) -> Tensor:
        drop = getattr(input._home, self.function)
        return drop(input, self.p, self.training, self.inplace)  # type: ignore[no-any-return]


class Flatten(Module):
    """Makes one dimension of several."""

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        super().__init__()
        self._dims = start_dim, end_dim

    def forward(self, input: Tensor) -> Tensor:
        return input.flatten(*self._dims)  # type: ignore[no-any-return]


class _Function(Module):
    """A function as a module; its further arguments are the function's. Tensors among them are buffers."""

    name: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        if args and isinstance(args[0], Tensor):  # of losses
            kwargs["weight"], args = args[0], ()
        self._args, self._kwargs = args, kwargs
        for key, value in kwargs.items():
            if isinstance(value, Tensor):
                self.register_buffer(key, value)

    def forward(self, *given: Tensor, **named: Tensor) -> Tensor:
        first = given[0] if given else next(iter(named.values()))
        function = getattr(first._home, self.name)
        return function(*given, *self._args, **named, **{**self._kwargs, **self._buffers})  # type: ignore[no-any-return]


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
    "CosineSimilarity": "cosine_similarity", "PairwiseDistance": "pairwise_distance",
    "AdaptiveAvgPool3d": "adaptive_avg_pool3d", "AdaptiveMaxPool1d": "adaptive_max_pool1d",
    "AdaptiveMaxPool2d": "adaptive_max_pool2d", "AdaptiveMaxPool3d": "adaptive_max_pool3d",
    "AvgPool3d": "avg_pool3d", "MaxPool3d": "max_pool3d", "LPPool1d": "lp_pool1d", "LPPool2d": "lp_pool2d",
    "LPPool3d": "lp_pool3d", "CELU": "celu", "GLU": "glu", "Hardshrink": "hardshrink", "Hardsigmoid": "hardsigmoid",
    "Softmin": "softmin", "Softshrink": "softshrink", "Tanhshrink": "tanhshrink", "Threshold": "threshold",
    "LocalResponseNorm": "local_response_norm", "CosineEmbeddingLoss": "cosine_embedding_loss",
    "CTCLoss": "ctc_loss", "GaussianNLLLoss": "gaussian_nll_loss", "HingeEmbeddingLoss": "hinge_embedding_loss",
    "MarginRankingLoss": "margin_ranking_loss", "MultiLabelMarginLoss": "multilabel_margin_loss",
    "MultiLabelSoftMarginLoss": "multilabel_soft_margin_loss", "MultiMarginLoss": "multi_margin_loss",
    "PoissonNLLLoss": "poisson_nll_loss", "SoftMarginLoss": "soft_margin_loss",
    "TripletMarginLoss": "triplet_margin_loss", "PixelUnshuffle": "pixel_unshuffle", "Unfold": "unfold",
    "Fold": "fold",
}  # fmt: skip

PLAIN: dict[str, type] = {
    each.__name__: each for each in (Flatten, Identity, Module, ModuleList, Parameter, Sequential)
} | {name: type(name, (_Function,), {"name": function}) for name, function in FUNCTIONS.items()}
for _name in ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d"):
    PLAIN[_name] = type(_name, (_Dropping,), {"function": _name.lower(), "__doc__": _Dropping.__doc__})
"""Modules without parameters of their own, and what modules are made with."""

MADE: dict[str, type] = {each.__name__: each for each in (Embedding, LayerNorm, Linear)}
for _dimensions in (1, 2, 3):
    _name = f"BatchNorm{_dimensions}d"
    MADE[_name] = type(_name, (_BatchNorm,), {})
    for _prefix, _kind in (("Conv", _Conv), ("ConvTranspose", _ConvTransposed)):
        _name = f"{_prefix}{_dimensions}d"
        MADE[_name] = type(_name, (_kind,), {"dimensions": _dimensions})


class Layers:
    """The modules of `Tensors.nn`: those with parameters make them in its mesh."""

    def __init__(self, lt: Any) -> None:
        self._lt = lt

    @property
    def functional(self) -> Any:
        """The functions, as in `torch.nn.functional`."""
        return self._lt

    utils = utils
    """Clipping of gradients, as in `torch.nn.utils`."""

    def __getattr__(self, name: str) -> Any:
        found = PLAIN.get(name)
        if found is None and name in MADE:
            found = _placed(MADE[name], self._lt)
        elif found is None and name in MODULES:
            found = type(name, (TorchModule,), {"_lt": self._lt, "__doc__": f"See ``torch.nn.{name}``."})
        if found is None:
            raise AttributeError(f"there is no module {name!r} here; there are {', '.join(dir(self))}")
        self.__dict__[name] = found
        return found

    def __dir__(self) -> list[str]:
        return sorted({*PLAIN, *MADE, *MODULES, "functional", "utils"})


def _placed(kind: type, lt: Any) -> type:
    """Return a module's class whose parameters are made in a mesh. Its ``device`` is that, whatever it says."""

    @wraps(kind.__init__)  # type: ignore[misc]
    def init(self: Any, *args: Any, device: Any = None, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs)  # type: ignore[misc]

    return type(kind.__name__, (kind,), {"_lt": lt, "__init__": init, "__doc__": kind.__doc__})
