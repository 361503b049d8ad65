"""torch's grad modes by their names: operations build a graph, or do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from inspect import signature
from typing import Any

grad_enabled: ContextVar[bool] = ContextVar("loom_tensors_grad", default=True)

makes_leaves: ContextVar[bool] = ContextVar("loom_tensors_leaves", default=False)
"""True if a result is a leaf again that was computed from a leaf without a graph: within ``no_grad(function)``."""


@contextmanager
def grad_mode(enabled: bool, leaves: bool = False) -> Iterator[None]:
    """Build a graph, or none, within the block."""
    token, other = grad_enabled.set(enabled), makes_leaves.set(leaves)
    try:
        yield
    finally:
        grad_enabled.reset(token)
        makes_leaves.reset(other)


class set_grad_enabled:  # noqa: N801 - as torch calls it
    """Build a graph, or none, from here on; as a context manager, within the block."""

    def __init__(self, mode: bool) -> None:
        self._token = grad_enabled.set(mode)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        grad_enabled.reset(self._token)


def no_grad(function: Callable[..., Any] | None = None) -> Any:
    """Build no graph within the block, or within a function.

    ``@no_grad()`` decorates a function. ``no_grad(function)`` calls a function without parameters at once, and
    returns its result; tensors that it computes from leaves are leaves, too, so that ``w = w.sub(…)`` goes on
    training. A function with parameters it decorates.
    """
    if function is None:
        return grad_mode(False)
    if signature(function).parameters:
        return grad_mode(False)(function)
    with grad_mode(False, leaves=True):
        return function()


def enable_grad(function: Callable[..., Any] | None = None) -> Any:
    """Build a graph within the block, also in one of `no_grad`, or within the function that this decorates."""
    return grad_mode(True) if function is None else grad_mode(True)(function)
