"""Objects of ordinary classes that live in the cluster and whose methods are called here like local ones.

A remote object is an actor mesh (`loom.remote_objects`) with one actor or many, in processes of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from loom.errors import ActorError, LoomError, RemoteException, WaitTimeout, WrongArguments, WrongState
from loom.remote_objects import Generated, HostedObject, HostedStep, Method, no_method
from loom_proxy.futures.future import FutureProxy
from loom_proxy.futures.results import add_cause
from loom_proxy.futures.timing import check_timeout
from loom_proxy.mesh.actors import ActorMeshProxy
from loom_proxy.mesh.values import ValueMeshProxy

_STAYS_AN_ACTOR_ERROR = (RemoteException, StopIteration, StopAsyncIteration)
"""Exceptions that stay inside the `ActorError`: a stand-in, and exceptions that would end a loop of the caller."""


def own_error(error: ActorError) -> BaseException:
    """Return a method's exception, whose chain of causes ends with the `ActorError`.

    Return the `ActorError` if the exception cannot be raised here.
    """
    original = error.exception
    if not isinstance(original, Exception) or isinstance(original, _STAYS_AN_ACTOR_ERROR):
        return error
    add_cause(original, error)
    return original


class Results:
    """The results of the calls on one remote object, whose generators stay in its actor."""

    def __init__(self, mesh: ActorMeshProxy) -> None:
        self._mesh = mesh
        self._abandoned: deque[int] = deque()  # generators that nobody here holds any more

    def wait(self, future: FutureProxy[Any], timeout: float | None) -> Any:
        try:
            return self._made(future.get(timeout), timeout)
        except ActorError as error:
            raised = own_error(error)
        raise raised  # here, since an `except` would take the place of its context

    async def awaited(self, future: FutureProxy[Any], timeout: float | None) -> Any:
        try:
            return self._made(await asyncio.wait_for(future.as_asyncio(), timeout), timeout)
        except ActorError as error:
            raised = own_error(error)
        except (TimeoutError, asyncio.TimeoutError) as error:
            if isinstance(error, LoomError):
                raise
            raise WaitTimeout(f"no answer within {timeout:g} s; the method goes on") from error
        raise raised

    def advance(self, generated: Generated) -> FutureProxy[HostedStep]:
        """Ask for the next item of a generator."""
        future: FutureProxy[HostedStep] = self._mesh.advance.call_one(generated.number)
        return future

    def abandon(self, number: int) -> None:
        self._abandoned.append(number)

    def drop_abandoned(self) -> None:
        """Close the generators that nobody here holds any more.

        The garbage collector only notes them, since it may run in the middle of any other code.
        """
        while self._abandoned:
            self._mesh.drop.broadcast(self._abandoned.popleft())

    def _made(self, result: Any, timeout: float | None) -> Any:
        if isinstance(result, Generated):
            return RemoteGenerator(self, result, timeout)
        if isinstance(result, ValueMeshProxy):
            for value in result.values():
                if isinstance(value, Generated):
                    raise WrongArguments(f"{value.title} gave a generator on each of many objects: call one object")
        return result


class RemoteGenerator:
    """A generator in the cluster, for ``for`` and ``async for``. Each item is asked for when it is wanted.

    Each item may take as long as the call may. After a `WaitTimeout` the same item can be waited for again.
    """

    def __init__(self, results: Results, generated: Generated, timeout: float | None) -> None:
        self._results = results
        self._generated = generated
        self._timeout = timeout
        self._asked: FutureProxy[HostedStep] | None = None  # an item that was asked for and not taken yet
        self._over = False
        self._abandon = weakref.finalize(self, results.abandon, generated.number)
        self._abandon.atexit = False

    def __iter__(self) -> RemoteGenerator:
        return self

    def __aiter__(self) -> RemoteGenerator:
        return self

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        with self._asking() as future:
            step = self._results.wait(future, self._timeout)
        if step.over:
            self._end()
            raise StopIteration(step.value)
        return step.value

    async def __anext__(self) -> Any:
        if self._over:
            raise StopAsyncIteration
        with self._asking() as future:
            step = await self._results.awaited(future, self._timeout)
        if step.over:
            self._end()
            raise StopAsyncIteration
        return step.value

    def close(self) -> None:
        """Close the generator in the cluster, if it is not over. This waits for nothing."""
        if not self._over:
            self._over = True
            self._abandon()
            self._results.drop_abandoned()

    async def aclose(self) -> None:
        """Close the generator, exactly as `close` does."""
        self.close()

    @contextlib.contextmanager
    def _asking(self) -> Iterator[FutureProxy[HostedStep]]:
        if self._asked is None:
            self._asked = self._results.advance(self._generated)
        future = self._asked
        try:
            yield future
        except BaseException:
            if future.done():  # the generator raised; otherwise the wait was given up, and its item is not lost
                self._end()
            raise
        self._asked = None

    def _end(self) -> None:
        self._over = True
        self._abandon.detach()

    def __repr__(self) -> str:
        return f"<remote generator {self._generated.title}{', over' if self._over else ''}>"


O = TypeVar("O", bound="_Remote")  # noqa: E741

OWN_NAMES = frozenset({"mesh", "name", "teardown"})
"""Names of every remote object's own attributes, which no method can have."""


def call_options(method: Method, kwargs: dict[str, Any], timeout: float | None) -> tuple[bool, float | None]:
    """Take ``async_`` and ``timeout`` out of the named arguments of a call, if they are not the method's own."""
    async_ = "async_" in kwargs and not method.has("async_") and kwargs.pop("async_")
    if "timeout" in kwargs and not method.has("timeout"):
        timeout = kwargs.pop("timeout")
        timeout = check_timeout(timeout)
    return async_, timeout


