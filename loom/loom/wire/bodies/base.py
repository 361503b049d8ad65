"""The common base of the bodies of all kinds of message."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias, TypeVar

from loom.errors import ProtocolMismatch
from loom.wire.fields import check_fields
from loom.wire.messages import Buffer, Kind, Message

__all__ = ["Body", "Id"]

Id: TypeAlias = int
"""An id. The client chooses positive ones; ids of returned meshes, which the driver chooses, are negative."""

B = TypeVar("B", bound="Body")


class Body:
    """The body of one kind of message: a frozen dataclass whose fields travel as a list, in their order."""

    __slots__ = ()

    KIND: ClassVar[Kind]
    """The kind of message that has this body."""

    def to_body(self) -> list[Any]:
        """Return the fields as they travel."""
        return [getattr(self, name) for name in _names(type(self))]

    @classmethod
    def from_body(cls: type[B], body: Sequence[Any]) -> B:
        """Make a body of a list that a peer sent.

        Raises:
            ProtocolMismatch: the list has too few fields, too many, or one of another type; the text names it.
        """
        try:
            made = cls(*body)
        except TypeError as error:
            fields = ", ".join(_names(cls)) or "nothing"
            text = f"not {cls._title()} of Loom's protocol, which has {fields}: {body!r:.80}"
            raise ProtocolMismatch(text) from error
        check_fields(made, cls._title())
        return made

    def message(self, ident: int = 0, parts: Sequence[Buffer] = ()) -> Message:
        """Return the message with this body, an id and a payload."""
        return Message(self.KIND, ident, self.to_body(), parts)

    @classmethod
    def _title(cls) -> str:
        return f"a message {cls.KIND.name}"


_NAMES: dict[type, tuple[str, ...]] = {}


def _names(cls: type[Body]) -> tuple[str, ...]:
    names = _NAMES.get(cls)
    if names is None:
        names = _NAMES[cls] = tuple(field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]
    return names
