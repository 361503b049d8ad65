"""`PodSupervisor`, which keeps the processes of a pod running: worker, gateway, session host, in one the weaver.

The pods choose the weaver's pod by a rule that each applies to what it sees, without a vote. A pod that has the
weaver keeps it, because its state is there. If no pod has it, the first gets it: the one with the lowest ordinal,
or without ordinals the lowest address. Pods with different views may briefly choose differently. Once they see
each other, the first pod keeps its weaver and the other ends its own.

Everybody finds the weaver by the name of the pods' headless service, which leads to all of them: only the weaver's
pod listens on its port, and whoever connects goes on to the next address.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from loom.errors import PodUnreachable
from loom.process import tasks
from loom.process.backoff import Backoff
from loom.process.child import Child, ProcessState, python
from loom.process.listen import bracketed
from loom.process.state_file import replace_file
from loom.token_file import TokenFile
from loom_gateway.pod.settings_and_peers import KeptPod, PodSettings, ask_pod
from loom_gateway.settings import GatewaySettings, SessionHostSettings
from loom_gateway.workers.sources import resolve_pods

BACKOFF = Backoff(0.5, 15.0)  # seconds before the process is started again
STEADY = 15.0  # seconds after which an end of the process does not count as early, so that the pauses start anew
GRACE = 28.0  # seconds that the process has to end: more than a worker gives what trains, less than a pod has


def who_listens(port: int) -> psutil.Process | None:
    """Return the process that listens on a port of this pod; None if none is visible."""
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.pid and connection.laddr:
            with contextlib.suppress(psutil.Error):
                if connection.laddr.port == port:
                    return psutil.Process(connection.pid)
    return None


class SupervisedProcess:
    """A process of a module of Loom that is kept running. If one already listens on the port, it is taken over.

    Args:
        name: the process's name in messages.
        module: the module to run.
        port: the port on which the process listens.
        arguments: returns the module's command line arguments, for each start.
        outlives: whether it goes on when this process ends, and the next supervisor finds it.
    """

    def __init__(
        self,
        name: str,
        module: str,
        port: int,
        arguments: Callable[[], Sequence[str]],
        outlives: bool = True,
    ) -> None:
        self._outlives = outlives
        self.name = name
        self._module = module
        self._port = port
        self._arguments = arguments
        self._task: asyncio.Task[None] | None = None  # restarts the process until `end`
        self._child: Child | None = None  # the process, if this supervisor started it
        self._found: psutil.Process | None = None  # the process, if it was running before
        self._changed = asyncio.Event()  # set on each change of the state
        self.starts = 0  # by this supervisor
        self.state = ProcessState.STARTING
        self.problem = "it is starting"  # why the process does not run; empty if it does

    @property
    def listening(self) -> bool:
        return self.state is ProcessState.LISTENING

    @property
    def kept(self) -> bool:
        return self._task is not None

    @property
    def pid(self) -> int | None:
        if self._child is not None and not self._child.ended.done():
            return self._child.pid
        return None if self._found is None else self._found.pid

    def keep(self) -> None:
        """Start the process, and start it again whenever it ends."""
        if self._task is None:
            self._task = tasks.keep_running("keep a process", self._run, BACKOFF, STEADY)

    async def restart(self) -> None:
        """End the process, and wait until it has been started again."""
        before = self.starts
        await self._end(signal.SIGTERM, self._found)
        while self.kept and self.starts == before:
            self._changed.clear()
            await self._changed.wait()

    async def end(self, number: int = signal.SIGTERM) -> None:
        """Stop the process and its children."""
        task, self._task = self._task, None
        found = self._found  # read before the cancelled task resets it
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        await self._end(number, found)
        self._become(ProcessState.ENDED)

    async def _run(self) -> None:
        found = await asyncio.to_thread(who_listens, self._port)
        if found is None:
            await self._run_once()
        elif self._module in _command(found).split():  # started by an earlier supervisor, or by the image
            await self._watch(found)
        else:
            problem = f"port {self._port} is in use, by process {found.pid} ({_command(found)}): end it"
            self._fail(ProcessState.PORT_TAKEN, problem)

    async def _watch(self, found: psutil.Process) -> None:
        logger.info("the %s runs already, as process %d", self.name, found.pid)
        self._found, self.problem = found, ""
        self._become(ProcessState.LISTENING)
        try:
            with contextlib.suppress(psutil.NoSuchProcess):
                await asyncio.to_thread(found.wait)
        finally:
            self._found = None
            self._become(ProcessState.ENDED)
        self.problem = f"process {found.pid} has ended"

    async def _run_once(self) -> None:
        loop = asyncio.get_running_loop()
        child = self._child = Child(
            self.name,
            python(self._module, *self._arguments()),
            parent_pipe=not self._outlives,
            on_line=lambda line: logger.info("%s: %s", self.name, line),
        )
        logger.info("the %s is process %d", self.name, child.pid)
        self.starts += 1
        self.problem = "it is starting"
        self._become(ProcessState.STARTING)
        child.ready.add_done_callback(lambda ready: loop.call_soon_threadsafe(self._take_ready, ready))
        code = await asyncio.shield(asyncio.wrap_future(child.ended))
        last = child.output.rpartition("\n")[2] or "it said nothing"
        self._fail(ProcessState.ENDED, f"it ended with code {code}: {last.removeprefix('error: ')}")

    def _take_ready(self, ready: Future[Mapping[str, Any]]) -> None:
        if ready.exception() is None:
            self.problem = ""
            self._become(ProcessState.LISTENING)

    def _become(self, state: ProcessState) -> None:
        self.state = state
        self._changed.set()

    def _fail(self, state: ProcessState, problem: str) -> None:
        logger.warning("the %s does not run: %s", self.name, problem)
        self.problem = problem
        self._become(state)

    async def _end(self, number: int, found: psutil.Process | None) -> None:
        if self._child is not None and not self._child.ended.done():
            self._child.signal(number)
            await asyncio.to_thread(self._child.end, GRACE)
        elif found is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.send_signal(number)
                try:
                    await asyncio.to_thread(found.wait, GRACE)
                except psutil.TimeoutExpired:
                    found.kill()


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return "unknown"


logger = logging.getLogger(__name__)

LOOK_EVERY = 2.0  # seconds between two looks at the other pods once the weaver's pod is known

LOOK_SOON = 0.3

LONGEST_STATE_FOLDER = 70
"""The maximum bytes of its path. A socket's path on Linux has at most 107, and the sockets' names need the rest."""

ANSWER_TIMEOUT = 2.0  # seconds that another pod has to report its state

ASKED_AT_ONCE = 32

PATIENCE = 30.0  # seconds to wait for a missing pod that might come first, before another pod gets the weaver


def choose(
    ranked: Sequence[str], expected: int, answering: Collection[str], holders: Collection[str], *, patient: bool
) -> str | None:
    """Return the address of the pod that gets the weaver; None if it is too early to say.

    Args:
        ranked: addresses of the known pods, in order of preference.
        expected: the number of pods that there should be.
        answering: addresses of the pods whose keepers answer.
        holders: addresses of the pods that report to have the weaver.
        patient: whether to wait for pods that are missing or silent, because one of them might come first.
    """
    held = [address for address in ranked if address in holders]
    if held:
        return held[0]
    if patient and (len(ranked) < expected or ranked[0] not in answering):
        return None
    return next((address for address in ranked if address in answering), None)


class PodSupervisor:
    """The keeper of one pod. The next one finds the settings and the processes' state in ``folder``."""

    def __init__(self, settings: PodSettings, folder: Path, address: str, name: str) -> None:
        self.settings = settings
        self.address = address
        self.name = name
        self._folder = folder
        self._tokens, self._host_key, self._weaver_secret = (
            folder / file for file in ("tokens.json", "host-key", "weaver-secret")
        )
        self._asking = ThreadPoolExecutor(ASKED_AT_ONCE, "peers")
        self._worker_address = f"tcp://{bracketed(address)}:{settings.monarch_port}"
        self.worker = SupervisedProcess(
            "worker",
            "loom_gateway.workers.host",
            settings.monarch_port,
            lambda: ["--address", self._worker_address],
        )
        self.session_host = SupervisedProcess(
            "session host",
            "loom_gateway.session_hosts",
            settings.session_host_port,
            lambda: self._session_host().arguments(),
        )
        self.gateway = SupervisedProcess(
            "gateway", "loom_gateway", settings.gateway_port, lambda: self._gateway().arguments()
        )
        # Without the keeper, other pods could not tell that it is there, and would start another one.
        self.weaver = SupervisedProcess(
            "weaver", "loom.weaver", settings.weaver_port, self._weaver_arguments, outlives=False
        )
        self._chosen: str | None = None  # the address of the weaver's pod
        self._problem = "it has not looked for the other pods yet" if settings.serves else ""
        self._without_weaver_since = time.monotonic()
        self._looking: asyncio.Task[None] | None = None

    @property
    def _serving(self) -> list[SupervisedProcess]:
        """What runs in this pod besides the worker."""
        return [one for one in (self.session_host, self.gateway, self.weaver) if one.kept]

    def start(self) -> None:
        """Start the worker and, in a pod of the first mesh, what serves clients."""
        self.worker.keep()
        if self.settings.serves:
            self._write_secrets()
            self.session_host.keep()
            self.gateway.keep()
            self._looking = tasks.keep_running("look for pods", self._look_on)

    async def close(self, *, end_sessions: bool) -> None:
        """End the pod's processes, and its sessions too unless they are left for its successor."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])
        if end_sessions:
            await self.session_host.end(signal.SIGINT)
        # at the same time: what trains on the worker saves its state, within the pod's grace
        await asyncio.gather(self.worker.end(), *(one.end() for one in self._serving))

    async def configure(self, settings: PodSettings) -> None:
        """Take new settings. The worker goes on unchanged. What serves is started again, and sessions live on."""
        before, self.settings = self.settings, settings
        settings.write(self._folder)
        if settings == before:
            return
        self._without_weaver_since = time.monotonic()
        self._write_secrets()
        await asyncio.gather(*(one.restart() for one in self._serving))

    def state(self) -> KeptPod:
        """Return the state of this pod, in the form that its keeper reports."""
        serving = self._serving
        problems = [f"its {one.name}: {one.problem}" for one in serving if one.problem]
        return {
            "name": self.name,
            "address": self.address,
            "mesh": self.settings.mesh,
            "gateway": self.settings.serves,
            "gateway_listening": all(one.listening for one in serving),
            "gateway_starts": max((one.starts for one in serving if not one.listening), default=0),
            "gateway_problem": "; ".join(filter(None, [*problems, self._problem])),
            "weaver": self.weaver.kept,
            "worker": {
                "address": self._worker_address,
                "pid": self.worker.pid,
                "starts": self.worker.starts,
                "listening": self.worker.listening,
                "state": self.worker.state.value,
                "problem": self.worker.problem,
            },
            "versions": _versions(),
        }

    async def states(self) -> list[KeptPod]:
        """Return the states of this pod and of every other one that answers, by mesh, the first mesh first."""
        found: list[KeptPod] = []
        for mesh in self.settings.meshes:
            with contextlib.suppress(OSError):
                pods = await asyncio.to_thread(resolve_pods, mesh.service)
                states = await self._states_of(pod.address for pod in pods)
                states[self.address] = self.state()
                found += [states[pod.address] for pod in pods if pod.address in states]
        if not any(state["address"] == self.address for state in found):
            found.append(self.state())  # DNS does not know this pod yet
        return found

    async def _states_of(self, pods: Iterable[str]) -> dict[str, KeptPod]:
        """Return the states of those other pods that answer, by address."""
        states: dict[str, KeptPod] = {}

        def ask(address: str) -> None:
            with contextlib.suppress(PodUnreachable):
                states[address] = ask_pod(self.settings, address, "GET", "/pod", timeout=ANSWER_TIMEOUT)

        loop = asyncio.get_running_loop()
        others = [address for address in pods if address != self.address]
        await asyncio.gather(*(loop.run_in_executor(self._asking, ask, address) for address in others))
        return states

    async def _look_on(self) -> None:
        while True:
            try:
                await self._look()
            except OSError as error:
                self._problem = str(error)
                logger.warning("%s", error)
            await asyncio.sleep(LOOK_SOON if self._chosen is None else LOOK_EVERY)

    async def _look(self) -> None:
        """Find the pod that has the weaver, and start this pod's or end it."""
        first = self.settings.first
        try:
            pods = await asyncio.to_thread(resolve_pods, first.service)
        except OSError as error:
            self._problem = f"{first.service} is not known to the DNS: {error}"
            return
        known = [pod.address for pod in pods]
        states = await self._states_of(known)
        holders = {address for address, state in states.items() if state.get("weaver")}
        answering = set(states)
        if self.weaver.kept:
            holders.add(self.address)
            if self.address not in known:  # DNS may omit a pod that is briefly not ready, but its weaver lives on
                known.append(self.address)
        if self.address in known:
            answering.add(self.address)
        now = time.monotonic()
        if holders:
            self._without_weaver_since = now
        patient = now - self._without_weaver_since < PATIENCE
        self._chosen = choose(known, first.pods, answering, holders, patient=patient)
        self._problem = "" if self._chosen else f"no pod of {first.service} has the weaver yet"
        await self._take_part()

    async def _take_part(self) -> None:
        if self._chosen == self.address and not self.weaver.kept:
            logger.info("this pod has the weaver")
            self.weaver.keep()
        elif self._chosen not in (None, self.address) and self.weaver.kept:
            logger.warning("pod %s, which comes first, has a weaver too: this one ends", self._chosen)
            await self.weaver.end()

    def _write_secrets(self) -> None:
        """Write the files of secrets, which all pods of the job derive from what they share."""
        TokenFile(self._tokens).accept("job", "admin", self.settings.token_sha256)
        for path in (self._host_key, self._weaver_secret):
            shared = self.settings.token_sha256.encode()
            replace_file(path, hmac.new(shared, f"loom pod {path.name}".encode(), hashlib.sha256).hexdigest())

    def _session_host(self) -> SessionHostSettings:
        settings = self.settings
        return SessionHostSettings(
            listen=f"{bracketed(self.address)}:{settings.session_host_port}",
            host_key=self._host_key,
            weaver=settings.weaver,
            weaver_secret=self._weaver_secret,
            workers=[
                f"{mesh.mesh}=dns://{mesh.service}:{settings.monarch_port}?count={mesh.pods}"
                for mesh in settings.meshes
            ],
            state_dir=str(_short(self._folder / "sessions")),
            session_linger=settings.session_linger,
            session_max=settings.session_max,
        )

    def _gateway(self) -> GatewaySettings:
        settings = self.settings
        first = settings.first
        return GatewaySettings(
            host="0.0.0.0",
            port=settings.gateway_port,
            gateways_listen=f"{bracketed(self.address)}:{settings.gateways_port}",
            tokens=self._tokens,
            session_host=[f"dns://{first.service}:{settings.session_host_port}?count={first.pods}"],
            host_key=self._host_key,
            weaver=settings.weaver,
            weaver_secret=self._weaver_secret,
            state_dir=str(_short(self._folder / "gateway")),
        )

    def _weaver_arguments(self) -> Sequence[str]:
        settings = self.settings
        return [
            *("--state", str(_short(self._folder / "weaver"))),
            *("--listen", f"{bracketed(self.address)}:{settings.weaver_port}"),
            *("--advertise", settings.first.service),
            *("--secret-file", str(self._weaver_secret)),
            "--exit-with-parent",
        ]


def _short(folder: Path) -> Path:
    """Return the folder, or a stand-in in the temporary folder if its path is too long for sockets."""
    if len(os.fsencode(folder)) <= LONGEST_STATE_FOLDER:
        return folder
    name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    return Path(tempfile.gettempdir(), f"loom-{os.geteuid()}-{name}")


def _versions() -> dict[str, str]:
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for distribution in ("monarch-loom", "torchmonarch", "torch"):
        with contextlib.suppress(PackageNotFoundError):
            found[distribution] = version(distribution)
    return found
