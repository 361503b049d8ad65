"""A pod: its containers as processes, restarted when they exit, and what Kubernetes would say about it."""

from __future__ import annotations

import asyncio
import datetime
import re
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.cluster.kubelet.container import POLL, Container
from tests.support.cluster.kubelet.image import Image
from tests.support.cluster.kubelet.memory import MemoryGroup, can_limit, quantity
from tests.support.cluster.kubelet.probes import passes, verdicts
from tests.support.cluster.kubelet.rights import Rights
from tests.support.cluster.kubelet.sandbox import Sandbox
from tests.support.cluster.kubelet.volumes import Volumes
from tests.support.cluster.network import Network, remove_namespace

__all__ = ["Pod"]

FIRST_BACKOFF, LONGEST_BACKOFF = 0.5, 5.0
"""Seconds before a container that exited is started again: doubled each time. A kubelet has 10 s and 5 min."""

GRACE = 3.0
"""Seconds from SIGTERM to SIGKILL where the manifest says nothing. Kubernetes has 30 s."""

LONGEST_START = 20.0
"""Seconds for which a pod that starts may keep others from starting."""

SYNC = 1.0
"""Seconds between looks at a pod's storage, and at its Secrets. A kubelet has 10 s, and a minute."""

Environment = Callable[["Pod", Mapping[str, Any]], dict[str, str]]


