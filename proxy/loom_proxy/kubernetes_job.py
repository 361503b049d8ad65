"""`KubernetesJob`: a job in pods that Kubetorch deploys, with its gateway in one of them."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

import loom
from loom.errors import (
    DeploymentFailed,
    LoomError,
    ProtocolMismatch,
    PythonVersionMismatch,
    WrongArguments,
)
from loom.extras import require
from loom.token_file import digest
from loom_proxy.job import Job, JobState, connect
from loom_proxy.job_tokens import token_for
from loom_proxy.pod_states import PodState, pod_states
from loom_proxy.progress import EVERY, Progress, Step, wanted
from loom_proxy.sync import SyncResult

__all__ = ["KubernetesJob"]

logger = logging.getLogger(__name__)

GATEWAY_PORT = 8470

LOOM_POD = ("", "loom_gateway.kubetorch", "LoomPod")
"""What runs in each pod, where Python finds it in the pod's installation of Loom."""

LOOK_EVERY = 1.0
"""Seconds between two questions to Kubernetes."""

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?")

_KUBETORCH = {"kubetorch": "kubetorch"}


class _Mesh(NamedTuple):
    """The pods of one mesh."""

    name: str
    compute: Any
    """A ``kt.Compute``."""
    ours: bool
    """Whether this job deploys them, or they are there already."""


