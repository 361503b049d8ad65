"""What `torch.nn.utils` has for gradients: nothing here waits."""

from __future__ import annotations

from collections.abc import Iterable

from loom.tensors.grad_modes import no_grad
from loom.tensors.tensor import Tensor


def _listed(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale the gradients in place so that the norm of all of them is at most ``max_norm``; return what it was.

    Raises:
        ValueError: there is no parameter.
    """
    listed = _listed(parameters)
    if not listed:
        raise ValueError("clip_grad_norm_() got an empty parameter list")
    lt, grads = listed[0]._home, [each.grad for each in listed if each.grad is not None]
    if not grads:
        return lt.zeros(())  # type: ignore[no-any-return]
    with no_grad():
        total: Tensor = lt.stack([each.norm(norm_type) for each in grads]).norm(norm_type)
        scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for each in grads:
            each.mul_(scale)
    return total


def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
    """Bound each element of the gradients in place, by ``-clip_value`` and ``clip_value``."""
    with no_grad():
        for each in _listed(parameters):
            if each.grad is not None:
                each.grad.clamp_(-clip_value, clip_value)
