"""A session, as a program holds it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple

from loom.errors import InvalidAddress
from loom.signatures import CallSignature
from loom.wire.messages import Kind
from loom_proxy.connection import Connection
from loom_proxy.events import Event, FailureCallbacks, MeshFailure
from loom_proxy.meshes import ActorMeshProxy, HostMeshProxy, MeshProxy, ProcMeshProxy, WholeMesh, proxy_of
from loom_proxy.shape import Shape

__all__ = ["Job", "JobState", "connect"]

CLOSE_TIMEOUT = 15.0
"""Seconds that `Job.close` waits for the meshes to stop."""


def connect(
    url: str | None = None, token: str | None = None, session: str | None = None, *, timeout: float = 30.0
) -> Job:
    """Open a session on a gateway, or attach to a living one.

    Args:
        url: the gateway, such as ``ws://host:8470`` or ``wss://host/prefix``; default ``LOOM_URL``.
        token: default ``LOOM_TOKEN``.
        session: name of a living session to attach to; None opens a new one.
        timeout: seconds to wait for the gateway to accept the connection.

    Raises:
        InvalidAddress: there is no URL, or it is not one.
        GatewayUnreachable: nobody answers there.
        NotAGateway: what answers is not a Loom gateway.
        AuthenticationError: the token is missing or wrong.
        UnknownSession: no living session has the name.
        SessionInUse: the session has a client already.
        WorkerUnreachable: the gateway's workers do not answer.
        ProtocolMismatch: the gateway's major version of the protocol is another.
    """
    url = url or os.environ.get("LOOM_URL")
    if not url:
        raise InvalidAddress("no gateway to connect to: pass url=… or set LOOM_URL (`loom up` prints both)")
    token = token or os.environ.get("LOOM_TOKEN")
    return Job(Connection.open(url, token, session, timeout), token, attached=session is not None)


class JobState(NamedTuple):
    """What a job has. As the state of Monarch's ``JobTrait``."""

    workers: HostMeshProxy


class Job:
    """An open session: the worker hosts, and what runs on them.

    Leaving it as a context manager closes it.
    """

    def __init__(self, connection: Connection, token: str | None, attached: bool) -> None:
        self._connection = connection
        connection.make_proxy = functools.partial(proxy_of, connection)
        self._failures = FailureCallbacks(connection.events)
        self._attached = attached
        self._close_callbacks: list[Callable[[], None]] = []
        self._closed = False
        welcome = connection.welcome
        self.token = token
        """The token, for other programs that are to join."""
        self.session: str = welcome.session
        """Name of the session, for `connect` to attach to."""
        self.hosts = HostMeshProxy(
            WholeMesh(connection, 0, "hosts", Shape.row_major({"hosts": len(welcome.workers)}))
        )
        """The worker hosts, with the one dimension ``hosts``."""
        self.versions: Mapping[str, str] = dict(welcome.versions)
        """Versions of python, monarch-loom, torchmonarch and torch in the cluster."""

    @property
    def url(self) -> str:
        """URL of the gateway, for other programs that are to join."""
        return self._connection.url.removesuffix("/ws/v1")

    def state(self) -> JobState:
        """The hosts, under the name that Monarch's jobs give them."""
        return JobState(self.hosts)

    @property
    def meshes(self) -> Mapping[str, MeshProxy]:
        """The proc and actor meshes of the session by name; of two with one name, the newer."""
        if self._attached:
            self._attached = False
            self._find_meshes()
        return dict(self._connection.meshes)

    def _find_meshes(self) -> None:
        """Make proxies of the meshes that an earlier client of this session made."""
        connection = self._connection
        for ident, kind, name, shape, class_name, described, stopped in connection.ask(Kind.MESHES, ()).get():
            if stopped or name in connection.meshes:
                continue
            whole = WholeMesh(connection, ident, name, Shape(*shape))
            if kind == "procs":
                connection.meshes[name] = ProcMeshProxy(whole)
            elif kind == "actors":
                signatures = {
                    label: CallSignature(f"{class_name}.{label}", parameters)
                    for label, parameters in described.items()
                }
                connection.meshes[name] = ActorMeshProxy(whole, class_name=class_name, signatures=signatures)

    def events(self, timeout: float | None = None) -> Iterator[Event]:
        """Each event of the session since this connection began, then new ones as they come.

        Args:
            timeout: stop after this many seconds without an event; None goes on until the session ends.
        """
        return self._connection.events.read(timeout)

    def on_failure(self, callback: Callable[[MeshFailure], object]) -> Callable[[], None]:
        """Have a function called with each failure that nothing in the cluster handles.

        As Monarch's ``unhandled_fault_hook``, but nothing ends: the session lives on. The first callback is also
        told of the failures since this connection began. Callbacks run one after the other on a thread of their
        own, where they may call actors and wait; what they raise is logged.

        Returns:
            A function that removes the callback.
        """
        return self._failures.add(callback)

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function, or a coroutine function, in the driver, beside the meshes; return its result.

        Proxies among the arguments arrive as the real Monarch meshes, so that a loop of many calls makes no
        round trip to the laptop.

        Raises:
            OperationFailed: the function raised; the cause has its traceback.
            UnpicklableError: the function, an argument or the result cannot be pickled.
        """
        connection = self._connection
        connection.check_open()
        name = getattr(fn, "__name__", repr(fn))
        parts = connection.encoder.dumps((fn, args, kwargs), f"{name} (function, args, kwargs)")
        return connection.ask(Kind.RUN, (), parts).get()

    # -- the end --------------------------------------------------------------------------------------------

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """End the session: its meshes are stopped on every host. Waits ``timeout`` seconds at most."""
        if self._closed:
            return
        self._closed = True
        try:
            self._connection.end_session(timeout)
        finally:
            self._run_close_callbacks()

    def detach(self) -> None:
        """Leave the session running, for `connect` with ``session=`` to attach to later."""
        if not self._closed:
            self._closed = True
            self._connection.leave(f"this program has detached from session {self.session!r}")

    def _on_close(self, callback: Callable[[], None]) -> None:
        """Have a function called once the session has been closed."""
        self._close_callbacks.append(callback)

    def _run_close_callbacks(self) -> None:
        callbacks, self._close_callbacks = self._close_callbacks, []
        for callback in callbacks:
            callback()

    @property
    def closed(self) -> bool:
        """Whether this connection to the session is over."""
        return self._closed or self._connection.ended.is_set()

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Job {self.session!r} at {self.url}, {self.hosts.extent}{', closed' if self.closed else ''}>"
