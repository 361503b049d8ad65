"""`Frame`: the base of every message on the link, and checks that several kinds of frames share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

from loom.errors import ProtocolMismatch
from loom.wire.fields import check_fields

MAX_COUNT = 1 << 53
"""The bound of steps, epochs and sequence numbers, so that a double holds them exactly."""

MAX_NAME = 200
"""Characters of the longest name."""

MAX_VALUES = 10_000
"""Keys of the largest map of values, such as a configuration."""

F = TypeVar("F", bound="Frame")


class Frame:
    """A message on the link: a frozen dataclass that travels as a list, its kind before its fields."""

    __slots__: tuple[str, ...] = ()

    KIND: ClassVar[str]
    """The first element of the list."""

    def to_body(self) -> list[Any]:
        """Return the frame as a list for msgpack: its kind, then its fields."""
        return [self.KIND, *(getattr(self, name) for name in self.__slots__)]

    @classmethod
    def from_body(cls: type[F], body: Sequence[Any]) -> F:
        """Check a received list and return it as a frame."""
        try:
            made = cls(*body[1:])
        except TypeError as error:
            raise cls.mismatch(body) from error
        check_fields(made, f"a {cls.KIND!r} frame")
        return made

    @classmethod
    def mismatch(cls, body: Any, why: str = "") -> ProtocolMismatch:
        return ProtocolMismatch(f"not a {cls.KIND!r} frame: {body!r:.80}" + (f": {why}" if why else ""))


def check_count(field: str, value: Any) -> int | None:
    """Return a count, such as a step, or None."""
    if value is not None and (type(value) is not int or not 0 <= value < MAX_COUNT):
        raise ProtocolMismatch(f"{field} is a count or None, not {value!r:.80}")
    return value


def optional_text(body: dict[str, Any], field: str) -> str | None:
    """Return a text of at most `MAX_NAME` characters, or None if the field is missing."""
    value = body.get(field)
    if value is not None and (type(value) is not str or len(value) > MAX_NAME):
        raise ProtocolMismatch(f"{field} is a text of at most {MAX_NAME} characters, not {value!r:.80}")
    return value


def printable(body: dict[str, Any], field: str) -> str:
    """Return a printable text of 1 to `MAX_NAME` characters."""
    value = optional_text(body, field)
    if not value or not value.isprintable():
        raise ProtocolMismatch(f"{field} is a printable text, not {value!r:.80}")
    return value


def values(field: str, value: Any) -> dict[str, Any]:
    """Return a map of at most `MAX_VALUES` keys, such as a configuration."""
    if type(value) is not dict or len(value) > MAX_VALUES:
        raise ProtocolMismatch(f"{field} is keys and values, not {value!r:.80}")
    return value
