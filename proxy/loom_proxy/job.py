"""`Job`, an open session in a program's hands."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from loom.errors import LoomError, SessionRestarted, WaitTimeout
from loom.rest_client import ForwardedRoute, Gateway, Route, route_to, token_now
from loom.session_alive import SessionLife
from loom.shape import Shape
from loom.weaver.run_views import RunRecord
from loom.wings import Part
from loom.wire.bodies import AllHosts, FlushLogs, LivingHosts, RefreshHosts
from loom.wire.messages import Kind
from loom_proxy.code_sync.folders import SyncedFolders, SyncResult
from loom_proxy.debugger import Debugger
from loom_proxy.futures.timing import check_timeout
from loom_proxy.logs import LogLine, LogReceiver
from loom_proxy.mesh.base import MeshProxy, WholeMesh
from loom_proxy.mesh.procs import HostMeshProxy, find_meshes, proxy_of
from loom_proxy.notebook.html import Dashboard, job_html
from loom_proxy.notebook.live import Shown
from loom_proxy.notebook.live_runs import LiveRuns
from loom_proxy.port import Port
from loom_proxy.port_receiver import Channel, PortReceiver, Ports, open_jobs
from loom_proxy.runs import KnownRuns, RunHandle
from loom_proxy.session.calls import Calls
from loom_proxy.session.connection import Connection
from loom_proxy.session.events import Event, FailureCallbacks, FaultHook, MeshFailure
from loom_proxy.session.unclaimed import UndeliveredCall, unclaimed_calls
from loom_proxy.weaver.client import WeaverProxy

if TYPE_CHECKING:
    from loom.tensors.tensors import Tensors
    from loom_proxy.environment import JobEnvironment

logger = logging.getLogger(__name__)


class JobState:
    """The state of a job: a host mesh for each name. The counterpart of the state of Monarch's ``JobTrait``.

    Args:
        meshes: the host meshes by name.
    """

    workers: HostMeshProxy
    """All hosts, unless the gateway was given names for them."""

    def __init__(self, meshes: Mapping[str, HostMeshProxy]) -> None:
        self.__dict__.update(meshes)

    def __getattr__(self, name: str) -> HostMeshProxy:
        raise AttributeError(f"this job has no host mesh {name!r}; it has {', '.join(vars(self))}")

    def __repr__(self) -> str:
        return f"<JobState {', '.join(f'{name}: {mesh.extent}' for name, mesh in vars(self).items())}>"


CLOSE_TIMEOUT = 15.0  # seconds that `Job.close` waits for the meshes to stop
ASK_TIMEOUT = 2.0  # seconds that the driver has, when the program leaves, to tell until when the session lives
ATTACH_WITHIN = 60.0
"""Seconds in which a session has its next driver, for a job that is used after `SessionRestarted`."""

RUNS_SHOWN = 50
"""Runs of the user's among which a live cell looks for those of the session."""

LAST_LINES = 5.0  # seconds to print the received log lines when the program leaves


