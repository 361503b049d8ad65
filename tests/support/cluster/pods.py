"""A pod: its containers as processes, restarted when they exit, and what Kubernetes would say about it."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import re
import signal
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.cluster.network import Network, remove_namespace
from tests.support.cluster.probes import passes
from tests.support.cluster.sandbox import Sandbox

__all__ = ["Container", "Pod"]

FIRST_BACKOFF, LONGEST_BACKOFF = 0.5, 5.0
"""Seconds before a container that exited is started again: doubled each time. A kubelet has 10 s and 5 min."""

PROBE_PERIOD = 0.3
"""Seconds between readiness probes, whatever longer period the manifest has."""

GRACE = 3.0
"""Seconds from SIGTERM to SIGKILL where the manifest says nothing. Kubernetes has 30 s."""

LONGEST_START = 20.0
"""Seconds for which a pod that starts may keep others from starting."""

OWN_PLACES = ("/tmp", "/dev/shm", "/home/loom")
"""Where every pod of this machine has a folder of its own anyhow."""

Environment = Callable[["Pod", Mapping[str, Any]], dict[str, str]]


@dataclass
class Container:
    """One container of a pod."""

    spec: dict[str, Any]
    process: asyncio.subprocess.Process | None = None
    ready: bool = False
    restarts: int = 0
    waiting: str = "ContainerCreating"
    """Why it does not run; empty if it does."""
    message: str = ""
    exit_code: int | None = None
    """Of the last time that it ended; negative: the signal."""

    @property
    def init(self) -> int | None:
        """The process id, on this machine, of the container's first process."""
        if self.process is None or self.process.returncode is not None:
            return None
        with contextlib.suppress(OSError):
            pid = self.process.pid
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            return int(children[0]) if children else None
        return None

    def kill(self) -> None:
        """Kill all its processes: the kernel does when the first is killed, which its parent then reaps."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.init or self.process.pid, signal.SIGKILL)

    def state(self) -> dict[str, Any]:
        """As in a pod's ``status.containerStatuses``."""
        if self.waiting:
            return {"waiting": {"reason": self.waiting, "message": self.message}}
        return {"running": {}}

    def to_json(self) -> dict[str, Any]:
        last = {} if self.exit_code is None else {"terminated": {"exitCode": self.exit_code, "reason": "Error"}}
        return {
            "name": self.spec["name"],
            "image": self.spec.get("image", ""),
            "ready": self.ready,
            "restartCount": self.restarts,
            "state": self.state(),
            "lastState": last,
        }


