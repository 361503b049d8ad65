"""`KubernetesJob`: a job in pods that Kubetorch deploys, with its gateway in one of them."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from loom.control.address import MONARCH_PORT
from loom.errors import DeploymentFailed, WrongArguments
from loom.extras import require
from loom.token_file import digest
from loom_proxy.code_sync.folders import SyncResult
from loom_proxy.kubernetes import kubetorch_names
from loom_proxy.kubernetes.deployment import PodMesh, pods_shown
from loom_proxy.kubernetes.network_policy import SERVING, PortPolicies
from loom_proxy.kubernetes.port_forward import GATEWAY_PORT
from loom_proxy.kubernetes.rollout import PodStart, look_after_pods
from loom_proxy.kubernetes.service_lookup import gateway_url, token_for
from loom_proxy.launched_job import LaunchedJob
from loom_proxy.session.open import connect

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?")


class KubernetesJob(LaunchedJob):
    """A job in Kubernetes: pods with a worker and a gateway each, and a session on them.

    Give ``compute`` to deploy pods, ``selector`` to use pods that run Kubetorch's server already, and ``meshes``
    for several meshes. Nothing happens before `apply`, `state` or ``with``. Afterwards this object has all
    attributes of the `Job` that it has opened, such as ``hosts``, ``run`` and ``events``.

    While the job is open, it deploys lost pods again that come back without the class that Kubetorch loads.

    A ``with`` block closes the session at its end, and removes the pods if it has deployed them. Pods that ran
    before stay; all stay after `detach`. `kill` always removes the pods.

    Args:
        compute: the pods, as a ``kubetorch.Compute``: each of its ``replicas`` is a host. Without an image it gets
            Loom's own, `loom.images`; an image of its own must contain torchmonarch and Loom.
        selector: labels of pods that run already.
        name: name of the job in the namespace; default ``loom``. Kubetorch puts the user's name before it.
        namespace: namespace of the pods; default Kubetorch's.
        monarch_port: port at which each pod's worker listens.
        sync_dirs: folders to ship to every host with `Job.sync`.
        transport: ``"websocket"`` or ``"http"``, see `loom.connect`; None tries both.
        meshes: several named meshes, each a ``kubetorch.Compute`` or a selector; ``state()`` has them by name. The
            gateways and the sessions are in the pods of the first.
        service: DNS name, in the namespace, of the headless service of selected pods; default
            ``NAME-headless``. With several meshes a mapping from the mesh's name.
        session: name of a living session to attach to, see `loom.connect`.
        token: token of the gateways; default one that is made and kept for this user.
        session_linger: seconds that a session lives on when nothing goes on in it.
        session_max: seconds that a session lives at most, whatever goes on in it; 0: any time.
        persist: keep the session without a client until it is closed, see `loom.connect`.
        stream_logs: whether Kubetorch prints the pods' output while it deploys them; None as it is configured.
        launch_timeout: seconds that the pods have to become ready.
        injectable: whether failures may be injected into the pods' processes and the gateways (`loom.chaos`). The
            pods are then deployed with ``LOOM_INJECTABLE=1`` and the capability NET_ADMIN, which faults of a
            network need.
        network_policy: whether to close the pods' ports that ask for no token, by a NetworkPolicy that goes with
            the pods. A warning says if this user may not do that.

    Raises:
        WrongArguments: not exactly one of ``compute``, ``selector`` and ``meshes`` is given, or one makes no sense,
            or pods that run already are to be made injectable, or another program of the pods has ``monarch_port``
            or the port before it, which is the pod's keeper's.
        MissingDependency: Kubetorch is not installed.
    """

    def __init__(
        self,
        compute: Any = None,
        selector: Mapping[str, str] | None = None,
        name: str | None = None,
        namespace: str | None = None,
        monarch_port: int = MONARCH_PORT,
        sync_dirs: Sequence[str | os.PathLike[str]] = (),
        transport: str | None = None,
        *,
        meshes: Mapping[str, Any] | None = None,
        service: str | Mapping[str, str] | None = None,
        session: str | None = None,
        token: str | None = None,
        session_linger: float = 3600.0,
        session_max: float = 0.0,
        persist: bool = False,
        stream_logs: bool | None = False,
        launch_timeout: float = 600.0,
        injectable: bool = False,
        network_policy: bool = True,
    ) -> None:
        super().__init__()
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
        require({"kubetorch": "kubetorch"}, "a KubernetesJob", "kubetorch")
        import kubetorch

        self.namespace: str = namespace or getattr(compute, "namespace", None) or kubetorch.config.namespace
        """Namespace of the pods."""
        wanted_meshes = meshes or {"workers": compute if selector is None else dict(selector)}
        services = {next(iter(wanted_meshes)): service} if isinstance(service, str) else service or {}
        self._meshes = []
        for mesh, of in wanted_meshes.items():
            suffix = f"-{mesh.replace('_', '-')}" if len(wanted_meshes) > 1 else ""
            deployed_as = self._given_name + suffix
            self._meshes.append(PodMesh(mesh, of, self.namespace, deployed_as, services.get(mesh), injectable))
            self._meshes[-1].stream_logs = stream_logs
        _check_port(monarch_port, wanted_meshes.values())
        self._port = monarch_port
        clients = kubetorch.config.install_namespace
        self._policies = PortPolicies(self._meshes, monarch_port, clients) if network_policy else None
        self._sync_dirs = list(sync_dirs)
        self._transport = transport
        self._session = session
        self._token = token
        self._linger = session_linger
        self._max = session_max
        self._persist = persist
        self._timeout = launch_timeout
        self._removing = threading.Lock()
        self.synced: list[SyncResult] = []
        """The results of syncing ``sync_dirs``, in their order."""

    @property
    def name(self) -> str:
        """Name of the service that Kubetorch deploys for the first mesh, whose pods have the gateways."""
        return self._meshes[0].service_name

    @property
    def service_url(self) -> str:
        """The gateways' URL for `loom.connect`, by way of Kubetorch's nginx, which leads to any of them.

        The URL is ``ws://…`` or ``wss://…`` if Kubetorch knows nginx's address, from ``KT_API_URL`` or within the
        cluster; else ``kube://…``, for which `loom.connect` forwards a port, as Kubetorch does for itself.
        """
        return gateway_url(self.namespace, self._meshes[0].headless)

    @property
    def token(self) -> str:
        """The token of the gateways, for other programs that join the session."""
        if self._token is None:
            self._token = token_for(self.namespace, self.name)
        return self._token

    def apply(self) -> KubernetesJob:
        """Deploy the pods, wait for them and open a session, unless this object has an open one.

        Pods that an earlier program has deployed under this name are changed to the present arguments. A change
        that needs no new pods leaves their sessions alone.

        Raises:
            DeploymentFailed: pods cannot be deployed or do not become ready; the text says which, and why.
            PythonVersionMismatch: the pods' Python has another minor version.
            ProtocolMismatch: the pods' Loom has another major version.
            LoomError: an error of `loom.connect`, such as `InvalidAddress` if ``KT_API_URL`` has no TLS and this is
                not the cluster.
        """
        if self._is_open:
            return self
        self._detached = False
        if self._policies is not None:  # before the pods, so that their ports are never open
            self._policies.apply()
        for mesh in self._meshes:
            self._deploy(mesh)
        start = PodStart(self._meshes, self._timeout, lambda mesh: mesh.deploy(self._init_args(mesh)))
        with pods_shown(lambda: start.doing, lambda: [pod for mesh in self._meshes for pod in mesh.pods()]):
            start.wait()
        job = self._job = connect(
            self.service_url,
            self.token,
            self._session,
            persist=self._persist,
            transport=self._transport,
            insecure=kubetorch_names.is_in_cluster(),  # within the cluster Kubetorch's nginx has no TLS
        )
        look_after_pods(job, lambda: PodStart(self._meshes, self._timeout, self._deploy_again, lambda: job.closed))
        self.synced = [self._job.sync(folder) for folder in self._sync_dirs]
        return self

    def _deploy(self, mesh: PodMesh) -> None:
        mesh.complete_compute()
        there_before = mesh.ours and mesh.exists()
        init_args = self._init_args(mesh)
        with pods_shown(lambda: f"deploying {mesh.service_name}", mesh.pods):
            mesh.deploy(init_args)
        if mesh.ours and not there_before:
            self._launched = True

    def _deploy_again(self, mesh: PodMesh) -> None:
        """Deploy lost pods of an open job again. `kill` waits for this."""
        with self._removing:
            if self._is_open:
                mesh.deploy(self._init_args(mesh))

    def _init_args(self, mesh: PodMesh) -> Mapping[str, Any]:
        """Return the arguments of `LoomPod` in the pods of a mesh."""
        return {
            "mesh": mesh.name,
            "meshes": [
                [one.name, f"{one.headless}.{self.namespace}.svc.cluster.local", one.pods_wanted]
                for one in self._meshes
            ],
            "token_sha256": digest(self.token),
            "monarch_port": self._port,
            "gateway_port": GATEWAY_PORT,
            "session_linger": self._linger,
            **({"session_max": self._max} if self._max else {}),  # older images' pods do not know it
        }

    def kill(self) -> None:
        """End the session, the workers and the gateways, and remove the pods, unless they were selected by labels.

        Raises:
            DeploymentFailed: Kubetorch cannot remove some pods, or is not reached for a minute. Call `kill` again.
        """
        self._close_session()
        failures = []
        with self._removing:
            for mesh in self._meshes:
                try:
                    mesh.remove()
                except DeploymentFailed as failure:  # raised below, after the other meshes' pods are removed
                    failures.append(failure)
        if failures:
            raise failures[0]
        if self._policies is not None:
            self._policies.remove()
        self._launched = False

    def __repr__(self) -> str:
        meshes = ", ".join(mesh.name for mesh in self._meshes)
        return f"<KubernetesJob {self._given_name!r} in namespace {self.namespace!r}: {meshes}>"


def _check_port(port: int, pods: Iterable[Any]) -> None:
    """Check that neither the worker's nor the keeper's port, before it, is another program's of a pod."""
    taken = {kubetorch_names.server_port_of(of): "Kubetorch's server" for of in pods}
    taken |= SERVING
    for one in (port, port - 1):
        if one in taken:
            raise WrongArguments(f"monarch_port is {port}: port {one} of a pod is for {taken[one]}; choose another")
