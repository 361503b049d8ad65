"""The handlers of a training process: one for each configuration key that can be changed from outside."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from loom.errors import WrongArguments, describe_error
from loom.threadlet.conversion import BadValue, convert, is_convertible, type_name
from loom.threadlet.deferred import Deferred


@dataclass(frozen=True)
class Outcome:
    """The outcome of one key of an update."""

    key: str
    value: Any  # the value that the handler got; the unconverted value if it was refused
    refused: str | None = None  # why the value was refused; None if it was applied or deferred
    deferred: Deferred | None = None  # the later outcome of a value that was accepted and not applied yet
    sent: Any = field(default=None, compare=False)  # the unconverted value


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

    def apply(self, key: str, value: Any) -> Outcome:
        """Call a key's handler with a value; return the outcome."""
        if key not in self._handlers:
            known = ", ".join(sorted(self._handlers)) or "none"
            text = f"{key}: no handler for it in this replica; it has handlers for: {known}"
            return Outcome(key, value, text, sent=value)
        function, wanted = self._handlers[key]
        try:
            new = convert(value, wanted)
        except BadValue as error:
            return Outcome(key, value, f"{key}: {error}", sent=value)
        try:
            answer = function(new)
        except Exception as error:  # noqa: BLE001 - the user's own code, which must not end the training
            return Outcome(key, new, f"{key}: the handler raised {describe_error(error)}", sent=value)
        return Outcome(key, new, None, answer if isinstance(answer, Deferred) else None, value)


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