@dataclass
class Pod:
    """A pod that runs on this machine.

    Args:
        changed: called whenever its readiness changes.
        environment: the variables of a container, from its manifest.
        secret: the content of a Secret, given its name.
        missing_images: images that cannot be pulled.
        turn: limits how many pods start at once. A pod has its turn until it is ready, but not for ever.
    """

    network: Network
    folder: Path
    namespace: str
    name: str
    address: str
    owner: str
    template: str
    labels: dict[str, str]
    annotations: dict[str, str]
    spec: dict[str, Any]
    subdomain: str
    changed: Callable[[], None]
    environment: Environment
    secret: Callable[[Pod, str], dict[str, bytes]]
    missing_images: frozenset[str]
    turn: asyncio.Semaphore | None = None
    uid: str = field(default_factory=lambda: str(uuid.uuid4()))
    created: str = field(default_factory=lambda: datetime.datetime.now(datetime.timezone.utc).isoformat())
    networked: bool = False
    """Whether its network namespace is there."""
    ending: bool = False
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has ended."""

    def __post_init__(self) -> None:
        self.containers = [Container(spec) for spec in self.spec["containers"]]
        self.sandbox = Sandbox(self.network, self.folder, self.host, self.name, self.address, self.namespace)
        self._task: asyncio.Task[None] | None = None
        self._its_turn = False

    @property
    def host(self) -> str:
        """The name of its network namespace within the cluster's."""
        return f"{self.namespace}.{self.name}"

    @property
    def log(self) -> Path:
        """Where the output of its containers goes. It outlives the pod."""
        return self.folder / "logs" / f"{self.namespace}.{self.name}.log"

    @property
    def ready(self) -> bool:
        return not self.ending and all(container.ready for container in self.containers)

    @property
    def phase(self) -> str:
        return "Running" if any(container.init for container in self.containers) else "Pending"

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"pod {self.name}")

    async def _run(self) -> None:
        await asyncio.to_thread(self._make)
        self.networked = True
        self.changed()
        if self.turn is not None:
            await self.turn.acquire()
            self._its_turn = True
            asyncio.get_running_loop().call_later(LONGEST_START, self._end_turn)
        for spec in self.spec.get("initContainers", []):
            await self._run_to_success(spec)
        await asyncio.gather(*(self._keep(container) for container in self.containers))

    def _end_turn(self) -> None:
        if self._its_turn and self.turn is not None:
            self._its_turn = False
            self.turn.release()

    def _make(self) -> None:
        self.network.add(self.host, self.address)
        self.sandbox.prepare()

    async def _run_to_success(self, spec: dict[str, Any]) -> None:
        container = Container(spec)
        while True:
            if await self._run_once(container) == 0:
                return
            await asyncio.sleep(FIRST_BACKOFF)

    async def _keep(self, container: Container) -> None:
        if container.spec.get("image") in self.missing_images:
            container.waiting = "ImagePullBackOff"
            container.message = f'Back-off pulling image "{container.spec["image"]}"'
            return
        backoff = FIRST_BACKOFF
        while True:
            probing = asyncio.create_task(self._probe(container))
            try:
                container.exit_code = await self._run_once(container)
            finally:
                probing.cancel()
            self._set_ready(container, False)
            container.waiting = "CrashLoopBackOff"
            container.message = f"restarting after {backoff:g} s; exit code {container.exit_code}"
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, LONGEST_BACKOFF)
            container.restarts += 1

    async def _run_once(self, container: Container) -> int:
        spec = container.spec
        environment = self.environment(self, spec)
        command = [expanded(word, environment) for word in (*spec.get("command", []), *spec.get("args", []))]
        command = [*_rights(spec), *command]
        volumes = await asyncio.to_thread(self._volumes, spec)
        self.log.parent.mkdir(exist_ok=True)
        with self.log.open("ab") as log:
            container.process = await asyncio.create_subprocess_exec(
                *self.sandbox.command(command, spec.get("workingDir"), volumes),
                env=self.sandbox.environment(environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        container.waiting = ""
        return await container.process.wait()

    def _volumes(self, spec: Mapping[str, Any]) -> dict[str, Path]:
        """The volumes of a container, by where it has them: those of the pod's own folders, and Secrets."""
        volumes = {volume["name"]: volume for volume in self.spec.get("volumes") or []}
        found = {}
        for mount in spec.get("volumeMounts") or []:
            volume = volumes.get(mount["name"], {})
            if mount["mountPath"] in OWN_PLACES or not volume.keys() & {"emptyDir", "secret"}:
                continue
            folder = self.sandbox.home.parent / "volumes" / mount["name"]
            if not folder.exists():
                folder.mkdir(parents=True)
                folder.chmod(0o777)  # as a kubelet makes it
            if "secret" in volume:
                self._write_secret(folder, volume["secret"])
            found[mount["mountPath"]] = folder
        return found

    def _write_secret(self, folder: Path, source: Mapping[str, Any]) -> None:
        folder.chmod(0o755)
        for name, content in self.secret(self, source["secretName"]).items():
            file = folder / name
            file.write_bytes(content)
            file.chmod(source.get("defaultMode", 0o644))

    async def _probe(self, container: Container) -> None:
        probe = container.spec.get("readinessProbe")
        while True:
            ready = container.init is not None and (probe is None or await passes(probe, self, container))
            self._set_ready(container, ready)
            await asyncio.sleep(PROBE_PERIOD)

    def _set_ready(self, container: Container, ready: bool) -> None:
        if ready != container.ready:
            container.ready = ready
            self.changed()
        if self.ready:
            self._end_turn()

    async def end(self, grace: float | None = None) -> None:
        """End it: SIGTERM, and SIGKILL ``grace`` seconds later; with 0, SIGKILL at once."""
        self.ending = True
        self.changed()
        if self._task is not None and not any(container.process for container in self.containers):
            # What makes its network namespace runs in a thread, and cannot be cancelled.
            await asyncio.wait([self._task], timeout=0.5)
        if grace is None:
            grace = float(self.spec.get("terminationGracePeriodSeconds", GRACE))
        if self._task is not None:
            self._task.cancel()
        self._end_turn()
        processes = [container.process for container in self.containers if container.process]
        if grace > 0:
            for container in self.containers:
                if (init := container.init) is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(init, signal.SIGTERM)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.gather(*(process.wait() for process in processes)), grace)
        for container in self.containers:
            container.kill()
        for process in processes:
            await process.wait()
        self.lost.set()
        await asyncio.to_thread(remove_namespace, self.network.name(self.host))
        await asyncio.to_thread(self.sandbox.remove)

    async def execute(self, command: list[str], container: Container | None = None) -> tuple[int, str]:
        """Run a command in a container: its exit code, and what it printed."""
        container = container or self.containers[0]
        if container.init is None:
            return 1, f"container {container.spec['name']} of pod {self.name} does not run"
        process = await asyncio.create_subprocess_exec(
            *("setpriv", "--pdeathsig", "KILL", "nsenter", "--target", str(container.init), "--all"),
            *(f"--wdns={container.spec.get('workingDir') or self.sandbox.home}", "--", *command),
            env=self.sandbox.environment(self.environment(self, container.spec)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        return process.returncode or 0, output.decode(errors="replace")

    def to_json(self) -> dict[str, Any]:
        """The pod as the API of Kubernetes has it, as far as anyone here reads it."""
        metadata = {
            "name": self.name,
            "namespace": self.namespace,
            "uid": self.uid,
            "labels": self.labels,
            "annotations": self.annotations,
            "creationTimestamp": self.created,
        }
        if self.ending:
            metadata["deletionTimestamp"] = datetime.datetime.now(datetime.timezone.utc).isoformat()
        status = {
            "phase": self.phase,
            "podIP": self.address,
            "startTime": self.created,
            "conditions": [
                {"type": "PodScheduled", "status": "True"},
                {"type": "ContainersReady", "status": str(self.ready)},
                {"type": "Ready", "status": str(self.ready)},
            ],
            "containerStatuses": [container.to_json() for container in self.containers],
        }
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": self.spec, "status": status}


def expanded(word: str, environment: Mapping[str, str]) -> str:
    """A word of a container's command, with ``$(NAME)`` replaced as Kubernetes does: unknown names stay."""
    return re.sub(r"\$\((\w+)\)", lambda found: environment.get(found[1], found[0]), word)


def _rights(spec: Mapping[str, Any]) -> list[str]:
    """The beginning of a command with the rights of a container of root's that drops all but a few capabilities."""
    capabilities = (spec.get("securityContext") or {}).get("capabilities") or {}
    if capabilities.get("drop") != ["ALL"] or not capabilities.get("add"):
        return []
    kept = ",".join(f"+{name.lower()}" for name in capabilities["add"])
    return ["setpriv", "--no-new-privs", "--bounding-set", f"-all,{kept}"]