class KubernetesJob:
    """A job in Kubernetes: pods with a worker each, of which one has the gateway, and a session on them.

    Give ``compute`` to have pods deployed, ``selector`` to use pods that run Kubetorch's server already, ``meshes``
    for several. Nothing happens before `apply`, `state` or ``with``. Afterwards it is used as the `Job` that it has
    opened: ``hosts``, ``run``, ``events`` and all else of it are here, too.

    Leaving it as a context manager closes the session, and removes the pods if it has deployed them; pods that were
    there before stay, and all do after `detach`. `kill` removes them whenever it is called.

    Args:
        compute: the pods, as a ``kubetorch.Compute``: each of its ``replicas`` is a host. Without an image it gets
            Loom's own, `loom.images`; an image that it has must have torchmonarch and Loom in it.
        selector: labels of pods that are there already.
        name: of the job, in the namespace; default ``loom``. Kubetorch puts the user's name before it.
        namespace: default Kubetorch's.
        monarch_port: where each pod's worker listens.
        sync_dirs: folders to ship to every host, as by `Job.sync`.
        transport: ``"websocket"`` or ``"http"``, as for `loom.connect`; None tries both.
        meshes: several named meshes, each a ``kubetorch.Compute`` or a selector; ``state()`` has them by name. The
            gateway is in a pod of the first.
        service: DNS name, in the namespace, of the headless service of selected pods; default
            ``NAME-headless``. With several meshes a mapping from the mesh's name.
        session: name of a living session to attach to, as for `loom.connect`.
        token: of the gateway; default one that is made and kept for this user.
        session_linger: seconds that a session lives without a client.
        launch_timeout: seconds that the pods have to become ready.

    Raises:
        WrongArguments: not exactly one of ``compute``, ``selector`` and ``meshes`` is given, or one makes no sense.
        MissingDependency: Kubetorch is not installed.
    """

    def __init__(
        self,
        compute: Any = None,
        selector: Mapping[str, str] | None = None,
        name: str | None = None,
        namespace: str | None = None,
        monarch_port: int = 26600,
        sync_dirs: Sequence[str | os.PathLike[str]] = (),
        transport: str | None = None,
        *,
        meshes: Mapping[str, Any] | None = None,
        service: str | Mapping[str, str] | None = None,
        session: str | None = None,
        token: str | None = None,
        session_linger: float = 3600.0,
        launch_timeout: float = 600.0,
    ) -> None:
        given = [what for what in (compute, selector, meshes) if what is not None]
        if len(given) != 1 or not given[0]:
            raise WrongArguments(
                "a job has its pods from exactly one of compute=kt.Compute(…), which deploys them, selector={…}, "
                f"labels of pods that run already, and meshes={{…}}; {len(given)} were given"
            )
        if not 0 < monarch_port < 65536:
            raise WrongArguments(f"monarch_port is {monarch_port}: give 1 to 65535")
        self._given_name = name or "loom"
        if not _NAME.fullmatch(self._given_name):
            raise WrongArguments(
                f"{name!r} cannot name a job in Kubernetes: give 1 to 42 of a-z, 0-9 and -, not - at its ends"
            )
        require(_KUBETORCH, "a KubernetesJob", "kubetorch")
        import kubetorch

        self.namespace: str = namespace or getattr(compute, "namespace", None) or kubetorch.config.namespace
        """Where the pods are."""
        wanted_meshes = meshes or {"workers": compute if selector is None else dict(selector)}
        self._meshes = [self._mesh(mesh, of) for mesh, of in wanted_meshes.items()]
        self._services = (
            {} if service is None else {self._meshes[0].name: service} if isinstance(service, str) else service
        )
        self._port = monarch_port
        self._sync_dirs = list(sync_dirs)
        self._transport = transport
        self._session = session
        self._token = token
        self._linger = session_linger
        self._timeout = launch_timeout
        self._remotes: dict[str, Any] = {}
        self._deployed: list[str] = []
        self._job: Job | None = None
        self._detached = False
        self.synced: list[SyncResult] = []
        """What became of ``sync_dirs``, in their order."""

    def _mesh(self, name: str, of: Any) -> _Mesh:
        import kubetorch

        if not name.isidentifier() or name.startswith("_"):
            raise WrongArguments(f"{name!r} cannot name a mesh: state() is to have an attribute of that name")
        if isinstance(of, Mapping):
            return _Mesh(name, kubetorch.Compute(selector=dict(of), namespace=self.namespace), ours=False)
        if not isinstance(of, kubetorch.Compute):
            raise WrongArguments(
                f"the pods of {name} are {of!r:.80}: give a kt.Compute or a selector, a dict of labels"
            )
        if of.namespace != self.namespace:
            raise WrongArguments(
                f"the pods of {name} are to be in namespace {of.namespace!r}, and the job in {self.namespace!r}: "
                "give one namespace to both"
            )
        return _Mesh(name, of, ours=not of.selector_only)

    # -- what it is ---------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Of the service that Kubetorch deploys for the first mesh, which has the gateway."""
        service: str = self._remote(self._meshes[0]).service_name
        return service

    @property
    def service_url(self) -> str:
        """Where the gateway is reached, for `loom.connect`: through Kubetorch's nginx."""
        from kubetorch import globals as kubetorch_globals

        parts = urlsplit(kubetorch_globals.service_url())
        scheme = "wss" if parts.scheme == "https" else "ws"
        service = self._headless(self._meshes[0])
        path = f"{parts.path.rstrip('/')}/{self.namespace}/{service}:{GATEWAY_PORT}"
        return str(urlunsplit((scheme, parts.netloc, path, "", "")))

    @property
    def token(self) -> str:
        """The token of the gateway, for other programs that are to join."""
        if self._token is None:
            self._token = token_for(self.namespace, self.name)
        return self._token

    @property
    def job(self) -> Job:
        """The open session.

        Raises:
            LoomError: nothing has been applied yet.
        """
        if self._job is None:
            raise LoomError("this KubernetesJob has no session yet: call apply(), or use it in a with statement")
        return self._job

    def __getattr__(self, name: str) -> Any:
        # Not for what this class has itself, nor for what copy and pickle look for.
        if name.startswith("__") or "_job" not in self.__dict__:
            raise AttributeError(f"a KubernetesJob has no {name!r}")
        if self._job is None:
            raise AttributeError(
                f"a KubernetesJob has no {name!r} before it has a session: call apply(), or use it with `with`"
            )
        return getattr(self.job, name)

    # -- applying it --------------------------------------------------------------------------------------------

    def apply(self) -> KubernetesJob:
        """Deploy the pods, wait for them and open a session. Where that is done already, it does nothing.

        Pods that an earlier program has deployed under this name are brought to what is wanted now; a change that
        needs no new pods leaves the sessions in them alone.

        Raises:
            DeploymentFailed: pods cannot be deployed or do not become ready; says which, and why.
            PythonVersionMismatch: the pods' Python has another minor version.
            ProtocolMismatch: the pods' Loom has another major version.
            LoomError: as `loom.connect`.
        """
        if self._job is not None and not self._job.closed:
            return self
        self._detached = False
        for mesh in self._meshes:
            self._deploy(mesh)
        self._await_gateway()
        self._job = connect(self.service_url, self.token, self._session, transport=self._transport)
        self.synced = [self._job.sync(folder) for folder in self._sync_dirs]
        return self

    def state(self) -> JobState:
        """The host meshes by name; `apply` comes first where it has not been called."""
        return self.apply().job.state()

    def _remote(self, mesh: _Mesh) -> Any:
        """What Kubetorch calls the deployed class of a mesh."""
        remote = self._remotes.get(mesh.name)
        if remote is None:
            from kubetorch.resources.callables.cls.cls import Cls

            several = len(self._meshes) > 1
            name = f"{self._given_name}-{mesh.name.replace('_', '-')}" if several else self._given_name
            # As kubetorch.cls(LoomPod) makes it; the class itself is not needed here, nor what it imports.
            remote = self._remotes[mesh.name] = Cls(name, pointers=LOOM_POD, sync_dir=False)
            remote.reload_prefixes = []
            remote.compute = mesh.compute
        return remote

    def _headless(self, mesh: _Mesh) -> str:
        """The name of the service that resolves to the addresses of all pods of a mesh."""
        given = self._services.get(mesh.name)
        return given or f"{self._remote(mesh).service_name}-headless"

    def _pods_wanted(self, mesh: _Mesh) -> int:
        if mesh.ours:
            replicas: int = mesh.compute.replicas
            return replicas
        found = len(self._pods(mesh))
        if not found:
            labels = ",".join(f"{key}={value}" for key, value in mesh.compute._pod_selector.items())
            raise DeploymentFailed(
                f"no pod in namespace {self.namespace} has the labels {labels}: see `kubectl get pods -n "
                f"{self.namespace} --show-labels`"
            )
        return found

    def _deploy(self, mesh: _Mesh) -> None:
        compute = mesh.compute
        if mesh.ours:
            if compute.image is None:
                from loom.images import cpu_image, gpu_image

                compute.image = gpu_image() if compute.gpus else cpu_image()
            if not compute.distributed_config:
                # Monarch distributes; Kubetorch only makes the headless service.
                compute.distributed_config = {"distribution_type": "local", "quorum_workers": compute.replicas}
        remote = self._remote(mesh)
        there_before = mesh.ours and self._exists(remote)
        init_args = {
            "mesh": mesh.name,
            "meshes": [
                [one.name, f"{self._headless(one)}.{self.namespace}.svc.cluster.local", self._pods_wanted(one)]
                for one in self._meshes
            ],
            "token_sha256": digest(self.token),
            "monarch_port": self._port,
            "gateway_port": GATEWAY_PORT,
            "session_linger": self._linger,
        }
        with self._shown(f"deploying {remote.service_name}", mesh):
            try:
                remote.to(compute, init_args=init_args, stream_logs=False)
            except Exception as error:
                raise DeploymentFailed(self._why_not(mesh, error)) from error
        if mesh.ours and not there_before:
            self._deployed.append(mesh.name)

    def _exists(self, remote: Any) -> bool:
        """Whether somebody has deployed it before."""
        from kubetorch import globals as kubetorch_globals

        try:
            found = kubetorch_globals.controller_client().get_workload(self.namespace, remote.service_name)
        except Exception as error:  # noqa: BLE001 - Kubetorch's own classes; deploying will tell
            logger.debug("no workload %s: %s", remote.service_name, error)
            return False
        return bool(found)

    def _why_not(self, mesh: _Mesh, error: BaseException) -> str:
        service = self._remote(mesh).service_name
        text = f"{service} in namespace {self.namespace} was not deployed: {error or type(error).__name__}"
        if "not found" in text.lower() and "namespace" in text.lower():
            text += f". See `kubectl get namespaces`, and make it: kubectl create namespace {self.namespace}"
        with contextlib.suppress(Exception):
            states = [str(state) for state in self._pods(mesh) if not state.ready]
            text += f". Pods: {'; '.join(states)}" if states else ""
        return text

    def _pods(self, mesh: _Mesh) -> list[PodState]:
        """The pods of a mesh, as Kubernetes sees them."""
        return pod_states(mesh.compute.pods() or ())

    # -- waiting ------------------------------------------------------------------------------------------------

    def _await_gateway(self) -> None:
        """Wait until the workers of all pods and the gateway listen."""
        remote = self._remote(self._meshes[0])
        expected = sum(self._pods_wanted(mesh) for mesh in self._meshes)
        deadline = time.monotonic() + self._timeout
        with self._shown("starting the workers and the gateway", self._meshes[0]):
            while True:
                try:
                    status = _answer(remote.status(stream_logs=False))
                except Exception as error:
                    status = {"pods": [], "gateway": None}
                    problem = f"{type(error).__name__}: {error}"
                    if _is_final(error):
                        raise DeploymentFailed(_what_a_pod_says(error)) from error
                else:
                    problem = _what_is_wrong(status, expected)
                    for pod in status["pods"]:
                        _check_versions(pod)
                if not problem:
                    return
                if time.monotonic() > deadline or _fails_again(status):
                    raise DeploymentFailed(f"{self.name} in namespace {self.namespace} does not start: {problem}")
                time.sleep(LOOK_EVERY)

    @contextlib.contextmanager
    def _shown(self, what: str, mesh: _Mesh) -> Iterator[None]:
        """Show, while the block runs, what the pods do."""
        if not wanted(None):
            yield
            return
        over = threading.Event()
        showing = threading.Thread(
            target=_show, args=(what, lambda: self._pods(mesh), over), name="pods", daemon=True
        )
        showing.start()
        try:
            yield
        finally:
            over.set()
            showing.join(LOOK_EVERY)

    # -- the end ------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """End the session, the workers and the gateway, and remove the pods, unless they were selected by labels.

        Raises:
            DeploymentFailed: Kubetorch cannot remove them.
        """
        self._close_session()
        for mesh in self._meshes:
            remote = self._remote(mesh)
            if not mesh.ours:
                with contextlib.suppress(Exception):
                    remote.shutdown(stream_logs=False)
                continue
            try:
                remote.teardown()
            except Exception as error:
                raise DeploymentFailed(f"{remote.service_name} was not removed: {error}") from error
        self._deployed.clear()

    def detach(self) -> None:
        """Leave the pods and the session running, also when the ``with`` is left; see `Job.detach`."""
        self._detached = True
        self.job.detach()

    def _close_session(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            with contextlib.suppress(LoomError):  # its pods may be gone
                job.close()

    def __enter__(self) -> KubernetesJob:
        return self.apply()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._detached:
            return
        self._close_session()
        if self._deployed:
            self.kill()

    def __repr__(self) -> str:
        meshes = ", ".join(mesh.name for mesh in self._meshes)
        return f"<KubernetesJob {self._given_name!r} in namespace {self.namespace!r}: {meshes}>"


def _answer(status: Any) -> Mapping[str, Any]:
    """What `LoomPod.status` gave; Kubetorch's client also returns what a pod says that has not loaded it yet."""
    if not isinstance(status, dict) or "pods" not in status:
        raise DeploymentFailed(f"a pod has not loaded LoomPod yet: {status!r:.300}")
    return status


