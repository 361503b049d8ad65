"""Replacements for objects of Monarch's classes on their way to a laptop, which need not have Monarch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monarch._rust_bindings.monarch_hyperactor.shape import Extent
from monarch._rust_bindings.monarch_hyperactor.shape import Point as BasePoint
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError as MonarchSupervisionError
from monarch.actor import ActorError as MonarchActorError
from monarch.actor import Point

from loom.coordinates import for_laptop
from loom.errors import ActorError, SupervisionError


def _actor_error(error: MonarchActorError) -> tuple[Any, ...]:
    return ActorError, (error.exception, error.message, error.exception_formatted)


def _supervision_error(error: MonarchSupervisionError) -> tuple[Any, ...]:
    return SupervisionError, (str(error),)


TRANSLATIONS: dict[type, Callable[[Any], Any]] = {
    BasePoint: for_laptop,
    Point: for_laptop,
    Extent: for_laptop,
    MonarchActorError: _actor_error,
    MonarchSupervisionError: _supervision_error,
}
"""For `Encoder`: the replacement to pickle, by an object's type."""
