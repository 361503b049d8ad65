"""What runs on each node of an allocation: a worker, and on the first node the gateway, too.

The batch script starts `main` once a node, by ``srun``. A worker or a gateway that ends is started again.
Before the time limit the script writes a notice, also when it gets SIGUSR1: then the worker lets training
processes save their state, the gateway takes no new sessions, and the node ends when its worker has. So it is when
the step gets SIGUSR1, and with SIGTERM, which comes from ``scancel``, a requeue and a preemption, where Slurm
follows processes by cgroups and signals only this one. With ``proctrack/linuxproc`` every process of the step gets
the signal, and actors end by it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from types import FrameType

from loom.errors import InvalidAddress, LoomError, MissingDependency
from loom.process.backoff import Backoff
from loom.process.child import Child, python
from loom.process.error_exit import report
from loom.process.listen import address_towards, bracketed, free_ports, is_loopback
from loom.process.orphans import adopt_orphans
from loom.process.state_file import replace_file
from loom.process.threads import keep_going
from loom.slurm.folder import (
    DRAINING,
    GATEWAY,
    GROWN,
    SOON,
    SPEC,
    STATE,
    TOKEN,
    WORKERS,
    GatewayFacts,
    PublishedWorker,
    WorkerKey,
    merged,
    notice_file,
    published,
    worker_file,
)
from loom.slurm.spec import AllocationSpec, MeshSpec
from loom.terminal_text import fit_line

logger = logging.getLogger("loom.slurm")

WORKERS_TIMEOUT = 120.0
"""Seconds that the gateway's node waits for the workers of the others before it goes on without them."""

WHEELS_TIMEOUT = 1200.0
"""The same, where each node may make an environment of its own."""

REACH_TIMEOUT = 5.0
"""Seconds that a worker's port has to accept a connection from the gateway's node."""

LOOK_EVERY = 0.2, 2.0
"""Seconds between two looks for workers: until all have come, and afterwards."""

READY_TIMEOUT = 120.0
"""Seconds that a worker or a gateway has until it listens."""

MOST_FAILURES = 15
"""Starts in a row that may fail before a node gives up, within about two minutes: a shared file system may hold the
lock of a gateway for long whose node was lost."""

BACKOFF = Backoff(0.5, 10.0)
"""Seconds between starts."""

LEADER_EVERY = 20.0
"""Seconds between two connections by which a node learns whether the gateway's node is there."""

DRAINS_EVERY = 20.0
"""Seconds between two questions of a job to Slurm which of its nodes are drained."""

SLURM_TIMEOUT = 60.0
"""Seconds that a command of Slurm has."""

MARGIN = 5.0
"""Seconds of the notice that are left when the worker's grace is over."""

_OF_STEP = re.compile(
    "SLURM_(?:PROCID|LOCALID|NODEID|STEP|STEPID|STEP_.*|NTASKS|NPROCS|TASKS_PER_NODE|NTASKS_PER_.*|TASK_PID|GTIDS|"
    "SRUN_.*|LAUNCH_NODE_IPADDR|CPU_BIND.*|DISTRIBUTION|KILL_BAD_EXIT|NO_KILL|WAIT|OVERLAP|UMASK|TOPOLOGY_.*)"
    "|PMI_.*|PMIX_.*|PMI2_.*|SRUN_DEBUG"
)
"""Variables of the step, in which programs that sessions start would take themselves for ranks of it."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run this node's part of an allocation until SIGTERM, and exit."""
    parser = argparse.ArgumentParser(prog="python -m loom.slurm.node", description=__doc__)
    parser.add_argument("--grown", action="store_true", help="bring workers to a gateway of another job")
    parser.add_argument("--first", type=int, default=0, help="the number of the step's first node in the job")
    parser.add_argument("folder", type=Path, help="the allocation's folder")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        rank = options.first + int(os.environ.get("SLURM_NODEID", "0"))
        node = AllocationNode(options.folder, os.environ, rank, leads=rank == 0 and not options.grown)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, node.on_signal)
        for number in (signal.SIGHUP, signal.SIGUSR2):
            signal.signal(number, lambda *_: None)  # it has no meaning here; if ignored, children would ignore it
        adopt_orphans()
        node.run()
    except LoomError as error:
        sys.exit(report(error))


