"""Calls that a function or an actor in this process makes: they fail when a process that they wait for is gone.

Monarch fails such calls itself, unless the process dies in the moment in which Monarch asks for its state. Then
Monarch waits for the answer, without an end (see `loom_gateway.driver.monarch.root_client`). So when a process link
reports the end of a process, the calls that still wait for that process after `GRACE` seconds fail here.

A call only notes what it waits for. A thread that waits looks every `GRACE` seconds whether that is gone. An event
loop is told.

The driver knows from its links what is gone. A mesh takes the id of its processes with it wherever it is sent.
There, the first call that waits for them for longer than `GRACE` asks the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from monarch._rust_bindings.monarch_hyperactor.endpoint import ActorEndpoint
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch._src.actor.actor_mesh import ActorMesh, Port, context
from monarch._src.actor.future import Future, _Exception
from monarch._src.actor.proc_mesh import ProcMesh

from loom.in_cluster import no_answer_within
from loom_gateway.driver.runs import forked_children

GRACE = 0.6  # seconds that Monarch has to explain a process's death before its calls fail without


class TrackedProcs:
    """A proc mesh: which of its processes are gone, and what awaits them.

    Its meshes, their endpoints and the futures of calls hold it, so that it is freed with the last of them.
    """

    def __init__(self, ident: int, name: str) -> None:
        self.ident = ident
        self.name = name
        self._watched = False  # whether `ask_by`'s function was asked
        self._gone: set[int] = set()
        self._awaited: dict[weakref.ref[asyncio.Future[Any]], tuple[CallTarget, Future[Any]]] = {}
        """The futures on event loops, each with what it waits for and Monarch's future; changed by any thread."""

    def first_gone(self, ranks: Iterator[int]) -> int | None:
        return next((rank for rank in ranks if rank in self._gone), None) if self._gone else None

    def add(self, awaited: asyncio.Future[Any], target: CallTarget, future: Future[Any]) -> None:
        """Fail a future of the running event loop when a process that it waits for is gone."""
        reference = weakref.ref(awaited, self._drop)
        self._awaited[reference] = target, future
        if self._gone:
            asyncio.get_running_loop().call_later(GRACE, self._fail_awaited)
        if not self._watched:
            asyncio.get_running_loop().call_later(GRACE, self._watch_for, reference)

    def _watch_for(self, awaited: weakref.ref[asyncio.Future[Any]]) -> None:
        if (waiting := awaited()) is not None and not waiting.done():
            self.watch()

    def watch(self) -> None:
        """Have the processes that are gone reported here, now and later."""
        if not self._watched:
            self._watched = True
            _ask(self.ident)

    def _drop(self, awaited: weakref.ref[asyncio.Future[Any]]) -> None:
        self._awaited.pop(awaited, None)

    def lose(self, rank: int) -> None:
        """Note that a process is gone, and fail what awaits it."""
        self._gone.add(rank)
        self._fail_awaited()

    def _fail_awaited(self) -> None:
        for reference, (target, future) in self._awaited.copy().items():
            awaited = reference()
            if awaited is not None and not awaited.done() and (why := target.why_silent()) is not None:
                with contextlib.suppress(RuntimeError):  # its event loop is closed
                    awaited.get_loop().call_soon_threadsafe(_fail, awaited, future, why)


def _fail(awaited: asyncio.Future[Any], future: Future[Any], why: str) -> None:
    """Fail a future, and with it Monarch's, so that a ``get`` after it fails too. On the future's event loop."""
    if not awaited.done():
        error = SupervisionError(why)
        awaited.set_exception(error)
        future._status = _Exception(error)


