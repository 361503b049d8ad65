"""The handlers of a training process: one for each configuration key that can be changed from outside."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from loom.errors import WrongArguments
from loom.threadlet.conversion import BadValue, convert, is_convertible, type_name
from loom.threadlet.deferred import Deferred


@dataclass(frozen=True)
class Outcome:
    """The outcome of one key of an update."""

    key: str
    value: Any
    """The value that the handler got; the unconverted value if it was refused."""
    refused: str | None = None
    """Why the value was refused; None if it was applied or deferred."""
    deferred: Deferred | None = None
    """The later outcome of a value that the handler accepted but has not applied yet."""


@dataclass(frozen=True)
class _Handler:
    function: Callable[[Any], Any]
    wanted: Any

    def apply(self, key: str, value: Any) -> Outcome:
        try:
            converted = convert(value, self.wanted)
        except BadValue as error:
            return Outcome(key, value, f"{key}: {error}")
        try:
            answer = self.function(converted)
        except Exception as error:  # noqa: BLE001 - the user's own code, which must not end the training
            return Outcome(key, converted, f"{key}: the handler raised {type(error).__name__}: {error}")
        return Outcome(key, converted, deferred=answer if isinstance(answer, Deferred) else None)


class HandlerRegistry:
    """The handlers by key. Any thread may register handlers or apply updates."""

    def __init__(self) -> None:
        self._handlers: dict[str, _Handler] = {}

    def __len__(self) -> int:
        return len(self._handlers)

    def __contains__(self, key: object) -> bool:
        return key in self._handlers

    def register(self, key: str, function: Callable[[Any], Any], names: Mapping[str, Any] | None = None) -> None:
        """Register a function to be called with each new value of a key, in place of an earlier one.

        Args:
            key: of the configuration.
            function: takes the value, converted to the type its parameter is annotated with. Without annotation, it
                gets the value as it came. It may return a `Deferred` if the value applies at a later step.
            names: names that the annotations may use in addition to the globals of their module, such as a caller's
                locals.

        Raises:
            WrongArguments: the function cannot be called with one argument, values cannot be converted to its
                annotation, or the key is no text of 1 to 200 characters.
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
        self._handlers = {**self._handlers, key: _Handler(function, wanted)}

    def types(self) -> dict[str, str]:
        """Return the name of each key's type, as `loom.threadlet.conversion.type_name` writes it."""
        return {key: type_name(handler.wanted) for key, handler in self._handlers.items()}

    def apply(self, update: Mapping[str, Any]) -> Iterator[Outcome]:
        """Yield the outcome of each key's handler, in order; each value is applied or refused on its own.

        An exception that is no `Exception`, such as `KeyboardInterrupt`, passes through.
        """
        for key, value in update.items():
            handler = self._handlers.get(key)
            yield Outcome(key, value, self._unknown(key)) if handler is None else handler.apply(key, value)

    def _unknown(self, key: str) -> str:
        known = ", ".join(sorted(self._handlers)) or "none"
        return f"{key}: no handler for it in this replica; it has handlers for: {known}"


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
