"""Exceptions of endpoints, in the processes of a session: they are answered, and the actor lives on.

Monarch formats and pickles an exception where nobody catches what goes wrong: an exception that holds a lock, or
whose constructor takes more than its message, ends its actor, or comes out as another one on the other side. A
method of an async actor that ends in `asyncio.CancelledError` is never answered, and so is no later one, since
Monarch takes the error for the end of the actor (torchmonarch 0.7). A `SystemExit` ends an actor,
as Monarch has it. A forked child of an endpoint ends when the endpoint returns in it, and answers nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import pickle
import sys
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import cloudpickle
from monarch._src.actor import actor_mesh
from monarch._src.actor.actor_mesh import ActorError, Port, _Actor, context

from loom.wire.exceptions import Description, describe, formatted, is_plain, rebuild, text_of
from loom.wire.messages import Buffer
from loom_gateway.driver.runs.forked_children import end_child

STOPS_WITHIN = 0.1
"""Seconds from the end of one task of an actor to those of the others when Monarch stops it."""


class _Ended(Exception):
    """Carries what is no `Exception` to Monarch, which answers the caller with exceptions only."""

    def __init__(self, raised: BaseException) -> None:
        super().__init__(f"{type(raised).__name__}: {text_of(raised)}")
        self.raised = raised


def what_was_raised(error: BaseException) -> BaseException:
    """Return the error that user code raised, from one of Monarch's actors."""
    return error.raised if isinstance(error, _Ended) else error


def answer_what_is_raised() -> None:
    """Patch Monarch's actors and exceptions in this process. Again is harmless."""
    if hasattr(_Actor._lookup, "__wrapped__"):
        return
    _Actor._lookup = _guarded(_Actor._lookup)
    ActorError.__init__ = _made_of
    ActorError.__reduce__ = _reduced
    Port.exception = _described(Port.exception)
    actor_mesh.log_endpoint_exception = _quiet(actor_mesh.log_endpoint_exception)
    actor_mesh._dispatch_loop = _in_a_task(actor_mesh._dispatch_loop)


def _guarded(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def _lookup(self: Any, ctx: Any, method_name: str) -> Any:
        if self.instance is not None and method_name in self._method_cache:
            return self._method_cache[method_name]
        method, *rest, is_coroutine = plain(self, ctx, method_name)
        guarded = _answered_async(method) if is_coroutine else _answered(method)
        self._method_cache[method_name] = found = (guarded, *rest, is_coroutine)
        return found

    return _lookup


def _answered(method: Callable[..., Any]) -> Callable[..., Any]:
    process = os.getpid()

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = method(*args, **kwargs)
        except BaseException as error:
            if os.getpid() != process:
                end_child(error)
            if isinstance(error, Exception) or _ends_the_actor(error):
                raise
            ended = _Ended(error)
        else:
            if os.getpid() != process:
                end_child(None)
            return result
        raise ended

    return call


def _answered_async(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    process = os.getpid()

    async def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = await method(*args, **kwargs)
        except BaseException as error:
            if os.getpid() != process:
                end_child(error)
            if isinstance(error, Exception) or _ends_the_actor(error):
                raise
            if isinstance(error, asyncio.CancelledError) and await _is_stopping():
                raise
            ended = _Ended(error)
        else:
            if os.getpid() != process:
                end_child(None)
            return result
        raise ended

    return call


async def _is_stopping() -> bool:
    """Return whether Monarch stops the actor whose method was cancelled.

    Monarch cancels all tasks of the actor then, one after the other, and this one perhaps first.
    """
    task: Any = asyncio.current_task()
    cancelled = task.cancelling() if sys.version_info >= (3, 11) else 1  # 0 if the method itself raised the error
    if cancelled and task not in _stopping:
        await asyncio.sleep(STOPS_WITHIN)  # which the other task cancels in this case
        for _ in range(cancelled if sys.version_info >= (3, 11) else 0):
            task.uncancel()
    return task in _stopping


def _ends_the_actor(error: BaseException) -> bool:
    return isinstance(error, SystemExit) or type(error).__module__ == "pyo3_runtime"  # a panic of Monarch's


_stopping: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
"""The tasks that handle the messages of an actor that Monarch stops."""


def _in_a_task(plain: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Give an actor's messages a task of their own, so that its end by Monarch differs from its end by itself.

    A `SystemExit` of the task would end the event loop, and with it the process's other actors.
    """

    async def contained(*args: Any) -> None:
        try:
            await plain(*args)
        except SystemExit as error:
            raise _Ended(error) from None

    async def _dispatch_loop(*args: Any) -> None:
        task = asyncio.ensure_future(contained(*args))
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            _stopping.add(task)
            task.cancel()
            await asyncio.wait((task,))
            raise
        task.result()

    return _dispatch_loop


def _made_of(self: ActorError, exception: BaseException, message: str = "A remote actor call has failed.") -> None:
    self.exception = raised = what_was_raised(exception)
    self.message = message
    self.place = _place()
    # As Monarch's own constructor has it.
    at = "Traceback (most recent call last):"
    self.exception_formatted = formatted(raised).replace(
        at, at.replace("(", "of where the remote call failed (", 1)
    )


def _reduced(self: ActorError) -> Any:
    if is_plain(self.exception):
        made: tuple[Any, ...] = (_arrived_plain, (self.exception, self.message, self.exception_formatted))
    else:
        made = (_arrived, (describe(self.exception, _dump), self.message, self.exception_formatted))
    place = getattr(self, "place", "")
    return (*made, {"place": place}) if place else made


def _place() -> str:
    """Return the rank of the actor that raises an exception, with its place in the mesh; "" outside of actors."""
    with contextlib.suppress(Exception):  # of another version of Monarch's
        point = context().actor_instance.rank
        place = ", ".join(f"{label}={index}" for label, index in dict(point).items())
        return f"rank {point.rank} ({place})" if place else f"rank {point.rank}"
    return ""


def _arrived(description: Description, message: str, text: str) -> ActorError:
    return _arrived_plain(rebuild(description, _load), message, text)


def _arrived_plain(exception: BaseException, message: str, text: str) -> ActorError:
    error = ActorError.__new__(ActorError)
    error.exception, error.message, error.exception_formatted = exception, message, text
    return error


def _described(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def exception(self: Port[Any], error: Any) -> None:
        if isinstance(error, BaseException) and not isinstance(error, ActorError):
            error = _Sent(error)
        plain(self, error)

    return exception


class _Sent:
    """An exception that user code sends to a port, which arrives as the exception."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> Any:
        return _rebuilt, (describe(self._error, _dump),)


def _rebuilt(description: Description) -> BaseException:
    error = rebuild(description, _load)
    vars(error)[_SENT] = True
    return error


_SENT = "_loom_sent"


def was_sent(error: BaseException) -> bool:
    """Return whether user code sent an exception to a port, else Monarch raised it. Once: the mark is taken off."""
    return bool(vars(error).pop(_SENT, False))


def _dump(value: Any) -> Sequence[Buffer]:
    return [cloudpickle.dumps(value)]


def _load(parts: Sequence[Buffer]) -> Any:
    return pickle.loads(parts[0])


def _quiet(plain: Callable[..., None]) -> Callable[..., None]:
    def log_endpoint_exception(error: Exception, *args: Any) -> None:
        with contextlib.suppress(Exception):  # it asks for the text, and a user's __str__ may raise
            plain(error, *args)

    return log_endpoint_exception