class Job(Shown):
    """An open session: the worker hosts, and the meshes and functions that run there.

    A ``with`` block on the job closes it at its end.

    When the driver dies and another one starts functions with restarts again, meshes and futures of before raise
    `SessionRestarted`. The job attaches to the next driver when it is next used; `close` does not use it, so that
    the functions go on.
    """

    def __init__(self, connection: Connection, attached: bool) -> None:
        self._failures = FailureCallbacks(connection.events)
        self._fault_hook = FaultHook()
        self._attached = attached
        self._on_close = contextlib.ExitStack()
        """Callbacks that end local helpers, such as a local cluster, with the session."""
        self._closed = False
        self._over = threading.Event()
        """Set when the job can attach to no further driver."""
        self._forward_closes: threading.Thread | None = None
        self._forward: ForwardedRoute | None = None
        self._anew = threading.Lock()
        calls = connection.calls
        self._synced = SyncedFolders(calls)
        logs = self._logs = LogReceiver(others=not connection.welcome.may_end)
        self._runs = KnownRuns(calls, lambda: logs.printing, lambda: self._calls)
        self.session: str = connection.welcome.session
        """Name of the session, for `connect` to attach to."""
        self._begin(connection)
        open_jobs.add(self)

    def _begin(self, connection: Connection) -> None:
        """Take up a connection to the session's driver."""
        calls, welcome = connection.calls, connection.welcome
        calls.make_proxy = functools.partial(proxy_of, calls)
        calls.encoder.by_name = self._synced.by_name
        self._ports = Ports(calls)
        connection.events.on_event = self._on_event
        connection.on(Kind.LOG, self._logs.receive)
        connection.on(Kind.RUN_STATE, self._runs.receive)
        connection.on(Kind.PORT_MESSAGE, self._ports.receive)
        connection.on(Kind.PORT_MESSAGES, self._ports.receive)
        connection.on_end(self._ports.end)
        connection.on_end(self._ended)
        connection.on_fork(self._ports.let_go)
        first = HostMeshProxy(WholeMesh(calls, 0, "hosts", Shape.row_major({"hosts": len(welcome.workers)})))
        self._first_hosts = self._hosts = first
        self._known_hosts = len(welcome.workers) + len(welcome.joined)
        self.versions: Mapping[str, str] = dict(welcome.versions)
        """Versions of python, monarch-loom, torchmonarch and torch in the cluster."""
        self._connection = connection
        self._failures.move_to(connection.events)
        connection.start()
        self._take_joined(calls)

    def _ended(self, error: LoomError) -> None:
        if not isinstance(error, SessionRestarted):
            self._over.set()

    @property
    def _calls(self) -> Calls:
        """The calls of the session's driver: after `SessionRestarted` of the next one, to which this attaches.

        Raises:
            LoomError: it cannot be attached to, as when another program has done so.
        """
        connection = self._connection
        if not isinstance(connection.calls.error, SessionRestarted) or self._closed or connection.forked:
            return connection.calls
        with self._anew:
            if self._connection is connection:
                made = connection.anew(ATTACH_WITHIN)
                logger.warning("%s", connection.calls.error)
                self._synced.move_to(made.calls)
                self._runs.move_to_next_driver()
                for of_driver in ("weaver", "debugger"):
                    self.__dict__.pop(of_driver, None)
                self._attached = True
                self._begin(made)
            return self._connection.calls

    @property
    def hosts(self) -> HostMeshProxy:
        """The worker hosts, with the one dimension ``hosts``. `refresh_hosts` adds those that have joined.

        `living_hosts` is without those that are gone.
        """
        _ = self._calls
        return self._hosts

    def _on_event(self, event: Event) -> None:
        if event.name == "host_joined":
            self._known_hosts = max(self._known_hosts, event.details["host"] + 1)
        elif event.name == "session_idle":
            seconds = event.details["seconds"]
            logger.warning(
                "nothing happens in session %s: it ends in %.0f s, unless it is used", self.session, seconds
            )
        self._fault_hook.handle(event)

    def _take_joined(self, calls: Calls) -> list[int]:
        """Let `hosts` have all hosts that have joined. Return the numbers of those that it did not have."""
        before, count = len(self._hosts), self._known_hosts
        if count > before and not calls.watching:
            shape = Shape.row_major({"hosts": count})
            whole = WholeMesh(calls, calls.send(AllHosts(count)), "hosts", shape)
            calls.states.share_hosts(whole.ident)
            self._hosts = HostMeshProxy(whole)
        return [*range(before, len(self._hosts))]

    @property
    def token(self) -> str | None:
        """The token, for other programs that join the session."""
        return token_now(self._connection.address.token)

    @property
    def url(self) -> str:
        """URL of the gateway, for other programs that join the session."""
        return route_to(self._route).name

    @property
    def _route(self) -> str | Route:
        return self._forward or self._connection.url.removesuffix("/ws/v1")

    @property
    def transport(self) -> str:
        """The transport of the connection to the gateway: ``"websocket"`` or ``"http"``."""
        return self._connection.transport_kind

    @property
    def progress(self) -> bool | None:
        """True if a wait of more than a second is shown on stderr or in the notebook.

        None, the default, shows it if ``LOOM_PROGRESS`` is 1; or if that is not set, and stderr is a terminal or
        this is a notebook.
        """
        return self._connection.calls.progress

    @progress.setter
    def progress(self, show: bool | None) -> None:
        self._connection.calls.progress = show

    @functools.cached_property
    def weaver(self) -> WeaverProxy:
        """The weaver: the user's replicas and devices, of all their sessions, and commands to them.

        In a session that another user shares, it is that user's weaver, limited to this session's replicas.

        Requests go through this session; or by REST, if the session is over, another user's, or only watched.
        """
        address, guest = self._connection.address, not self._connection.welcome.may_end
        transport = "http" if guest or self.transport == "http" else "auto"
        through, limit = None if guest or self._calls.watching else self._calls, self.session if guest else None
        # `connect` has decided about the URL, hence insecure=True.
        return WeaverProxy(self._route, address.token, address.ca, transport, through, True, in_session=limit)

    @functools.cached_property
    def debugger(self) -> Debugger:
        """The debugger of the session's actors, in which ``breakpoint()`` in an endpoint stops.

        A job in mode ``debug`` has it next to the client that drives. A watching job has none.
        """
        return Debugger(self._calls)

    def state(self) -> JobState:
        """Return the hosts by the names that the gateway was given; all as ``workers`` if it was given none."""
        hosts, named = self.hosts, self._connection.welcome.meshes
        if len(named) < 2:
            return JobState(dict.fromkeys(named or ("workers",), hosts))
        ends = {name: max(numbers) + 1 for name, numbers in named.items()}
        ends[list(named)[-1]] = len(hosts)  # the last one grows
        return JobState(
            {name: hosts.slice(hosts=slice(min(numbers), ends[name])) for name, numbers in named.items()}
        )

    @property
    def meshes(self) -> Mapping[str, MeshProxy]:
        """The proc and actor meshes of the session by name.

        Of several with one name, the newest that was not stopped has it. The others have their id behind it, such
        as ``trainers#3``.
        """
        calls = self._calls
        if self._attached:
            self._attached = False
            find_meshes(calls)
        return calls.meshes.by_name()

    def events(self, timeout: float | None = None) -> Iterator[Event]:
        """Yield each event of the session since this connection began, then new ones as they come.

        Args:
            timeout: stop after this many seconds without an event; None goes on until the session ends.
        """
        _ = self._calls
        return self._connection.events.read(timeout)

    def on_failure(self, callback: Callable[[MeshFailure], object]) -> Callable[[], None]:
        """Call a function with each failure that nothing in the cluster handles.

        Monarch's ``unhandled_fault_hook`` is similar, but here the session lives on. The first callback also gets
        the failures since this connection began. Callbacks run one after the other on a thread of their own, where
        they may call actors and wait; their exceptions are logged.

        Returns:
            A function that removes the callback.
        """
        return self._failures.add(callback)

    @property
    def print_logs(self) -> bool:
        """True if log lines from the cluster, and the output of `run`, are printed here; True unless set otherwise.

        The lines go to ``sys.stdout`` and ``sys.stderr`` as ``[trainers/hosts=0,gpus=1] line``.
        """
        return self._logs.printing

    @print_logs.setter
    def print_logs(self, wanted: bool) -> None:
        self._logs.printing = wanted

    def on_log(self, callback: Callable[[LogLine], object]) -> Callable[[], None]:
        """Call a function with each log line that comes from the cluster; see `ProcMeshProxy.logging_option`.

        Callbacks run on the thread that prints the lines; their exceptions are logged.

        Returns:
            A function that removes the callback.
        """
        return self._logs.add_callback(callback)

    def flush_logs(self, timeout: float = 10.0) -> None:
        """Wait until all lines that the processes have printed so far are printed here.

        Lines in a process's own buffer do not count as printed; ``print`` has no such buffer.

        Raises:
            WaitTimeout: ``timeout`` seconds were not enough.
        """
        timeout = check_timeout(timeout) or 0.0
        until = time.monotonic() + timeout
        self._calls.ask(FlushLogs()).get(timeout)
        if not self._logs.drain(max(0.0, until - time.monotonic())):
            raise WaitTimeout(f"the lines that came were not printed within {timeout:g} s")

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        detach: bool = False,
        name: str | None = None,
        restarts: int = 0,
        **kwargs: Any,
    ) -> Any:
        """Run a function, or a coroutine function, in the driver, next to the meshes; return its result.

        Proxies among the arguments arrive as the real Monarch meshes, so that a loop of many calls makes no
        round trip to the laptop. The function's output (of Python's ``print``, `sys.stdout`, `sys.stderr` and
        `logging`, also in its threads and tasks) is printed here as it comes, unless `print_logs` is off. The
        function runs in a thread of its own, a coroutine on an event loop of its own. It goes on if this connection
        is lost; Ctrl-C ends the wait, not the run.

        Args:
            detach: return a `RunHandle` at once instead of waiting and printing.
            name: name of the run, for `runs`; default: the function's name and a number.
            restarts: times that the function is started again after it has raised, or its driver has died. Before
                that, the meshes that it spawned are stopped, and lost hosts are waited for. It begins with the same
                arguments, of which `hosts` may be the only mesh, and goes on from what it has saved itself.

        Raises:
            Exception: the function's exception, as its own class; the remote traceback ends its chain of causes.
                Monarch's exceptions come as Loom's classes of the same names (`ActorError`, `SupervisionError`).
            OperationFailed: the function's exception cannot be rebuilt here, or is no `Exception`.
            OperationCancelled: another program cancelled the run.
            RunNameTaken: a run of that name is still going.
            SessionRestarted: the driver has died, and the function goes on with another one: `runs` has it.
            UnpicklableError: the function, an argument or the result cannot be pickled.
        """
        runs = self._runs
        return (runs.start if detach else runs.call)(fn, args, kwargs, name, restarts)

    def runs(self) -> Mapping[str, RunHandle]:
        """Return the session's runs by name, oldest first, also those of earlier connections.

        The driver keeps all runs that are going and the last 256 that have ended, except those whose result `run`
        has returned. If two have one name, this returns the one that is going, else the newer.
        """
        return self._runs.listed()

    def undelivered(self) -> list[UndeliveredCall]:
        """Return the calls of earlier clients whose results their programs have not read, oldest first.

        Such a call may still be going. Results that had arrived are among them until they were read, with `get`, in
        a coroutine or in a callback, or dropped, with the call's ``drop()``. A result that was read just before its
        program was killed may be among them, too. The driver keeps results within the gateway's
        ``--keep-results``; those that had been delivered go first.
        """
        return unclaimed_calls(self._calls)

    def tensors(self, name: str = "tensors", hosts: int = 1, gpus: int = 1) -> Tensors:
        """Return lazy tensors: torch in processes of their own, without torch here. See `loom.tensors`.

        If the session has processes of this name, from an earlier program, those are taken over; their tensors with
        a name are in ``named``.

        Args:
            hosts: on how many hosts, the first ones.
            gpus: how many processes on each.
        """
        of_job: Callable[..., Tensors] = Part.TENSORS_OF_JOB.load()
        return of_job(self, name, hosts, gpus)

    def refresh_hosts(self) -> list[int]:
        """Use lost worker hosts again that have come back on the same address, and hosts that have joined.

        New processes can be spawned on them. `hosts` has those that have joined, behind the others, from now on;
        meshes that were made before stay as they are. Processes that ran on a lost host before stay gone, and so do
        meshes with a part there. Each host causes an event ``host_back`` or ``host_joined``. A host that is still
        gone costs up to three seconds; one that accepts connections and does not answer, fifteen.

        Returns:
            The indexes, in the dimension ``hosts``, of the hosts that have come back or joined since the last call,
            also of those that the session has used again by itself.
        """
        calls = self._calls
        back: list[int] = calls.ask(RefreshHosts()).get()
        return sorted({*back, *self._take_joined(calls)})

    def living_hosts(self) -> HostMeshProxy:
        """Return a mesh of the hosts that are there now: without lost ones and, if others are left, drained ones.

        It has hosts that have joined, also without `refresh_hosts`, in the order of `hosts`, and its own indexes,
        from 0. It does not change later, and meshes that were made before go on: after an event ``host_joined``,
        ``host_back``, ``host_draining`` or ``host_lost``, ask for another mesh and spawn on that.

        Raises:
            SupervisionError: all hosts are lost.
            ProtocolMismatch: the driver is older than this version.
        """
        calls = self._calls
        ident = calls.next_id()
        hosts: list[int] = calls.ask(LivingHosts(), ident=ident).get()
        whole = WholeMesh(calls, ident, "hosts", Shape.row_major({"hosts": len(hosts)}))
        calls.states.number_hosts(ident, hosts)
        return HostMeshProxy(whole)

    def channel(self, once: bool = False) -> tuple[Port[Any], PortReceiver[Any]]:
        """Open a port of this session, whose messages come to this program. See `loom.Channel.open`.

        Args:
            once: the port takes one message only.
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

        Processes spawned afterwards, and the driver, have the folder first on ``sys.path``; earlier processes keep
        the earlier state. Of several folders the one synced last comes first. If a folder inside, such as ``src``,
        is on ``sys.path`` here, it is there, too. A folder that is a package itself is imported by its name.
        A module of the standard library's name, such as ``types.py``, hides nothing, and is not imported by name.

        Classes and functions of the folder's modules travel by reference from now on. Without a sync, and to meshes
        spawned before it, they travel by value. Only contents that the cluster lacks are sent.

        The sync leaves out ``.git``, ``__pycache__``, virtual environments and files that ``.gitignore`` files
        name. It keeps links that stay inside the folder.

        Args:
            path: the folder.
            name: the folder's name in the session; default its name in the file system.
            exclude: patterns in the language of a ``.gitignore``, which override all others; ``!pattern`` ships an
                ignored file.
            progress: whether to show the progress; None follows `Job.progress`.

        Raises:
            NotAFolder: ``path`` is no folder.
            UnreadableFile: a file in the folder cannot be read.
            UnsafeLink: a link leads outside of the folder, or in circles.
            FileChanged: a file was changed while it was being read.
            TooLarge: the folder has more than ``LOOM_SYNC_LIMIT`` bytes (4 GiB) or 100,000 files.
            SyncNameTaken: another folder was synced under the name.
            SyncFailed: a host cannot take the folder. After any error, no mesh has any of it.
        """
        return self._synced.sync(path, name, exclude, progress)

    def env(self, path: str | os.PathLike[str] = ".") -> JobEnvironment:
        """Make the environment of a project on every host, for processes that are spawned afterwards and for `run`.

        Its packages come behind synced folders, and before those installed there. A process keeps what it has
        imported: Monarch, and what that imports, are the cluster's. Equal lists are made once on a host, by uv;
        where that is missing, by ``python -m venv`` and pip from a ``requirements.txt``.

        Args:
            path: a folder with ``uv.lock`` and ``pyproject.toml``, or with ``requirements.txt``; or the file.

        Raises:
            NotAFolder: ``path`` is neither a folder nor a file.
            WrongArguments: it names no packages, or in a form that Loom does not bring, such as conda's.
            EnvironmentFailed: a host cannot make it. Processes are spawned as before.
            ProtocolMismatch: the cluster's Loom is too old.
        """
        from loom_proxy.environment import make_environment

        return make_environment(self._calls, self.hosts, self._runs, path)

    def share(self, user: str, scope: Literal["view", "operate", "drive"] = "view") -> None:
        """Let another user of the gateway reach this session, in place of what the user could do before.

        Args:
            user: the user's name, as `loom token list` shows it.
            scope: ``view`` lets the user list and watch the session and read its logs, ``operate`` also send
                commands, ``drive`` also attach to it and take it over, which is running code in it.

        Raises:
            ScopeError: the session is another user's, or the token is of a smaller scope.
            WrongArguments: there is no such scope, or the user is the session's own.
        """
        self._gateway().share_session(self.session, user, scope)

    def unshare(self, user: str) -> None:
        """Take back what `share` gave to a user. The user's connections to the session are closed.

        Raises:
            NotFound: the session is not shared with the user.
            ScopeError: the session is another user's.
        """
        self._gateway().unshare_session(self.session, user)

    def dashboard(self, view: bool = True) -> Dashboard:
        """Return the gateway's page, for a notebook and a browser. With ``view`` it may look only."""
        return Dashboard(self._gateway().page("view" if view else None, cookie=not view))

    def _gateway(self) -> Gateway:
        return Gateway(self._route, self._connection.address.token, ca=self._connection.address.ca, insecure=True)

    def _reach_by(self, forward: ForwardedRoute) -> None:
        """Note that a forwarded port leads to the gateway, and close that port when the connection is over."""
        self._forward = forward

        def renew() -> None:
            forward.renew()
            self._connection.move_to(forward.url)

        self._connection.unanswered = renew
        self._connection.gone = forward.gone

        def close() -> None:
            self._over.wait()
            forward.close(self._connection.calls.error)

        self._forward_closes = threading.Thread(target=close, name=f"close {forward.name}", daemon=True)
        self._forward_closes.start()

    def _end(self) -> None:
        """Let the job attach to no further driver, and the forwarded port be closed."""
        self._over.set()
        if self._forward_closes is not None:
            self._forward_closes.join(LAST_LINES)

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """End the session and stop its meshes on every host, waiting ``timeout`` seconds at most.

        A job that only watches, or whose session another user has shared, leaves the session as it is. So does a
        forked child of this process.
        """
        self._closed = self._closed or self._connection.forked
        if self._connection.calls.watching or not self._connection.welcome.may_end:
            self.detach()
        if self._closed:
            return
        self._closed = True
        try:
            self._connection.end_session(timeout)
            self._logs.drain(LAST_LINES)
        finally:
            self._end()
            self._on_close.close()

    def detach(self) -> SessionLife:
        """Leave the session running, for `connect` with ``session=`` to attach to later.

        Queued operations, such as large arguments, are sent before, as long as the connection moves.

        Returns:
            Until when the session lives, and because of what. Nothing of it is known if the driver does not answer
            at once, or if this job was closed before.
        """
        life = SessionLife()
        self._closed = self._closed or self._connection.forked
        if not self._closed:
            self._closed = True
            if self._connection.send_rest() and not self._connection.away:
                life = self._connection.calls.ask_life(ASK_TIMEOUT)
            self._connection.leave(f"this program has detached from session {self.session!r}")
            self._logs.drain(LAST_LINES)
            self._end()
        return life

    @property
    def closed(self) -> bool:
        """True if the job's connection to the session is over."""
        return self._closed or self._connection.ended.is_set()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _live(self) -> LiveRuns:
        def runs() -> list[RunRecord]:
            found = [one.info for one in self.weaver.runs(limit=RUNS_SHOWN) if one.session == self.session]
            return sorted(found, key=lambda run: run.state != "running")

        return LiveRuns(runs, self.weaver._ask, self._repr_html_, lambda: self.closed)

    def _repr_html_(self) -> str:
        meshes = {
            name: (repr(mesh), mesh._panel()) for name, mesh in self._connection.calls.meshes.by_name().items()
        }
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        details = f"{'closed' if self.closed else 'open'}, at {self.url}; {versions}"
        return job_html(f"Job {self.session}", details, self._hosts._panel(), meshes)

    def __repr__(self) -> str:
        closed = ", closed" if self.closed else ""
        return f"<Job {self.session!r} at {self.url} over {self.transport}, {self._hosts.extent}{closed}>"
