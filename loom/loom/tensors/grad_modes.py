"""Whether operations build a graph, as torch's functions of these names say it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

grad_enabled: ContextVar[bool] = ContextVar("loom_tensors_grad", default=True)


@contextmanager
def grad_mode(enabled: bool) -> Iterator[None]:
    """Build a graph, or none, within the block."""
    token = grad_enabled.set(enabled)
    try:
        yield
    finally:
        grad_enabled.reset(token)


class set_grad_enabled:  # noqa: N801 - as torch calls it
    """Build a graph, or none, from here on; as a context manager, within the block."""

    def __init__(self, mode: bool) -> None:
        self._token = grad_enabled.set(mode)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        grad_enabled.reset(self._token)


def no_grad(function: Callable[..., Any] | None = None) -> Any:
    """Build no graph within the block, or within the function that this decorates, with parentheses or without."""
    return grad_mode(False) if function is None else grad_mode(False)(function)


def enable_grad(function: Callable[..., Any] | None = None) -> Any:
    """Build a graph within the block, also in one of `no_grad`, or within the function that this decorates."""
    return grad_mode(True) if function is None else grad_mode(True)(function)
