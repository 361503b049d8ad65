"""Answers of operations: results and errors that have arrived and are not unpickled yet."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from loom.errors import (
    ActorError,
    LoomError,
    OperationFailed,
    RemoteException,
    UnpicklableError,
    describe_error,
    error_for_code,
    operation_failed,
)
from loom.wire.bodies import OperationError
from loom.wire.body import Body
from loom.wire.codec import IF_MISSING, Decoder
from loom.wire.exceptions import rebuild, set_link
from loom.wire.frames import unpack_texts
from loom.wire.messages import Message
from loom_proxy.code_sync.missing import cure, cured
from loom_proxy.futures.future import FutureProxy


class StreamFutures:
    """The futures of one `stream` call, which complete in the order in which results arrive."""

    def __init__(self, operation: Body, futures: list[FutureProxy[Any]]) -> None:
        self.operation = operation
        self._futures = futures
        self._left = len(futures)

    def complete(self, unpack: Callable[[], Any], rpc_ms: float = 0.0, index: int | None = None) -> bool:
        """Complete one future, or all that are left if the whole call has failed; return True if none is left."""
        if index is None:
            self._left = 0
            for future in self._futures:
                future._complete(unpack)
        else:
            self._left -= 1
            self._futures[index]._complete(unpack, rpc_ms)
        return self._left == 0

    def futures(self) -> list[FutureProxy[Any]]:
        """Return all futures of the call."""
        return self._futures


class Unread:
    """Unpacks an answer, and calls ``on_lost`` if nobody has asked for it when the last future of it is gone.

    ``on_lost`` may be called on any thread, in the middle of any other code.
    """

    def __init__(self, unpack: Callable[[], Any], on_lost: Callable[[], object]) -> None:
        self._unpack = unpack
        self._on_lost: Callable[[], object] | None = on_lost

    def __call__(self) -> Any:
        self._on_lost = None
        return self._unpack()

    def __del__(self) -> None:
        if self._on_lost is not None:
            self._on_lost()


def raise_failure(decoder: Decoder, message: Message) -> NoReturn:
    """Unpickle and raise the error of an operation."""
    error = error_of(decoder, message)
    if isinstance(error, OperationFailed) and (original := _original(decoder, message)) is not None:
        raise own_exception(error, original)
    raise error


def raise_error(error: LoomError) -> NoReturn:
    """Raise an error that arose on this side."""
    raise error


def error_of(decoder: Decoder, message: Message) -> LoomError:
    """Return the exception for an error message."""
    code = OperationError.from_body(message.body).code
    texts = unpack_texts(message.parts[0])
    text, formatted = str(texts.get("text", "")), str(texts.get("formatted", ""))
    if "No module named" in text and (found := cure(text)):
        text = f"{text.partition(IF_MISSING)[0].rstrip('.')}. {found}"
    if code != ActorError.code:
        error = error_for_code(code, text)
        if isinstance(error, OperationFailed):
            error = operation_failed(text, str(texts.get("type", "")))
        if formatted:
            error.__cause__ = RemoteException(type(error).__name__, f"remote traceback:\n{formatted}")
        return error
    original = _original(decoder, message)
    if original is None:
        stand_in = (str(texts.get("type", "")), str(texts.get("original", "")))
        original = RemoteException(*stand_in, "it could not be pickled in the cluster")
    if isinstance(original, ModuleNotFoundError) and (found := cure(str(original))):
        text = f"{text} {found}."
        formatted += f"{found}\n"
        cured(original)
    failure = ActorError(original, text, formatted)
    failure.place = str(texts.get("place", ""))
    return failure


def _original(decoder: Decoder, message: Message) -> BaseException | None:
    """Return the exception that was raised in the cluster, or a `RemoteException`; None if it does not travel."""
    texts, pickled = unpack_texts(message.parts[0]), message.parts[1:]
    if "described" in texts:
        description = decoder.loads([texts["described"]], "the exception")
        return rebuild({"own": pickled, **description}, partial(decoder.loads, what="the exception"))
    if not pickled:
        return None
    try:
        original = decoder.loads(pickled, "the exception")
    except UnpicklableError as reason:
        return RemoteException(str(texts.get("type", "")), str(texts.get("original", "")), str(reason))
    return original if isinstance(original, BaseException) else None


def own_exception(error: LoomError, original: BaseException) -> BaseException:
    """Return the exception that a function raised, whose chain of causes ends with the remote traceback.

    Return ``error`` itself if the exception is a stand-in, or no `Exception`.
    """
    if not isinstance(original, Exception) or isinstance(original, RemoteException):
        return error
    add_cause(original, error.__cause__)
    _show_users_lines(original, error.__cause__)
    if isinstance(original, ModuleNotFoundError):
        cured(original)
    return original


def _show_users_lines(raised: Exception, cause: BaseException | None) -> None:
    """Let a notebook show the exception of a function in the cluster with the lines of the user's code."""
    ipython = sys.modules.get("IPython")
    if ipython is None or ipython.get_ipython() is None:
        return
    text = cause.text if isinstance(cause, RemoteException) else ""

    def lines() -> list[str]:
        from loom.remote_traceback import render

        return render(raised, describe_error(raised), text)

    with contextlib.suppress(AttributeError):  # of a class with slots
        raised._render_traceback_ = lines  # type: ignore[attr-defined]


def add_cause(error: BaseException, cause: BaseException | None) -> None:
    """Put an exception at the end of another one's chain of causes."""
    seen = {id(error), id(cause)}
    while error.__cause__ is not None and id(error.__cause__) not in seen:
        error = error.__cause__
        seen.add(id(error))
    if error.__cause__ is None and error is not cause:
        set_link(error, "__cause__", cause)
