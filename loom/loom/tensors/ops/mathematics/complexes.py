"""Complex numbers: conjugates, and the real parts of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loom.errors import NotSupported
from loom.tensors.dtypes import Kind, of_scalar, real_of
from loom.tensors.metas import Meta
from loom.tensors.op import NO_COMPLEX, Op, method, methods
from loom.tensors.ops.elementwise import Elementwise, promoted
from loom.tensors.tensor import Tensor

_NOT_IMPLEMENTED = """
    amax amin atan2 avg_pool2d bernoulli binary_cross_entropy ceil celu clamp clamp_max
    clamp_min copysign cummax cummin digamma elu erf erfc erfinv floor floor_divide fmod frac ge gelu gt
    hardshrink hardsigmoid hardswish hardtanh huber_loss hypot kthvalue le leaky_relu lgamma log_softmax
    logaddexp2 logit logsigmoid lt max_pool2d_with_indices median mish mse_loss native_layer_norm
    nll_loss_forward relu relu6 remainder round searchsorted selu sign signbit smooth_l1_loss softmax softplus
    softshrink trunc unique unique_consecutive xlogy
"""
_NOT_SUPPORTED = """
    argmax argmin deg2rad exponential fmax fmin isneginf isposinf max maximum min minimum rad2deg sort topk
"""
NO_COMPLEX.update(dict.fromkeys(_NOT_IMPLEMENTED.split(), NotImplementedError))
NO_COMPLEX.update(dict.fromkeys(_NOT_SUPPORTED.split(), RuntimeError))


def _part(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> Meta:
    return Meta(metas[0].shape, real_of(metas[0].dtype))


_conj = Elementwise("conj_physical", promoted, lambda grad: conj(grad))
_real_part = Op(".real_part", _part, lambda node, grad: (grad.to(node.metas[0].dtype),))


@method
def conj(self: Tensor) -> Tensor:
    """Return the conjugates; the tensor itself if its elements are real."""
    return _conj(self) if self.dtype.kind is Kind.COMPLEX else self


methods["_real_part"] = lambda self: _real_part((self,))


def check_no_complex(name: str, *operands: Any) -> None:
    """Check that an operation is one that is computed here for these operands.

    Raises:
        NotSupported: they are complex.
    """
    kinds = [each.dtype.kind if isinstance(each, Tensor) else of_scalar(each).kind for each in operands]
    if Kind.COMPLEX in kinds:
        raise NotSupported(f"{name}() of complex numbers is not computed here: queue torch's own by lt.call()")