class RemoteMethod:
    """A method of a remote object, or a remote function."""

    def __init__(self, endpoint: Any, name: str | None, method: Method, remote: _Remote) -> None:
        self._adverb = endpoint.call_one if remote._single else endpoint.call
        self._name = name
        self._method = method
        self._remote = remote

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method and return its result; for many objects, a `ValueMeshProxy` of their results.

        A generator stays in the cluster: the result is a `RemoteGenerator`.

        If the method has a parameter ``async_`` or ``timeout`` itself, the argument goes to the method.

        Args:
            async_: return an awaitable instead of waiting. The call is sent at once.
            timeout: seconds to wait at most, in place of the timeout given to `to`; None waits for ever.

        Raises:
            Exception: the method's exception, as its own class; its chain of causes ends with the `ActorError`,
                which has the remote traceback.
            ActorError: the method's exception cannot be rebuilt here, or is no ordinary `Exception`.
            WaitTimeout: the time is up. The method goes on.
            WrongArguments: the method does not take the arguments, and nothing was sent. Or it gives generators,
                and there are many objects.
            UnpicklableError: an argument cannot be pickled. Nothing was sent.
            SupervisionError: the process has died.
            MeshStopped: the object has been torn down.
        """
        async_, timeout = call_options(self._method, kwargs, self._remote._timeout)
        self._remote._check_alive()
        if not self._remote._single:
            self._method.check_returns("call one object, or return a list instead")
        self._method.check(args, kwargs)
        results = self._remote._results
        results.drop_abandoned()
        future = self._adverb(self._name, args, kwargs)
        if async_:
            future._connection.flush()
            return results.awaited(future, timeout)
        return results.wait(future, timeout)

    def __repr__(self) -> str:
        return f"<remote {self._method.signature or self._method.title} on {self._remote!r}>"


class _Remote:
    """The common base of remote objects and functions."""

    def __init__(
        self, name: str, title: str, mesh: ActorMeshProxy, end: Callable[[], object], timeout: float | None
    ) -> None:
        self.name = name
        """Name of the object's meshes, also in `Job.meshes`."""
        self.mesh = mesh
        """The actors that hold the object."""
        self._title = title
        self._end = end  # ends the object, and its processes
        self._single = len(mesh) == 1
        self._results = Results(mesh)
        self._timeout = timeout
        self._gone = False

    def _check_alive(self) -> None:
        if self._gone:
            raise WrongState(f"{self!r} has been torn down: put it up again with .to(job)", code="mesh_stopped")

    def teardown(self) -> None:
        """End the object's processes, waiting 15 s at most; if `to` has deployed pods for it, remove these.

        A second call does nothing.

        Raises:
            DeploymentFailed: the pods cannot be removed.
        """
        if self._gone:
            return
        self._gone = True
        self._end()

    def __enter__(self: O) -> O:
        self._check_alive()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.teardown()

    def __reduce__(self) -> Any:
        # For arguments of the same session; the mesh refuses to be pickled otherwise.
        self._check_alive()
        return HostedObject, (self.mesh, self._single)

    def __repr__(self) -> str:
        gone = ", torn down" if self._gone else ""
        return f"<{type(self).__name__} {self.name!r} of {self._title} {self.mesh.extent}{gone}>"


class RemoteObject(_Remote):
    """An object of an ordinary class, or several objects, in the cluster; made by `loom.cls(…).to(…)`.

    Its attributes are the class's public methods. A ``with`` block tears the object down at its end.
    """

    def __init__(
        self,
        cls: type | None,
        methods: Mapping[str, Method] | None,
        timeout: float | None,
        name: str,
        mesh: ActorMeshProxy,
        end: Callable[[], object],
    ) -> None:
        super().__init__(name, name if cls is None else cls.__name__, mesh, end, timeout)
        self._class = cls  # None, with `_methods`, if this program does not have the class
        self._methods = methods

    def __getattr__(self, name: str) -> RemoteMethod:
        if name.startswith("__") or "_methods" not in self.__dict__:
            raise AttributeError(name)
        method = Method(f"{self._title}.{name}") if self._methods is None else self._methods.get(name)
        if method is None or name.startswith("_"):
            exists = self._class is not None and any(name in vars(base) for base in self._class.__mro__)
            no_method(self._title, name, self._methods, exists)
        remote = RemoteMethod(self.mesh.run, name, method, self)
        self.__dict__[name] = remote  # later look-ups do not come here
        return remote

    def __dir__(self) -> Sequence[str]:
        return sorted({*super().__dir__(), *(self._methods or ())})


class RemoteFunction(_Remote):
    """A function in one or several processes of the cluster; made by `loom.fn(…).to(…)`."""

    def __init__(
        self,
        function: Method,
        timeout: float | None,
        name: str,
        mesh: ActorMeshProxy,
        end: Callable[[], object],
    ) -> None:
        super().__init__(name, function.title, mesh, end, timeout)
        self._call = RemoteMethod(mesh.run, None, function, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function. Arguments and errors are those of `RemoteMethod`."""
        return self._call(*args, **kwargs)


def make(remote: O) -> O:
    """Make the objects and wait for them; tear everything down if one fails."""
    try:
        remote.mesh.make.call().get(remote._timeout)
    except BaseException as error:
        try:
            remote.teardown()
        except LoomError as failed:
            error.__context__ = failed
        if not isinstance(error, ActorError):
            raise
        raised = own_error(error)
    else:
        return remote
    raise raised  # here, since an `except` would take the place of its context