class AllocationNode:
    """A node of an allocation.

    Args:
        folder: the allocation's.
        given: the variables that Slurm has set.
        rank: the number of the node in the job.
        leads: whether the gateway is here.
    """

    def __init__(self, folder: Path, given: Mapping[str, str], rank: int, *, leads: bool) -> None:
        self._folder = folder
        self._spec = AllocationSpec.from_json((folder / SPEC).read_text())
        self._leads, self._rank = leads, rank
        meshes = self._spec.meshes
        self._count = self._spec.node_count if meshes else int(given.get("SLURM_NNODES", "1"))
        self._job = int(given["SLURM_JOB_ID"])
        self._restart = int(given.get("SLURM_RESTART_COUNT", "0"))
        self._notice = folder / notice_file(self._job, self._restart)
        self._name = given.get("SLURMD_NODENAME") or socket.gethostname()
        self._key = WorkerKey(self._job, self._restart, rank, self._name)
        self._nodes = folder / f"nodes-{self._job}"
        self.address = own_address(self._name, self._nodes, given)
        self._environment = {name: value for name, value in given.items() if not _OF_STEP.fullmatch(name)}
        self._environment.pop("LOOM_TOKEN", None)  # of another gateway
        self._grace = max(self._spec.notice - MARGIN, 0.0)
        self._ending = threading.Event()
        self._failure: LoomError | None = None
        self._woken, self._wake = os.pipe()
        self._gateway_port = 0
        self._parts: list[SupervisedPart] = []

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """End soon. In a handler of a signal, where no lock may be taken."""
        os.write(self._wake, b"\n")

    def run(self) -> None:
        """Run until a signal comes, or the gateway cannot run.

        Raises:
            LoomError: the gateway cannot run, or this node's worker.
        """
        logger.info("node %s at %s: job %d, restart %d", self._name, self.address, self._job, self._restart)
        threading.Thread(target=keep_going, args=("heed signals", self._heed), daemon=True).start()
        if self._leads:
            self._remove_stale()
            gateway = SupervisedPart("the gateway", self._gateway_command, self._environment, self._fail)
            self._parts.append(gateway)
        if not self._spec.gateway_only or not self._leads:
            worker = SupervisedPart(
                "the worker", self._worker_command, self._environment, self._fail, ready=self._publish
            )
            self._parts.append(worker)
        if self._rank == 0:
            threading.Thread(target=keep_going, args=("watch drains", self._watch_drains), daemon=True).start()
        try:
            for part in self._parts:
                part.start()
            if self._leads:
                self._lead(self._parts[0])
            else:
                watch = "watch the gateway's node", self._watch_leader
                threading.Thread(target=keep_going, args=watch, daemon=True).start()
                while not self._ends_soon(LOOK_EVERY[1]):
                    pass
        finally:
            self._end()
        if self._failure is not None:
            raise self._failure

    def _remove_stale(self) -> None:
        """Remove what was left by a gateway before this one, and by workers that Slurm has lost."""
        for name in (GATEWAY, *self._worker_files([])):
            (self._folder / name).unlink(missing_ok=True)
        here = set(merged(published(self._folder), self._job, self._restart, _ids(self._folder / GROWN)))
        for worker in published(self._folder):
            if worker not in here or (worker.key.job != self._job and why_unreachable(worker)):
                (self._folder / WORKERS / str(worker.key)).unlink(missing_ok=True)

    def _heed(self) -> None:
        os.read(self._woken, 1)
        logger.info("a signal: what trains here saves its state, within %g s and what Slurm leaves it", self._grace)
        self._ending.set()

    def _ends_soon(self, seconds: float) -> bool:
        """Wait for so many seconds. Return whether this node ends, by a signal or because its job ends soon."""
        if self._ending.wait(seconds):
            return True
        with contextlib.suppress(OSError):
            # A file that is there is read anew on shared file systems, while one that was missing may long seem so.
            if why := self._notice.read_text().strip():
                logger.info(
                    "the job ends%s: what trains here has %g s to save its state",
                    " soon" if why == SOON else f", {why}",
                    self._grace,
                )
                return True
        return False

    def _fail(self, error: LoomError) -> None:
        """Give up: a part of this node cannot run."""
        self._failure = error
        if self._leads:
            self._notice.write_text(f"the gateway cannot run: {error}\n")
        self._ending.set()

    def _watch_leader(self) -> None:
        """Requeue the job when Slurm has taken the gateway's node away from it, and with it the batch script.

        Slurm itself does not, since the other nodes of a job with ``--no-kill`` go on.
        """
        while not self._ending.wait(LEADER_EVERY):
            self._start_again_without_leader()

    def _start_again_without_leader(self) -> None:
        leaders = [one for one in published(self._folder) if one.key[:3] == (self._job, self._restart, 0)]
        if not leaders or why_unreachable(leaders[0]) is None:
            return
        node, job = leaders[0].key.node, str(self._job)
        here = _slurm("squeue", "--noheader", "--jobs", job, "--nodelist", node, "--format=%i")
        if here is None or here.strip():  # slurmctld does not answer, or the node still is one of the job
            return
        logger.error("the node %s of the gateway is lost: the job starts again", node)
        if _slurm("scontrol", "requeue", job) is None:
            _slurm("scancel", job)  # nothing would end it before its time limit

    def _watch_drains(self) -> None:
        """Keep a file for each node of the job that Slurm drains: trainings leave these nodes."""
        (self._folder / DRAINING).mkdir(exist_ok=True)
        nodes = _addresses(self._nodes)
        while nodes:
            states = _slurm("sinfo", "--noheader", "--Node", f"--nodes={','.join(nodes)}", "--format=%N %T")
            if states is not None:
                drained = {node for node, state in map(str.split, states.splitlines()) if state.startswith("drain")}
                for node in nodes:
                    file = self._draining_file(node)
                    if node not in drained:
                        file.unlink(missing_ok=True)
                    elif not file.exists():
                        logger.info("Slurm drains %s: trainings leave it if they have another place", node)
                        replace_file(file, "Slurm drains its node\n")
            if self._ending.wait(DRAINS_EVERY):
                return

    def _draining_file(self, node: str) -> Path:
        return self._folder / DRAINING / f"{self._job}.{node}"

    def _lead(self, gateway: SupervisedPart) -> None:
        """Keep the list of workers, and publish the gateway when it listens and the workers have come."""
        expected = 0 if self._spec.gateway_only else self._count
        until = time.monotonic() + (WHEELS_TIMEOUT if self._spec.wheelhouse else WORKERS_TIMEOUT)
        listed: list[PublishedWorker] | None = None
        while not self._ends_soon(LOOK_EVERY[listed is not None]):
            grown = _ids(self._folder / GROWN)
            found = merged(published(self._folder), self._job, self._restart, grown)
            own = sum(worker.key.job == self._job for worker in found)
            complete = own >= expected or time.monotonic() > until
            if complete and found != listed:
                self._list(found)
                if listed is None:
                    publish = functools.partial(self._publish_gateway, gateway, found)
                    threading.Thread(target=keep_going, args=("publish the gateway", publish), daemon=True).start()
                listed = found

    def _list(self, workers: Sequence[PublishedWorker]) -> None:
        for name, listed in self._worker_files(workers).items():
            replace_file(self._folder / name, "".join(f"{worker.address}\n" for worker in listed))
        logger.info("workers: %s", ", ".join(str(worker.key) for worker in workers) or "none")

    def _worker_files(self, workers: Iterable[PublishedWorker]) -> dict[str, list[PublishedWorker]]:
        """Return the names of the files of workers, one for each mesh in their order, and which are in each."""
        meshes = self._spec.meshes or {"": MeshSpec(self._count)}
        files: dict[str, list[PublishedWorker]] = {worker_file(mesh): [] for mesh in meshes}
        mesh_of = [worker_file(name) for name, mesh in meshes.items() for _ in range(mesh.nodes)]
        for worker in workers:
            # A mesh that is not the last one does not grow.
            files[mesh_of[worker.key.rank if worker.key.job == self._job else -1]].append(worker)
        return files

    def _publish_gateway(self, gateway: SupervisedPart, workers: Sequence[PublishedWorker]) -> None:
        missing = [f"{worker.key.node}: {why}" for worker in workers if (why := why_unreachable(worker))]
        here = {worker.key.rank for worker in workers if worker.key.job == self._job}
        if not self._spec.gateway_only:
            absent = [str(rank) for rank in range(self._count) if rank not in here]
            missing += [f"no worker came up on node number {rank} of the job" for rank in absent]
        for text in missing:
            logger.error("%s", text)
        gateway.listens.wait()
        if not self._ending.is_set():
            facts = GatewayFacts(
                self.address, self._gateway_port, self._job, self._restart, self._name, tuple(missing)
            )
            replace_file(self._folder / GATEWAY, facts.to_json())
            logger.info("the gateway listens on %s:%d", self.address, self._gateway_port)

    def _gateway_command(self) -> list[str]:
        # The same port at each start in this job, so that clients find it again.
        self._gateway_port = self._gateway_port or free_ports(1, self.address)[0]
        folder = self._folder
        sources = [f"{mesh}=file:{folder / worker_file(mesh)}" for mesh in self._spec.meshes]
        sources = sources or [f"file:{folder / worker_file()}"]
        return python(
            "loom_gateway",
            *(word for source in sources for word in ("--workers", source)),
            *("--host", self.address, "--port", str(self._gateway_port)),
            *("--weaver-listen", f"{bracketed(self.address)}:0"),
            *("--token-file", str(folder / TOKEN)),
            *("--state-dir", str(folder / STATE)),
            *(("--drain", f"{self._grace:g}") if self._grace else ()),
        )

    def _worker_command(self) -> list[str]:
        port = free_ports(1, self.address)[0]
        self._worker_address = f"tcp://{bracketed(self.address)}:{port}"
        address, grace = self._worker_address, f"{self._grace:g}"
        options = "--address", address, "--grace", grace, "--draining-file", str(self._draining_file(self._name))
        return python("loom_gateway.workers.host", *options, "--exit-with-parent")

    @property
    def _worker_file(self) -> Path:
        return self._folder / WORKERS / str(self._key)

    def _publish(self) -> None:
        replace_file(self._worker_file, f"{self._worker_address}\n")
        logger.info("the worker listens at %s", self._worker_address)

    def _end(self) -> None:
        """End the parts, the worker with its grace, and what they leave."""
        self._ending.set()
        until = time.monotonic() + self._grace + MARGIN
        for part in self._parts:
            part.ask_to_end()
        for part in reversed(self._parts):  # the gateway serves what the workers still do
            if part.name == "the gateway":
                part.ask_to_end()  # the second time ends its drain
            part.end(max(until - time.monotonic(), MARGIN / 2))
        if self._leads:
            (self._folder / GATEWAY).unlink(missing_ok=True)
        self._worker_file.unlink(missing_ok=True)
        _kill_descendants()


