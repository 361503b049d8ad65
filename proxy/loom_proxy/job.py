"""A session, as a program holds it."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from loom.errors import WaitTimeout
from loom.shape import Shape
from loom.wire.bodies import FlushLogs, RefreshHosts
from loom.wire.messages import Kind
from loom_proxy.code_sync.folders import SyncedFolders, SyncResult
from loom_proxy.display.notebook import job_html
from loom_proxy.kubernetes.port_forward import PortForward
from loom_proxy.logs import LogLine, LogReceiver
from loom_proxy.mesh.base import MeshProxy, WholeMesh
from loom_proxy.mesh.procs import HostMeshProxy
from loom_proxy.mesh.returned import find_meshes, proxy_of
from loom_proxy.ports.channel import Channel, open_jobs
from loom_proxy.ports.port import Port
from loom_proxy.ports.receiver import PortReceiver, Ports
from loom_proxy.runs import KnownRuns, RunHandle
from loom_proxy.session.connection import Connection
from loom_proxy.session.events import Event, FailureCallbacks, MeshFailure
from loom_proxy.session.unclaimed import UndeliveredCall, undelivered_calls
from loom_proxy.weaver.client import WeaverProxy

CLOSE_TIMEOUT = 15.0
"""Seconds that `Job.close` waits for the meshes to stop."""

LAST_LINES = 5.0
"""Seconds that lines that have come are waited for to be printed when the program leaves."""


class JobState:
    """What a job has: a host mesh for each name. As the state of Monarch's ``JobTrait``.

    Args:
        meshes: the host meshes by name.
    """

    workers: HostMeshProxy
    """All hosts, unless the gateway was given names."""

    def __init__(self, meshes: Mapping[str, HostMeshProxy]) -> None:
        self.__dict__.update(meshes)

    def __getattr__(self, name: str) -> HostMeshProxy:
        raise AttributeError(f"this job has no host mesh {name!r}; it has {', '.join(vars(self))}")

    def __repr__(self) -> str:
        return f"<JobState {', '.join(f'{name}: {mesh.extent}' for name, mesh in vars(self).items())}>"


class Job:
    """An open session: the worker hosts, and what runs on them.

    Leaving it as a context manager closes it.
    """

    def __init__(self, connection: Connection, token: str | None, attached: bool) -> None:
        self._connection = connection
        calls = self._calls = connection.calls
        calls.make_proxy = functools.partial(proxy_of, calls)
        self._failures = FailureCallbacks(connection.events)
        self._attached = attached
        self._on_close = contextlib.ExitStack()
        """What ends with the session."""
        self._closed = False
        self._reached_by = ""
        self._synced = SyncedFolders(calls)
        calls.encoder.by_name = self._synced.by_name
        self._logs = LogReceiver()
        self._runs = KnownRuns(calls)
        self._ports = Ports(calls)
        open_jobs.add(self)
        connection.on(Kind.LOG, self._logs.take)
        connection.on(Kind.RUN_STATE, self._runs.take)
        connection.on(Kind.PORT_MESSAGE, self._ports.take)
        connection.on(Kind.PORT_MESSAGES, self._ports.take)
        connection.on_end(self._ports.end)
        welcome = connection.welcome
        self.token = token
        """The token, for other programs that are to join."""
        self.session: str = welcome.session
        """Name of the session, for `connect` to attach to."""
        self.hosts = HostMeshProxy(WholeMesh(calls, 0, "hosts", Shape.row_major({"hosts": len(welcome.workers)})))
        """The worker hosts, with the one dimension ``hosts``."""
        self.versions: Mapping[str, str] = dict(welcome.versions)
        """Versions of python, monarch-loom, torchmonarch and torch in the cluster."""
        connection.start()

    @property
    def url(self) -> str:
        """URL of the gateway, for other programs that are to join."""
        return self._reached_by or self._gateway_url

    @property
    def _gateway_url(self) -> str:
        return self._connection.url.removesuffix("/ws/v1")

    @property
    def transport(self) -> str:
        """What the connection to the gateway runs over: ``"websocket"`` or ``"http"``."""
        return self._connection.transport_kind

    @property
    def progress(self) -> bool | None:
        """Whether a wait of more than a second is shown on stderr or in the notebook.

        None, as it is at first: where ``LOOM_PROGRESS`` is 1, or is not set and stderr is a terminal or there is a
        notebook.
        """
        return self._calls.progress

    @progress.setter
    def progress(self, show: bool | None) -> None:
        self._calls.progress = show

    @functools.cached_property
    def weaver(self) -> WeaverProxy:
        """The gateway's weaver: every replica and device, those of other sessions too, and how to change them.

        It is asked through this session, and by REST when the session is over or this client only watches it.
        """
        ca = self._connection.address.ca
        transport = "http" if self.transport == "http" else "auto"
        session = None if self._calls.watching else self._calls
        return WeaverProxy(self._gateway_url, self.token, ca, transport, session)

    def state(self) -> JobState:
        """The hosts, under the names that the gateway was given; all as ``workers`` where it was given none."""
        named = self._connection.welcome.meshes
        if len(named) < 2:
            return JobState(dict.fromkeys(named or ("workers",), self.hosts))
        return JobState(
            {name: self.hosts.slice(hosts=slice(min(numbers), max(numbers) + 1)) for name, numbers in named.items()}
        )

    @property
    def meshes(self) -> Mapping[str, MeshProxy]:
        """The proc and actor meshes of the session by name; of two with one name, the newer."""
        if self._attached:
            self._attached = False
            find_meshes(self._calls)
        return dict(self._calls.meshes)

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

    @property
    def print_logs(self) -> bool:
        """Whether lines that come from the cluster are printed here; True unless set otherwise.

        They go to ``sys.stdout`` and ``sys.stderr`` as ``[trainers/hosts=0,gpus=1] line``.
        """
        return self._logs.printing

    @print_logs.setter
    def print_logs(self, wanted: bool) -> None:
        self._logs.printing = wanted

    def on_log(self, callback: Callable[[LogLine], object]) -> Callable[[], None]:
        """Have a function called with each line that comes from the cluster; see `ProcMeshProxy.logging_option`.

        Callbacks run on the thread that prints the lines; what they raise is logged.

        Returns:
            A function that removes the callback.
        """
        return self._logs.add_callback(callback)

    def flush_logs(self, timeout: float = 10.0) -> None:
        """Wait until what the processes have printed until now has been printed here.

        Lines that a process has in a buffer of its own (``print`` has none) do not count as printed.

        Raises:
            WaitTimeout: ``timeout`` seconds were not enough.
        """
        until = time.monotonic() + timeout
        self._calls.ask(FlushLogs()).get(timeout)
        if not self._logs.drain(max(0.0, until - time.monotonic())):
            raise WaitTimeout(f"the lines that came were not printed within {timeout:g} s")

    def run(
        self, fn: Callable[..., Any], *args: Any, detach: bool = False, name: str | None = None, **kwargs: Any
    ) -> Any:
        """Run a function, or a coroutine function, in the driver, beside the meshes; return its result.

        Proxies among the arguments arrive as the real Monarch meshes, so that a loop of many calls makes no
        round trip to the laptop. What the function prints (Python's ``print``, `sys.stdout`, `sys.stderr` and
        `logging`; its threads and tasks too) is printed here as it comes. It runs in a thread of its own, a
        coroutine on an event loop of its own, and goes on whatever becomes of this connection: Ctrl-C ends the
        wait, not the run.

        Args:
            detach: return a `RunHandle` at once instead of waiting and printing.
            name: of the run, for `runs`; default: the function's name and a number.

        Raises:
            Exception: what the function raised, as its own class; the ``__cause__`` has the remote traceback. What
                Monarch raised comes as Loom's class of that name (`ActorError`, `SupervisionError`).
            OperationFailed: the function raised something that cannot be rebuilt here, or no `Exception`.
            OperationCancelled: another program cancelled it.
            RunNameTaken: a run of that name is still going.
            UnpicklableError: the function, an argument or the result cannot be pickled.
        """
        runs = self._runs
        return (runs.start if detach else runs.call)(fn, args, kwargs, name)

    def runs(self) -> Mapping[str, RunHandle]:
        """The session's runs by name, those of earlier connections too, oldest first.

        These are all that are going and, of those that have ended, the last 256; a run whose result was returned by
        `run` is not among them. Of two with one name it is the one that is going, else the newer.
        """
        return self._runs.listed()

    def undelivered(self) -> list[UndeliveredCall]:
        """Calls of earlier clients of this session whose answers none of them has received, oldest first.

        Such a call may still be going. The driver keeps its answer, unless more than 256 MiB of them come together.
        An answer that had just arrived when its program ended may be among them.
        """
        return undelivered_calls(self._calls)

    def refresh_hosts(self) -> list[int]:
        """Use again the worker hosts that were gone and have come back on the same address.

        What is spawned on them from now on works. What ran on them before stays gone, and so do meshes that have a
        part there. Event ``host_back`` tells of each. A host that does not come back costs up to three seconds, one
        that accepts connections and does not answer fifteen.

        Returns:
            The indexes in the dimension ``hosts`` of those that have come back.
        """
        back: list[int] = self._calls.ask(RefreshHosts()).get()
        return back

    def channel(self, once: bool = False) -> tuple[Port[Any], PortReceiver[Any]]:
        """Open a port for this session: what is sent to it comes to this program. See `loom.Channel.open`.

        Args:
            once: it takes one message only.
        """
        return Channel[Any].open(once, job=self)

    def sync(
        self,
        path: str | os.PathLike[str],
        *,
        name: str | None = None,
        exclude: Sequence[str] = (),
        progress: bool | None = None,
    ) -> SyncResult:
        """Ship a project folder to every host, for code that has to be imported by name.

        What is spawned afterwards has the folder first on ``sys.path``, and so has the driver; what was spawned
        before keeps the state of then. Of several folders the one synced last comes first. Folders inside that are
        on ``sys.path`` here, such as ``src``, are there, too; a folder that is a package itself is imported by its
        name. Classes and functions of modules in it travel by reference from now on; without a sync, and for
        meshes spawned before it, they travel by value. Only contents that the cluster lacks are sent.

        Left out are ``.git``, ``__pycache__``, virtual environments and what ``.gitignore`` files say. Links that
        stay inside are kept.

        Args:
            path: the folder.
            name: tells the folders of a session apart; default the folder's own name.
            exclude: patterns as in a ``.gitignore``, above all others; ``!pattern`` ships what is ignored.
            progress: whether to show how far it is; None where `Job.progress` would.

        Raises:
            NotAFolder: ``path`` is none.
            UnreadableFile: something in it cannot be read.
            UnsafeLink: a link leads outside of it, or in circles.
            FileChanged: a file was changed while it was being read.
            TooLarge: it has more than ``LOOM_SYNC_LIMIT`` bytes (4 GiB) or 100,000 files.
            SyncNameTaken: another folder was synced under the name.
            SyncFailed: a host cannot take it. Whatever is raised, no mesh gets any of it.
        """
        return self._synced.sync(path, name, exclude, progress)

    def _reach_by(self, forward: PortForward, url: str) -> None:
        """Note that the gateway is reached by a forwarded port, which ends with the connection."""
        self._reached_by = url
        self._connection.unanswered = forward.renew

        def close() -> None:
            self._connection.ended.wait()
            forward.close()

        threading.Thread(target=close, name=f"close {url}", daemon=True).start()

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """End the session: its meshes are stopped on every host. Waits ``timeout`` seconds at most.

        A job that only watches leaves it as it is.
        """
        if self._calls.watching:
            self.detach()
        if self._closed:
            return
        self._closed = True
        try:
            self._connection.end_session(timeout)
            self._logs.drain(LAST_LINES)
        finally:
            self._on_close.close()

    def detach(self) -> None:
        """Leave the session running, for `connect` with ``session=`` to attach to later."""
        if not self._closed:
            self._closed = True
            self._connection.leave(f"this program has detached from session {self.session!r}")
            self._logs.drain(LAST_LINES)

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

    def _repr_html_(self) -> str:
        meshes = {name: (repr(mesh), mesh._panel()) for name, mesh in dict(self._calls.meshes).items()}
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        details = f"{'closed' if self.closed else 'open'}, at {self.url}; {versions}"
        return job_html(f"Job {self.session}", details, self.hosts._panel(), meshes)

    def __repr__(self) -> str:
        closed = ", closed" if self.closed else ""
        return f"<Job {self.session!r} at {self.url} over {self.transport}, {self.hosts.extent}{closed}>"
