"""The handlers of a training process: one for each configuration key that can be changed from outside.

`convert` makes values from the link or a command line fit the types that handlers declare. A value comes as JSON
or as text: ``0.002`` and ``"0.002"`` are the same learning rate. A value that would need a loss or a guess is
refused: 3.5 is no int, ``"maybe"`` no bool.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import json
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, Literal, Union

from loom.control.commands import no_handler
from loom.errors import WrongArguments, describe_error


@dataclass(frozen=True)
class Settlement:
    """The outcome of a deferred value."""

    step: int | None
    """The first step at which the value takes effect; None if the value was refused."""
    refused: str | None = None
    """Why the value was refused; None if it was applied."""


class Deferred:
    """A value that was accepted and is not applied yet.

    A handler returns a `Deferred` when it cannot apply the value at this step boundary, such as a value that all
    replicas have to change at the same step. The command is acknowledged when `applied` or `refuse` was called for
    each of its values, with the latest of their steps. Closing the threadlet refuses the values that are left.

    Any thread may call `applied` and `refuse`. The first call counts; later ones do nothing.
    """

    def __init__(self) -> None:
        self._decided: Future[Settlement] = Future()

    @property
    def verdict(self) -> Settlement | None:
        """The outcome of the value; None while it is open."""
        return self._decided.result() if self._decided.done() else None

    def applied(self, step: int) -> None:
        """Settle the value: it takes effect at this step."""
        self._decide(Settlement(step))

    def refuse(self, reason: str) -> None:
        """Settle the value: it will not be applied, for this reason."""
        self._decide(Settlement(None, reason))

    def when_decided(self, listener: Callable[[Settlement], None]) -> None:
        """Call the listener with the verdict, at once if there is one. Only the threadlet calls this."""
        self._decided.add_done_callback(lambda decided: listener(decided.result()))

    def _decide(self, verdict: Settlement) -> None:
        with contextlib.suppress(InvalidStateError):
            self._decided.set_result(verdict)


_TRUE = ("true", "1", "yes")
_FALSE = ("false", "0", "no")
_NONE = ("none", "null")


class BadValue(ValueError):
    """A value that cannot be converted to the declared type."""


def convert(value: Any, wanted: Any) -> Any:
    """Convert a value of JSON to a type that `is_convertible` knows; raise `BadValue` if it cannot be."""
    if wanted is Any or wanted is object:
        return value
    if wanted is None:
        wanted = type(None)
    if (simple := _SIMPLE.get(wanted)) is not None:
        return simple(value)
    origin = typing.get_origin(wanted)
    if origin is list or wanted is list:
        return _list(value, wanted)
    if origin is Literal:
        return _chosen(value, [(choice, choice) for choice in typing.get_args(wanted)], wanted)
    if _is_union(origin):
        return _union(value, wanted)
    return _enum(value, wanted)


def is_convertible(wanted: Any) -> bool:
    """Return whether `convert` knows the type."""
    if wanted in (Any, object, None, list) or wanted in _SIMPLE:
        return True
    origin = typing.get_origin(wanted)
    if origin is Literal:
        return True
    if origin is list or _is_union(origin):
        return all(is_convertible(argument) for argument in typing.get_args(wanted))
    return isinstance(wanted, type) and issubclass(wanted, enum.Enum)


def type_name(wanted: Any) -> str:
    """Return a type as a user writes it: ``float``, ``int | None``, ``list[float]``, ``Schedule(COSINE)``."""
    if wanted is None or wanted is type(None):
        return "None"
    origin = typing.get_origin(wanted)
    if _is_union(origin):
        return " | ".join(type_name(argument) for argument in typing.get_args(wanted))
    if origin is list:
        return f"list[{', '.join(type_name(argument) for argument in typing.get_args(wanted))}]"
    if origin is Literal:
        return " | ".join(repr(choice) for choice in typing.get_args(wanted))
    if isinstance(wanted, type) and issubclass(wanted, enum.Enum):
        return f"{wanted.__name__}({', '.join(wanted.__members__)})"
    return getattr(wanted, "__name__", str(wanted))


def _refuse(value: Any, wanted: Any) -> BadValue:
    shown = repr(value)
    return BadValue(f"{shown if len(shown) <= 80 else shown[:79] + '…'} is not of type {type_name(wanted)}")


def _int(value: Any) -> int:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not (whole or isinstance(value, str)):
        raise _refuse(value, int)
    try:
        return int(value)
    except ValueError:
        raise _refuse(value, int) from None


def _float(value: Any) -> float:
    if isinstance(value, float):
        return value
    if isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            raise _refuse(value, float) from None
        # The text "nan" is usually the output of a broken computation: a user who means it gives a number.
        if not math.isnan(number):
            return number
    raise _refuse(value, float)


def _bool(value: Any) -> bool:
    text = value.strip().lower() if isinstance(value, str) else value
    if isinstance(text, bool):
        return text
    if text in _TRUE or (text == 1 and isinstance(text, int)):
        return True
    if text in _FALSE or (text == 0 and isinstance(text, int)):
        return False
    raise _refuse(value, bool)


def _str(value: Any) -> str:
    if isinstance(value, str):
        return value
    # A command line parses a text such as "16" as a number.
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    raise _refuse(value, str)


def _none(value: Any) -> None:
    if value is not None and not (isinstance(value, str) and value.strip().lower() in _NONE):
        raise _refuse(value, None)


_SIMPLE: dict[Any, Callable[[Any], Any]] = {int: _int, float: _float, bool: _bool, str: _str, type(None): _none}


def _list(value: Any, wanted: Any) -> list[Any]:
    items = value
    if isinstance(value, str):
        try:
            items = json.loads(value, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            raise _refuse(value, wanted) from None
    if not isinstance(items, (list, tuple)):
        raise _refuse(value, wanted)
    (inner,) = typing.get_args(wanted) or (Any,)
    try:
        return [convert(item, inner) for item in items]
    except BadValue as error:
        raise BadValue(f"{_refuse(value, wanted)}: {error}") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"JSON has no {name}")


def _enum(value: Any, wanted: type[enum.Enum]) -> Any:
    if isinstance(value, wanted):
        return value
    if isinstance(value, str) and value in wanted.__members__:
        return wanted[value]
    return _chosen(value, [(member.value, member) for member in wanted], wanted)


def _chosen(value: Any, choices: list[tuple[Any, Any]], wanted: Any) -> Any:
    """Return the result for the choice that equals the value, or whose text is the value."""
    for choice, chosen in choices:
        if type(choice) is type(value) and choice == value:
            return chosen
    for choice, chosen in choices:
        if choice is not None and not isinstance(choice, bool) and choice == value and not isinstance(value, bool):
            return chosen
        if isinstance(value, str) and str(choice) == value:
            return chosen
    raise _refuse(value, wanted)


def _union(value: Any, wanted: Any) -> Any:
    """Convert the value to the member that is its type already, or else to the first member that it can be."""
    members = typing.get_args(wanted)
    if type(value) in members:
        return convert(value, type(value))
    # None comes before str, because every text can be a str.
    for member in sorted(members, key=lambda member: (member is str, member is not type(None))):
        try:
            return convert(value, member)
        except BadValue:
            continue
    raise _refuse(value, wanted)


def _is_union(origin: Any) -> bool:
    return origin is Union or origin is types.UnionType


@dataclass(frozen=True)
class Outcome:
    """The outcome of one key of an update."""

    key: str
    value: Any  # the value that the handler got; the unconverted value if it was refused
    refused: str | None = None  # why the value was refused; None if it was applied or deferred
    deferred: Deferred | None = None  # the later outcome of a value that was accepted and not applied yet
    sent: Any = field(default=None, compare=False)  # the unconverted value
    undo: Callable[[], object] | None = field(default=None, compare=False)
    """Brings back what held before, of a key for which that is more than a value, such as a schedule."""


class HandlerRegistry:
    """The handlers by key. Any thread may register handlers or apply updates."""

    def __init__(self) -> None:
        self._handlers: dict[str, tuple[Callable[[Any], Any], Any]] = {}  # each with the type of its value

    def __len__(self) -> int:
        return len(self._handlers)

    def __contains__(self, key: object) -> bool:
        return key in self._handlers

    def register(self, key: str, function: Callable[[Any], Any], names: Mapping[str, Any] | None = None) -> None:
        """Register a function for each new value of a key, as `loom.Threadlet.handler` describes.

        Its annotations may use ``names``, such as a caller's locals, besides the globals of its module.
        """
        if not isinstance(key, str) or not 0 < len(key) <= 200:
            raise WrongArguments(f"a handler's key is a text of 1 to 200 characters, not {key!r:.80}")
        wanted = _wanted(key, function, names)
        if not is_convertible(wanted):
            raise WrongArguments(
                f"the handler for {key!r} asks for {type_name(wanted)}; values are converted to int, float, bool, "
                "str, Enum, Literal, Optional and list of these"
            )
        # Replace the dict instead of changing it: other threads may iterate over the old one.
        self._handlers = {**self._handlers, key: (function, wanted)}

    def types(self) -> dict[str, str]:
        """Return the name of each key's type."""
        return {key: type_name(wanted) for key, (_, wanted) in self._handlers.items()}

    def refusal(self, key: str, value: Any) -> str | None:
        """Return why a value is refused before its handler is called, or None."""
        if key not in self._handlers:
            return no_handler(key, self._handlers)
        try:
            convert(value, self._handlers[key][1])
        except BadValue as error:
            return f"{key}: {error}"
        return None

    def read_into(self, config: dict[str, Any], keys: Iterable[str]) -> None:
        """Put the present values of keys into ``config``, as far as their handlers say how they are read."""
        for key in self._handlers.keys() & keys:
            if (read := getattr(self._handlers[key][0], "present", None)) is not None:
                with contextlib.suppress(Exception):  # the user's own code: the value is what was known before
                    config[key] = read()

    def former(self, key: str) -> Mapping[str, Any] | None:
        """Return the values that bring back what holds now for a key, if its present value does not."""
        read = getattr(self._handlers.get(key, (None,))[0], "former", None)
        return None if read is None else read()

    def apply(self, key: str, value: Any) -> Outcome:
        """Call a key's handler with a value; return the outcome."""
        if (text := self.refusal(key, value)) is not None:
            return Outcome(key, value, text, sent=value)
        function, wanted = self._handlers[key]
        new = convert(value, wanted)
        saved = getattr(function, "saved", None)
        undo = None if saved is None else saved()
        try:
            answer = function(new)
        except Exception as error:  # noqa: BLE001 - the user's own code, which must not end the training
            return Outcome(key, new, f"{key}: the handler raised {describe_error(error)}", sent=value)
        return Outcome(key, new, None, answer if isinstance(answer, Deferred) else None, value, undo)


def _wanted(key: str, function: Callable[[Any], Any], names: Mapping[str, Any] | None) -> Any:
    """Return the annotated type of a handler's parameter, or `Any`."""
    try:
        signature = inspect.signature(function, locals=names, eval_str=True)
    except (ValueError, TypeError):
        return Any  # a function in C without a signature
    except NameError as error:
        raise WrongArguments(f"the handler for {key!r} has an annotation that cannot be read: {error}") from error
    try:
        signature.bind(None)
    except TypeError as error:
        raise WrongArguments(f"the handler for {key!r} has to take one value: {error}") from None
    annotation = next(iter(signature.parameters.values())).annotation
    return Any if annotation is inspect.Parameter.empty else annotation