class SupervisedPart:
    """A child of a node, which is started again when it ends.

    Args:
        command: returns its command line, for each start anew.
        fail: called if it cannot run.
        ready: called whenever it listens.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[], list[str]],
        environment: Mapping[str, str],
        fail: Callable[[LoomError], object],
        ready: Callable[[], object] = lambda: None,
    ) -> None:
        self.name = name
        self.listens = threading.Event()
        """Set once it has listened."""
        self._command = command
        self._environment = environment
        self._fail = fail
        self._ready = ready
        self._ending = threading.Event()
        self._lock = threading.Lock()
        """Held while it is started, so that none starts after the end."""
        self._child: Child | None = None

    def start(self) -> None:
        """Start it, and keep it running."""
        threading.Thread(target=keep_going, args=(f"keep {self.name}", self._keep), daemon=True).start()

    def ask_to_end(self) -> None:
        """Send it SIGTERM, and do not start it again."""
        with self._lock:
            self._ending.set()
            if self._child is not None:
                self._child.ask_to_end()

    def end(self, grace: float) -> None:
        """Wait for its end, and kill it after so many seconds."""
        if self._child is not None:
            self._child.end(grace)

    def _keep(self) -> None:
        failures = 0
        while not self._ending.is_set():
            with self._lock:
                if self._ending.is_set():
                    return
                self._child = Child(self.name, self._command(), self._environment, on_line=self._log)
            try:
                self._child.ready.result(READY_TIMEOUT)
                failures = 0
                self._ready()
                self.listens.set()
                code = self._child.ended.result()
                problem = LoomError(f"{self.name} ended with exit code {code}")
            except FutureTimeout:
                self._child.end(0.0)
                problem = LoomError(f"{self.name} was not ready within {READY_TIMEOUT:g} s")
            except LoomError as error:
                problem = error
            if self._ending.is_set():
                return
            failures += 1
            logger.error("%s", problem)
            if failures >= MOST_FAILURES or isinstance(problem, MissingDependency):
                self._fail(problem)
                return
            self._ending.wait(BACKOFF.wait(failures - 1))

    def _log(self, line: str) -> None:
        print(fit_line(f"{self.name}: {line}"), file=sys.stderr, flush=True)  # noqa: T201 - this is the node's log


def own_address(node: str, listed: Path, given: Mapping[str, str]) -> str:
    """Return the address by which other nodes reach this one.

    It is that of the node in Slurm's configuration, or else on the route to the node that launched the step.

    Args:
        node: the name of this node.
        listed: a file with the name and the address of each node of the job, which the batch script wrote.
    """
    candidates = [_addresses(listed).get(node, node), node]
    for candidate in candidates:
        with contextlib.suppress(OSError):
            for family, _, _, _, place in socket.getaddrinfo(candidate, None, type=socket.SOCK_STREAM):
                address = str(place[0])
                # Debian gives a host's own name 127.0.1.1, which leads every other host to itself.
                if _is_own(family, address) and (is_loopback(candidate) or not is_loopback(address)):
                    return address
    if launcher := given.get("SLURM_LAUNCH_NODE_IPADDR"):
        with contextlib.suppress(OSError):
            return address_towards(launcher, 6817)
    raise InvalidAddress(
        f"the node {node} knows no address of its own that others could reach: {' and '.join(candidates)} name "
        "none on its interfaces. Is NodeAddr in slurm.conf an address of this network?"
    )


def _addresses(listed: Path) -> dict[str, str]:
    """Return the address of each node in a file that the batch script wrote; none without it."""
    with contextlib.suppress(OSError):
        found = (line.split(maxsplit=1) for line in listed.read_text().splitlines() if " " in line)
        return {node: address.strip() for node, address in found}
    return {}


def _is_own(family: int, address: str) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def why_unreachable(worker: PublishedWorker) -> str | None:
    """Return why a worker's port does not accept connections from here; None if it does."""
    try:
        socket.create_connection(worker.host_and_port, timeout=REACH_TIMEOUT).close()
    except OSError as error:
        return (
            f"its worker at {worker.address} cannot be reached from {socket.gethostname()}: "
            f"{error.strerror or error}. Let the nodes reach each other's ports from 16384 on"
        )
    return None


def _slurm(*command: str) -> str | None:
    """Run a command of Slurm's; return its output, None if it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=SLURM_TIMEOUT, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("%s: %s", command[0], getattr(error, "stderr", "") or error)
        return None


def _ids(path: Path) -> set[int]:
    with contextlib.suppress(OSError):
        return {int(line) for line in path.read_text().split() if line.isdecimal()}
    return set()


def _kill_descendants() -> None:
    import psutil

    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


if __name__ == "__main__":
    main()