@dataclass
class Pod:
    """A pod that runs on this machine.

    Args:
        changed: called whenever its readiness changes.
        environment: the variables of a container, from its manifest.
        secret: the content of a Secret, given its name; None if there is none.
        evicted: called when it uses more of the disk than it may.
        images: what those say that are known.
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
    secret: Callable[[Pod, str], dict[str, bytes] | None]
    evicted: Callable[[Pod], None]
    images: Mapping[str, Image]
    missing_images: frozenset[str]
    turn: asyncio.Semaphore | None = None
    uid: str = field(default_factory=lambda: str(uuid.uuid4()))
    created: str = field(default_factory=lambda: datetime.datetime.now(datetime.timezone.utc).isoformat())
    networked: bool = False
    """Whether its network namespace is there."""
    ending: bool = False
    ruled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its host has the rules of Services and policies."""
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has ended."""

    def __post_init__(self) -> None:
        self.containers = [Container(spec, self._memory(spec)) for spec in self.spec["containers"]]
        self.sandbox = Sandbox(self.network, self.folder, self.host, self.name, self.address, self.namespace)
        self.volumes = Volumes(
            self.spec, self.sandbox.own / "volumes", self.folder / "claims" / self.namespace,
            lambda name: self.secret(self, name),
        )  # fmt: skip
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
        await self.ruled.wait()
        if self.turn is not None:
            await self.turn.acquire()
            self._its_turn = True
            asyncio.get_running_loop().call_later(LONGEST_START, self._end_turn)
        for spec in self.spec.get("initContainers", []):
            await self._run_to_success(spec)
        await asyncio.gather(self._sync(), *(self._keep(container) for container in self.containers))

    def _end_turn(self) -> None:
        if self._its_turn and self.turn is not None:
            self._its_turn = False
            self.turn.release()

    def _make(self) -> None:
        self.network.add(self.host, self.address)
        self.sandbox.prepare()

    def _memory(self, spec: Mapping[str, Any]) -> MemoryGroup | None:
        limit = ((spec.get("resources") or {}).get("limits") or {}).get("memory")
        if limit is None or not can_limit():
            return None
        return MemoryGroup(f"{self.network.name(self.host)}.{spec['name']}", quantity(limit))

    async def _run_to_success(self, spec: dict[str, Any]) -> None:
        container = Container(spec, self._memory(spec))
        while True:
            await self._run_once(container)
            if container.exit_code == 0:
                return
            await asyncio.sleep(FIRST_BACKOFF)

    async def _keep(self, container: Container) -> None:
        if container.spec.get("image") in self.missing_images:
            container.waiting = "ImagePullBackOff"
            container.message = f'Back-off pulling image "{container.spec["image"]}"'
            return
        backoff = FIRST_BACKOFF
        while True:
            try:
                await self._run_once(container)
            except (LookupError, ValueError) as error:
                container.waiting, container.message = "CreateContainerConfigError", str(error)
                await asyncio.sleep(SYNC)
                continue
            container.started = False
            self._set_ready(container, False)
            container.waiting = "CrashLoopBackOff"
            container.message = (
                f"restarting after {backoff:g} s; {container.reason}, exit code {container.exit_code}"
            )
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, LONGEST_BACKOFF)
            container.restarts += 1

    async def _run_once(self, container: Container) -> None:
        """Run a container to its end. Raises LookupError for what its manifest names and is not there."""
        spec = container.spec
        image, rights = self._image(spec), self._rights(spec)
        environment = self.environment(self, spec)
        command = [expanded(word, environment) for word in (*spec.get("command", []), *spec.get("args", []))]
        mounts = await asyncio.to_thread(self.volumes.mounts, spec)
        if container.memory is not None:
            container.memory.make()
        with self.log.open("ab") as log:
            container.process = await asyncio.create_subprocess_exec(
                *self.sandbox.command(command, self._working_dir(spec), image, rights, mounts, container.memory),
                env=self.sandbox.environment(environment, image, rights),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        container.waiting = ""
        beside = [asyncio.create_task(self._probe(container))]
        if container.memory is not None:
            beside.append(asyncio.create_task(container.keep_within_memory()))
        try:
            await container.wait()
        finally:
            for task in beside:
                task.cancel()

    def _image(self, spec: Mapping[str, Any]) -> Image:
        return self.images.get(spec.get("image", ""), Image())

    def _rights(self, spec: Mapping[str, Any]) -> Rights:
        return Rights.of(self.spec, spec, self._image(spec))

    def _working_dir(self, spec: Mapping[str, Any]) -> str:
        return str(spec.get("workingDir") or self._image(spec).working_dir or self.sandbox.home)

    async def _sync(self) -> None:
        """Keep Secrets as they are now, and see that the pod's storage is within its limits."""
        limits = [((one.spec.get("resources") or {}).get("limits") or {}) for one in self.containers]
        sizes = [quantity(one["ephemeral-storage"]) for one in limits if "ephemeral-storage" in one]
        while True:
            await asyncio.sleep(SYNC)
            await asyncio.to_thread(self.volumes.write_secrets)
            why = await asyncio.to_thread(
                self.volumes.over_limit, sum(sizes) if sizes else None, self.sandbox.own / "over", self.log
            )
            if why:
                with self.log.open("a") as log:
                    log.write(f"Evicted: {why}\n")
                self.evicted(self)
                return

    async def _probe(self, container: Container) -> None:
        """Have a container be ready, and end it, as its probes say."""
        spec = container.spec
        if "startupProbe" in spec:
            async for passed in self._verdicts("startupProbe", container):
                if passed:
                    break
                await self._stop(container)
                return
        container.started = True
        tasks = [asyncio.create_task(self._follow_readiness(container))]
        if "livenessProbe" in spec:
            tasks.append(asyncio.create_task(self._follow_liveness(container)))
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _follow_readiness(self, container: Container) -> None:
        if "readinessProbe" not in container.spec:
            while not container.ready:
                await asyncio.sleep(POLL)
                self._set_ready(container, container.init is not None)
            return
        async for passed in self._verdicts("readinessProbe", container):
            self._set_ready(container, passed)

    async def _follow_liveness(self, container: Container) -> None:
        async for passed in self._verdicts("livenessProbe", container):
            if not passed:
                await self._stop(container)

    def _verdicts(self, kind: str, container: Container) -> AsyncIterator[bool]:
        probe = container.spec[kind]
        return verdicts(probe, lambda: passes(probe, self, container))

    def _set_ready(self, container: Container, ready: bool) -> None:
        if ready != container.ready:
            container.ready = ready
            self.changed()
        if self.ready:
            self._end_turn()

    @property
    def _grace(self) -> float:
        return float(self.spec.get("terminationGracePeriodSeconds", GRACE))

    async def _stop(self, container: Container, grace: float | None = None) -> None:
        hook = (container.spec.get("lifecycle") or {}).get("preStop")

        async def before() -> object:
            if "sleep" in hook:
                return await asyncio.sleep(float(hook["sleep"]["seconds"]))
            if "exec" in hook:
                return await self.execute(hook["exec"]["command"], container)
            return await passes({**hook, "timeoutSeconds": self._grace}, self, container)

        await container.stop(self._grace if grace is None else grace, before if hook and grace != 0 else None)

    async def end(self, grace: float | None = None) -> None:
        """End it: ``preStop``, SIGTERM, and SIGKILL after ``grace`` seconds; with 0, SIGKILL at once."""
        self.ending = True
        self.changed()
        if self._task is not None and not any(container.process for container in self.containers):
            # What makes its network namespace runs in a thread, and cannot be cancelled.
            await asyncio.wait([self._task], timeout=0.5)
        if self._task is not None:
            self._task.cancel()
        self._end_turn()
        await asyncio.gather(*(self._stop(container, grace) for container in self.containers))
        self.lost.set()
        await asyncio.to_thread(remove_namespace, self.network.name(self.host))
        for container in self.containers:
            if container.memory is not None:
                container.memory.remove()
        await asyncio.to_thread(self.sandbox.remove)

    async def execute(self, command: list[str], container: Container | None = None) -> tuple[int, str]:
        """Run a command in a container: its exit code, and what it printed."""
        container = container or self.containers[0]
        if container.init is None:
            return 1, f"container {container.spec['name']} of pod {self.name} does not run"
        spec = container.spec
        image, rights = self._image(spec), self._rights(spec)
        group = container.memory.folder / "cgroup.procs" if container.memory else "/dev/null"
        process = await asyncio.create_subprocess_exec(
            *("setpriv", "--pdeathsig", "KILL", "sh", "-c", f'echo 0 > {group} && exec "$@"', "join"),
            *("nsenter", "--target", str(container.init), "--all", f"--wdns={self._working_dir(spec)}", "--"),
            *(*rights.command(), *command),
            env=self.sandbox.environment(self.environment(self, spec), image, rights),
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
