"""The resources of a remote object: hosts of a job, and the processes to start on each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from loom.errors import Invalid, NameTaken, WrongArguments
from loom.remote_objects import AsyncHosted, Hosted, Method
from loom_proxy.job import Job
from loom_proxy.mesh.actors import ActorMeshProxy
from loom_proxy.mesh.procs import ProcMeshProxy

CONNECTION_MODES = ("websocket", "http")

TEARDOWN_TIMEOUT = 15.0


class RemoteResources:
    """Hosts of a job, and the processes to start on each.

    Args:
        hosts: index of the host, or a slice of hosts; None: host 0.
        per_host: dimensions of the processes on each host; None: one process.
    """

    def __init__(self, job: Job, hosts: int | slice | None, per_host: Mapping[str, int] | None) -> None:
        self._job = job
        self._hosts = job.hosts.slice(hosts=0 if hosts is None else hosts)
        self._per_host = per_host

    def name(self, wanted: str | None, default: str) -> str:
        """Return the name of an object's meshes: the wanted one, or a free one."""
        taken = {name for name, mesh in self._job.meshes.items() if not mesh._whole.stopped}
        if wanted is None:
            numbered = (f"{default}_{number}" for number in itertools.count(2))
            return next(name for name in itertools.chain([default], numbered) if name not in taken)
        if wanted in taken:
            raise NameTaken(
                f"session {self._job.session!r} has a mesh {wanted!r} already: tear it down, or give another name",
                code="object_name_taken",
            )
        return wanted

    def host(
        self, name: str, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], methods: Iterable[Method]
    ) -> tuple[ActorMeshProxy, Callable[[], None]]:
        """Start the processes with an object in each; return the meshes' actors, and a function that ends them."""
        actor = AsyncHosted if any(method.is_async for method in methods) else Hosted
        procs = self._hosts.spawn_procs(self._per_host, name=name)
        try:
            mesh = procs.spawn(name, actor, target, args, kwargs)
        except BaseException:  # the class or an argument cannot be pickled
            procs.stop("nothing was spawned")
            raise
        return mesh, lambda: _end(procs, mesh)


def _end(procs: ProcMeshProxy, mesh: ActorMeshProxy) -> None:
    caller = procs._whole.caller
    for one in (mesh, procs):
        caller.meshes.remove(one)
    if not caller.ended.is_set():
        procs.stop("torn down").get(TEARDOWN_TIMEOUT)


def open_job(given: Any, mode: str | None) -> Job:
    """Return the job of an argument of ``to``, which is open and connected in that mode."""
    job = getattr(given, "job", given)  # a KubernetesJob holds a Job
    if not isinstance(job, Job):
        raise WrongArguments(
            f".to() takes a job, as loom.connect and loom.local give it, or a kubetorch.Compute, not {given!r:.80}"
        )
    job._calls.check_open()
    if mode is not None and mode != job.transport:
        check_mode(mode)
        raise _wrong_mode(
            mode,
            f", but this job is connected over {job.transport!r}, and its calls take that: connect it with "
            f"loom.connect(…, transport={mode!r}), or leave connection_mode out",
        )
    return job


def check_mode(mode: str | None) -> None:
    """Raise `WrongConnectionMode` unless a mode is known, or none is given."""
    if mode is not None and mode not in CONNECTION_MODES:
        raise _wrong_mode(mode, ": give 'websocket' or 'http', or leave it out")


def _wrong_mode(mode: str, why: str) -> Invalid:
    return Invalid(f"connection_mode is {mode!r}{why}", code="wrong_connection_mode")