def _what_is_wrong(status: Mapping[str, Any], expected: int) -> str:
    """Why a job cannot be used yet; empty if it can."""
    pods = status["pods"]
    wrong = [f"pod {pod['name']}: {pod['worker']['problem']}" for pod in pods if pod["worker"]["problem"]]
    wrong += [f"pod {pod['name']}: {pod['gateway_problem']}" for pod in pods if pod["gateway_problem"]]
    if len(pods) < expected:
        wrong.append(f"{len(pods)} of {expected} pods answer: {', '.join(pod['name'] for pod in pods) or 'none'}")
    if not wrong and status["gateway"] is None:
        wrong.append("no pod has the gateway yet")
    return "; ".join(wrong)


def _fails_again(status: Mapping[str, Any]) -> bool:
    """Whether a process of a pod has been started several times, and does not run."""
    for pod in status["pods"]:
        worker = pod["worker"]
        if not worker["listening"] and (worker["starts"] > 2 or "in use" in worker["problem"]):
            return True
        if pod["gateway"] and not pod["gateway_listening"] and pod["gateway_starts"] > 2:
            return True
    return False


def _check_versions(pod: Mapping[str, Any]) -> None:
    versions = pod["versions"]
    here = ".".join(map(str, sys.version_info[:2]))
    there = ".".join(versions["python"].split(".")[:2])
    if here != there:
        raise PythonVersionMismatch(
            f"pod {pod['name']} has Python {there} and this is Python {here}: classes travel as bytecode, which "
            f"differs. Use an image with Python {here}, or run this program with Python {there}"
        )
    theirs = versions.get("monarch-loom", loom.__version__)
    if theirs.split(".")[0] != loom.__version__.split(".")[0]:
        raise ProtocolMismatch(
            f"pod {pod['name']} has Loom {theirs} and this is Loom {loom.__version__}: install the same major "
            "version on both sides"
        )


