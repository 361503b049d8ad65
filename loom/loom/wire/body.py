"""`Body`, the base of what travels as the fields of a dataclass, and the checks of fields by their annotations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

from loom.errors import ProtocolMismatch, WrongArguments
from loom.wire.messages import Buffer, Kind, Message
from loom.wire.plain import plain, shortened

Id: TypeAlias = int
"""An id. The client chooses positive ones; ids of returned meshes, which the driver chooses, are negative."""

Check: TypeAlias = Callable[[Any], bool]

B = TypeVar("B", bound="Body")


class Body:
    """The body of one kind of message: a frozen dataclass whose fields travel as a list, in their order.

    Fields at the end whose default is None are left out if they are None.
    """

    __slots__ = ()
    __match_args__: ClassVar[tuple[str, ...]]
    __dataclass_fields__: ClassVar[Mapping[str, dataclasses.Field[Any]]]

    KIND: ClassVar[Any]
    """A `Kind`, or the text that a frame of the weaver's link begins with (`loom.control.frame`)."""

    def __init_subclass__(cls, kind: Kind | str | None = None) -> None:
        if kind is not None:
            cls.KIND = kind
        # Without ``kind`` for the copy that `dataclass` makes of a class, to give it slots.
        if isinstance(getattr(cls, "KIND", None), Kind):
            BODIES[cls.KIND] = cls

    def to_body(self) -> list[Any]:
        """Return the fields as they travel; raise what `sendable_fields` raises."""
        names = self.__match_args__
        values = list(sendable_fields(self).values())
        while values and values[-1] is None and self.__dataclass_fields__[names[len(values) - 1]].default is None:
            values.pop()
        return values

    @classmethod
    def from_body(cls: type[B], body: Sequence[Any]) -> B:
        """Make a body of a list that a peer sent; the error for another list names the wrong field."""
        try:
            made = cls(*body)
        except TypeError as error:
            fields = ", ".join(cls.__match_args__) or "nothing"
            raise ProtocolMismatch(
                f"not {cls.title()} of Loom's protocol, which has {fields}: {body!r:.80}"
            ) from error
        check_fields(made, cls.title())
        return made

    @classmethod
    def title(cls) -> str:
        """Return the words for a body of this kind, for errors."""
        return f"a message {cls.KIND.name}" if isinstance(cls.KIND, Enum) else f"a {cls.KIND!r} frame"

    def message(self, ident: int = 0, parts: Sequence[Buffer] = ()) -> Message:
        return Message(self.KIND, ident, self.to_body(), parts)


BODIES: dict[Kind, type[Body]] = {}  # the class of each kind's body


class _Fit(NamedTuple):
    """The check of a value, and words for what it takes."""

    fits: Check
    words: str


def _all_are(kind: type, values: Sequence[Any]) -> bool:
    return all(type(value) is kind for value in values)


def _sequence_of(kind: type) -> Check:
    return lambda value: type(value) in (list, tuple) and _all_are(kind, value)


def _map_of(fits: Check) -> Check:
    return lambda value: type(value) is dict and _all_are(str, list(value)) and all(map(fits, value.values()))


_FITS = {
    "Any": _Fit(lambda value: True, "anything"),
    "int": _Fit(lambda value: type(value) is int and value >= 0, "a count of 0 or more"),
    "Id": _Fit(lambda value: type(value) is int, "an id"),
    "bool": _Fit(lambda value: type(value) is bool, "True or False"),
    "float": _Fit(lambda value: type(value) in (int, float) and value >= 0, "a number of 0 or more"),
    "str": _Fit(lambda value: type(value) is str, "a text"),
    "bytes": _Fit(lambda value: type(value) is bytes, "bytes"),
    "Sequence[Any]": _Fit(lambda value: type(value) in (list, tuple), "a list"),
    "Sequence[int]": _Fit(_sequence_of(int), "a list of integers"),
    "Sequence[str]": _Fit(_sequence_of(str), "a list of texts"),
    "Mapping[str, Any]": _Fit(_map_of(lambda value: True), "a dict whose keys are texts"),
    "Mapping[str, int]": _Fit(_map_of(lambda value: type(value) is int), "a dict of integers whose keys are texts"),
    "Mapping[str, str]": _Fit(_map_of(lambda value: type(value) is str), "a dict of texts whose keys are texts"),
    "Mapping[str, Sequence[int]]": _Fit(
        _map_of(_sequence_of(int)), "a dict of lists of integers whose keys are texts"
    ),
}
"""The check of a value, by the annotation of its field. An ``Id`` may be negative, an ``int`` may not."""


def _fit(annotation: str) -> _Fit:
    fits, words = _FITS[annotation.removesuffix(" | None")]
    if not annotation.endswith(" | None"):
        return _Fit(fits, words)
    return _Fit(
        lambda value: value is None or fits(value), f"None or {words}" if " or " in words else f"{words} or None"
    )


@cache
def _fits_of(cls: type) -> tuple[tuple[str, _Fit], ...]:
    return tuple((one.name, _fit(str(one.type))) for one in dataclasses.fields(cls))


def check_fields(body: Any, title: str) -> None:
    """Raise `ProtocolMismatch`, about ``title``, unless each field of a dataclass fits its annotation."""
    for name, (fits, _) in _fits_of(type(body)):  # type: ignore[arg-type]  # classes are hashable
        value = getattr(body, name)
        if not fits(value):
            raise ProtocolMismatch(f"not {title} of Loom's protocol: its {name} is {value!r:.40}")


def sendable_fields(body: Any) -> Mapping[str, Any]:
    """Return the fields of a dataclass, by name, as a peer takes them: values that do not fit in their plain form.

    Raises:
        WrongArguments: a value has none that fits the annotation of its field. The peer would refuse the message,
            and with it the connection.
    """
    sendable = {}
    for name, (fits, words) in _fits_of(type(body)):  # type: ignore[arg-type]  # classes are hashable
        value = getattr(body, name)
        if not fits(value):
            value = plain(value, name)
            if not fits(value):
                raise WrongArguments(f"{name}: {shortened(value)} is not {words}")
        sendable[name] = value
    return sendable