class CallTarget:
    """The subject of a waiting call: some actors of a mesh, and the endpoint."""

    def __init__(self, procs: TrackedProcs, mesh: ActorMesh[Any], endpoint: str) -> None:
        self.procs = procs
        self._shape = mesh._shape
        self._called = f"{mesh._mesh_name}.{endpoint}()"

    def why_silent(self) -> str | None:
        """Return why the call will have no answer; None if every process is there, as far as this one knows."""
        rank = self.procs.first_gone(self._shape.ranks())
        if rank is None:
            return None
        return (
            f"{self._called} has no answer: process {rank} of proc mesh {self.procs.name!r} is gone: it died, or "
            f"its host did, or the network between"
        )


class _Signature(inspect.Signature):
    """The signature of an endpoint's method, which is where an endpoint, a class of Monarch's in Rust, has room."""

    __slots__ = ("target",)
    target: CallTarget

    def __reduce__(self) -> Any:
        return (inspect.Signature, *super().__reduce__()[1:])


_tracked: weakref.WeakValueDictionary[int, TrackedProcs] = weakref.WeakValueDictionary()  # by the proc mesh's id


def track(ident: int, name: str) -> TrackedProcs:
    """Return what is known of a proc mesh. For each mesh on its processes, `belong` says that it is on them."""
    procs = _tracked.get(ident)
    if procs is None:
        procs = _tracked[ident] = TrackedProcs(ident, name)
    return procs


def belong(mesh: ProcMesh, procs: TrackedProcs) -> None:
    """Note of which processes a mesh is. Call it before anything is made on the mesh."""
    mesh._tracked_procs = procs


def lose(ident: int, rank: int) -> None:
    """Fail the calls that wait for a process. Safe on any thread."""
    procs = _tracked.get(ident)
    if procs is not None:
        procs.lose(rank)


def _ask_no_one(ident: int) -> None:
    pass


_ask: Callable[[int], object] = _ask_no_one


def ask_by(ask: Callable[[int], object]) -> None:
    """Set what asks for the processes of a mesh that are gone, which it is to report to `lose`, now and later."""
    global _ask
    _ask = ask


def track_calls() -> None:
    """Have each call note what it waits for, and each wait heed it, in this process."""
    for adverb in ("call", "call_one", "choose"):
        setattr(ActorEndpoint, adverb, _noting(getattr(ActorEndpoint, adverb)))
    ActorEndpoint.stream = _noting_each(ActorEndpoint.stream)
    ActorMesh._endpoint = _with_target(ActorMesh._endpoint)
    ProcMesh._new_with_shape = _of_the_same_procs(ProcMesh._new_with_shape)
    ProcMesh.__reduce_ex__ = _with_its_procs(ProcMesh.__reduce_ex__)
    Future.get = _heeding_get(Future.get)
    Future.__await__ = _heeding_await(Future.__await__)
    Future.as_asyncio = _heeding_as_asyncio(Future.as_asyncio)
    forked_children.refuse_in_children(_refuse)


def _refuse(refuse: Callable[..., NoReturn]) -> None:
    """Let Monarch call a function, in a forked child, where it would wait for threads of its parent's."""
    for module in [*sys.modules.values()]:
        if getattr(module, "__dict__", {}).get("context") is context:
            module.context = refuse  # type: ignore[attr-defined]
    for adverb in ("call", "call_one", "choose", "stream", "broadcast", "_send"):
        setattr(ActorEndpoint, adverb, refuse)
    for name in ("get", "as_asyncio", "__await__"):
        setattr(Future, name, refuse)
    Port.send = refuse


def _of_the_same_procs(plain: Callable[..., ProcMesh]) -> Callable[..., ProcMesh]:
    def _new_with_shape(self: ProcMesh, shape: Any) -> ProcMesh:
        part = plain(self, shape)
        procs = getattr(self, "_tracked_procs", None)
        if procs is not None:
            belong(part, procs)
        return part

    return _new_with_shape