def _is_final(error: BaseException) -> bool:
    """Whether a pod has answered that it cannot: nothing is gained by asking again."""
    text = f"{type(error).__name__}: {error}"
    return any(
        word in text for word in ("MissingDependency", "ModuleNotFoundError", "ImportError", "WrongArguments")
    )


def _what_a_pod_says(error: BaseException) -> str:
    text = str(error).strip()
    if "loom" in text and ("ModuleNotFoundError" in text or "No module named" in text):
        return f"the pods' image has no Loom: {text}. Use loom.images.cpu_image() or gpu_image()"
    return f"the pods cannot run a worker: {text}"


def _show(what: str, pods: Callable[[], list[PodState]], over: threading.Event) -> None:
    step = Step(what)
    looked = 0.0

    def now() -> Step:
        nonlocal step, looked
        if time.monotonic() - looked > LOOK_EVERY:
            found = pods()
            looked = time.monotonic()
            waiting = [str(state) for state in found if not state.ready]
            ready = len(found) - len(waiting)
            reasons = f": {'; '.join(waiting[:3])}" if waiting else ""
            step = Step(f"{what}: {ready} of {len(found)} pods ready{reasons}", ready, len(found))
        return step

    if over.wait(1.0):
        return
    with Progress(now) as progress:
        while not over.wait(EVERY):
            progress.tick()
