"""The ends of actors whose process lives on, which the replicas that they have made report.

An actor ends by `sys.exit` in an endpoint, by an error in a message that has no answer, by the failure of a mesh
that it owns, or because its mesh is stopped. Its training has ended then, while its threadlet and the process are
well. So an actor that ends says goodbye for the threadlets that its messages made, after its ``__cleanup__``, and
for the threadlets of the threads that it has started and of the work that it has given to thread pools.

A `SystemExit` in a task that an async actor has started ends the event loop of all async actors, and nothing is
answered any more. So it ends the process, as it ends a program.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from monarch._src.actor.actor_mesh import _Actor, _context

from loom.errors import SupervisionError
from loom.threadlet import threadlet
from loom_gateway.driver.monarch.endpoint_errors import what_was_raised
from loom_gateway.driver.runs.forked_children import end_at_once

_DIED_OF = "_loom_died_of"
"""The attribute of an actor for the error that ended it. Monarch's own report of it is a text."""

_ACTOR = "_loom_actor"
"""The attribute of a thread for the actor that it works for. A thread has no context of Monarch's."""


def report_ends_of_actors() -> None:
    """Patch Monarch's actors in this process. Again is harmless."""
    if hasattr(_Actor.__cleanup__, "__wrapped__"):
        return
    threadlet.belong_to(_running_actor)
    _Actor._report_exception = _unless_answered(_Actor._report_exception)
    _Actor._report_panic = _always(_Actor._report_panic)
    _Actor.__cleanup__ = _and_goodbye_async(_Actor.__cleanup__)
    _Actor._run_cleanup = _and_goodbye(_Actor._run_cleanup)
    threading.excepthook = _ending_with_the_loop(threading.excepthook)
    threading.Thread.start = _for_the_actor(threading.Thread.start)  # type: ignore[assignment,method-assign]
    ThreadPoolExecutor.submit = _for_the_actor_that_submits(ThreadPoolExecutor.submit)  # type: ignore[method-assign]


def _running_actor() -> object:
    """Return the id of the actor that this thread or task works for; None if there is none."""
    context = _context.get(None)
    if context is None:
        return getattr(threading.current_thread(), _ACTOR, None)
    return context.actor_instance.actor_id


def _for_the_actor(plain: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    @functools.wraps(plain)
    def start(thread: threading.Thread) -> None:
        setattr(thread, _ACTOR, _running_actor())
        plain(thread)

    return start


def _for_the_actor_that_submits(plain: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
    @functools.wraps(plain)
    def submit(pool: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return plain(pool, _work_for, _running_actor(), fn, args, kwargs)

    return submit


def _work_for(actor: object, work: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function in a pool's thread, which another actor may have started."""
    thread = threading.current_thread()
    starter = getattr(thread, _ACTOR, None)
    setattr(thread, _ACTOR, actor)
    try:
        return work(*args, **kwargs)
    finally:
        setattr(thread, _ACTOR, starter)


def _unless_answered(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def report_exception(self: _Actor, error: BaseException, *args: Any) -> None:
        try:
            plain(self, error, *args)
        except BaseException:  # nobody waits for an answer
            setattr(self, _DIED_OF, error)
            raise

    return report_exception


def _always(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def report_panic(self: _Actor, error: BaseException, *args: Any) -> None:
        setattr(self, _DIED_OF, error)
        plain(self, error, *args)

    return report_panic


def _and_goodbye_async(plain: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    @functools.wraps(plain)
    async def cleanup(self: _Actor, context: Any, error: str | Exception | None) -> None:
        try:
            await plain(self, context, error)
        finally:
            # In another thread: a weaver that is away would hold up the other actors of this loop.
            await asyncio.to_thread(_say_goodbye, self, context, error)

    return cleanup


def _and_goodbye(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def run_cleanup(self: _Actor, item: Any) -> None:
        try:
            plain(self, item)
        finally:
            _say_goodbye(self, item.context, item.error)

    return run_cleanup


def _say_goodbye(actor: _Actor, context: Any, told: str | Exception | None) -> None:
    error: BaseException | None = vars(actor).pop(_DIED_OF, None)
    if error is not None:
        error = what_was_raised(error)
    elif told is not None:
        error = told if isinstance(told, BaseException) else SupervisionError(told)
    threadlet.close_those_of(context.actor_instance.actor_id, error)


def _ending_with_the_loop(plain: Callable[[threading.ExceptHookArgs], object]) -> Callable[..., object]:
    loops = asyncio.BaseEventLoop.run_forever.__code__

    def excepthook(args: threading.ExceptHookArgs) -> None:
        frames = (frame for frame, _ in traceback.walk_tb(args.exc_traceback))
        if isinstance(args.exc_value, SystemExit) and any(frame.f_code is loops for frame in frames):
            end_at_once(args.exc_value)
        plain(args)

    return excepthook
