"""Objects of ordinary classes that live in the cluster and whose methods are called here like local ones.

A remote object is an actor mesh (`loom.remote_objects`) with one actor or many, in processes of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from loom.errors import ActorError, LoomError, WrongState
from loom.remote_objects import HostedObject, Method, no_method
from loom_proxy.futures.timing import check_timeout
from loom_proxy.mesh.actors import ActorMeshProxy
from loom_proxy.remote.results import Results, own_error

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
