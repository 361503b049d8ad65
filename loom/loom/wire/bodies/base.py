"""The common base of the bodies of all kinds of message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias, TypeVar

from loom.errors import ProtocolMismatch
from loom.wire.fields import check_fields, sendable_fields
from loom.wire.messages import Buffer, Kind, Message

Id: TypeAlias = int
"""An id. The client chooses positive ones; ids of returned meshes, which the driver chooses, are negative."""

B = TypeVar("B", bound="Body")


class Body:
    """The body of one kind of message: a frozen dataclass whose fields travel as a list, in their order.

    A last field whose default is None is left out if it is None.
    """

    __slots__ = ()
    __match_args__: ClassVar[tuple[str, ...]]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    KIND: ClassVar[Kind]

    def __init_subclass__(cls, kind: Kind | None = None) -> None:
        if kind is not None:
            cls.KIND = kind
        if hasattr(
            cls, "KIND"
        ):  # without ``kind`` for the copy that `dataclass` makes of a class, to give it slots
            BODIES[cls.KIND] = cls

    def to_body(self) -> list[Any]:
        """Return the fields as they travel; raise what `loom.wire.fields.sendable_fields` raises."""
        names = self.__match_args__
        values = list(sendable_fields(self).values())
        if values and values[-1] is None and self.__dataclass_fields__[names[-1]].default is None:
            values.pop()
        return values

    @classmethod
    def from_body(cls: type[B], body: Sequence[Any]) -> B:
        """Make a body of a list that a peer sent; the error for another list names the wrong field."""
        title = f"a message {cls.KIND.name}"
        try:
            made = cls(*body)
        except TypeError as error:
            fields = ", ".join(cls.__match_args__) or "nothing"
            raise ProtocolMismatch(f"not {title} of Loom's protocol, which has {fields}: {body!r:.80}") from error
        check_fields(made, title)
        return made

    def message(self, ident: int = 0, parts: Sequence[Buffer] = ()) -> Message:
        return Message(self.KIND, ident, self.to_body(), parts)


BODIES: dict[Kind, type[Body]] = {}  # the class of each kind's body