def _with_its_procs(plain: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(self: ProcMesh, protocol: Any) -> Any:
        reduced = plain(self, protocol)
        procs = getattr(self, "_tracked_procs", None)
        if procs is None:
            return reduced
        make, args, *rest = reduced
        return _on_procs, (procs.ident, procs.name, make, *args), *rest

    return reduce


def _on_procs(ident: int, name: str, make: Callable[..., ProcMesh], *args: Any) -> ProcMesh:
    """Return a mesh that was sent here."""
    mesh = make(*args)
    belong(mesh, track(ident, name))
    return mesh


def _with_target(plain: Callable[..., Any]) -> Callable[..., Any]:
    def _endpoint(self: ActorMesh[Any], name: Any, impl: Any, propagator: Any) -> Any:
        made = plain(self, name, impl, propagator)
        procs = getattr(self._proc_mesh, "_tracked_procs", None)
        if procs is None:
            return made
        known = made._signature
        signature = _Signature(
            list(known.parameters.values()),
            return_annotation=known.return_annotation,
            __validate_parameters__=False,
        )
        signature.target = CallTarget(procs, self, name.name)
        return ActorEndpoint(
            self._inner, name, self._shape, self._mesh_name, signature, self._proc_mesh, propagator
        )

    return _endpoint


def _noting(plain: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
    def call(self: ActorEndpoint[Any, Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = plain(self, *args, **kwargs)
        signature = self._signature
        if type(signature) is _Signature:
            future._target = signature.target
        return future

    call.__name__ = plain.__name__
    call.__doc__ = plain.__doc__
    return call


def _noting_each(plain: Callable[..., Iterator[Future[Any]]]) -> Callable[..., Iterator[Future[Any]]]:
    def stream(self: ActorEndpoint[Any, Any], /, *args: Any, **kwargs: Any) -> Iterator[Future[Any]]:
        futures = plain(self, *args, **kwargs)
        signature = self._signature
        return _Stream(futures, signature.target) if type(signature) is _Signature else futures

    stream.__doc__ = plain.__doc__
    return stream


class _Stream(Iterator[Future[Any]]):
    """The futures of ``stream``, each of which notes what it waits for."""

    def __init__(self, futures: Iterator[Future[Any]], target: CallTarget) -> None:
        self._futures = futures
        self._target = target

    def __next__(self) -> Future[Any]:
        future = next(self._futures)
        future._target = self._target
        return future


def _heeding_get(plain: Callable[..., Any]) -> Callable[..., Any]:
    def get(self: Future[Any], timeout: float | None = None) -> Any:
        if forked_children.forked is not None:  # in which a method that was taken before the fork comes here
            raise forked_children.forked
        target: CallTarget | None = self.__dict__.get("_target")
        if target is None or (timeout is not None and not 0 <= timeout < math.inf):  # else Monarch refuses it
            return plain(self, timeout)
        until = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            try:
                return plain(self, min(GRACE, max(0.0, until - time.monotonic())))
            except TimeoutError as late:
                if (why := target.why_silent()) is not None:
                    raise SupervisionError(why) from None
                if timeout is not None and time.monotonic() >= until:
                    raise type(late)(no_answer_within(timeout)) from None
                target.procs.watch()

    get.__doc__ = plain.__doc__
    return get


def _heeding_as_asyncio(plain: Callable[..., asyncio.Future[Any]]) -> Callable[..., asyncio.Future[Any]]:
    def as_asyncio(self: Future[Any]) -> asyncio.Future[Any]:
        awaited = plain(self)
        target: CallTarget | None = self.__dict__.get("_target")
        if target is not None and not awaited.done():
            target.procs.add(awaited, target, self)
        return awaited

    as_asyncio.__doc__ = plain.__doc__
    return as_asyncio


def _heeding_await(plain: Callable[..., Any]) -> Callable[..., Any]:
    def wait(self: Future[Any]) -> Any:
        if "_target" in self.__dict__ and asyncio._get_running_loop() is not None:
            return self.as_asyncio().__await__()
        return plain(self)

    return wait
