"""Classes and functions that `loom.cls` and `loom.fn` deploy by Kubetorch, or find deployed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loom.errors import DeploymentFailed, NotFound, WrongArguments
from loom.extras import require
from loom.remote_objects import Method
from loom_proxy.kubernetes import kubetorch_names
from loom_proxy.kubernetes.deployment import LOOM_POD
from loom_proxy.kubernetes.job import KubernetesJob
from loom_proxy.kubernetes.service_lookup import FoundService, find_service
from loom_proxy.mesh.actors import ActorMeshProxy
from loom_proxy.remote.kubetorch import DeployedService
from loom_proxy.remote.resources import RemoteResources

Joined = tuple[str, ActorMeshProxy, Callable[[], None]]
"""An object in a session: its name, the actors that hold it, and a function that removes it."""


@dataclass(frozen=True)
class Deployment:
    """A class or a function to deploy, with the arguments of ``to`` that concern the deployment."""

    target: Any
    compute: Any
    name: str
    get_if_exists: bool
    reload_prefixes: Sequence[str]
    stream_logs: bool | None

    def existing(self) -> Joined | None:
        """Join the session of an object that is deployed under the name, if that is wanted and there is one."""
        if not self.get_if_exists:
            return None
        found = find_service(self._base(), self.compute.namespace, self.reload_prefixes)
        return join(found) if found is not None and found.is_looms else None

    def in_session(
        self,
        hosts: int | slice | None,
        per_host: Mapping[str, int] | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        methods: Iterable[Method],
    ) -> Joined:
        """Deploy the pods and put the object into a session on them, in place of an earlier program's."""
        job = KubernetesJob(self.compute, name=self._base(), persist=True, stream_logs=self.stream_logs)
        try:
            job.apply()
            job.job.print_logs = self.stream_logs is not False
            FoundService(job.namespace, job.name, LOOM_POD[1], job.token).end_sessions(but=job.session)
            mesh, _ = RemoteResources(job.job, hosts, per_host).host(job.name, self.target, args, kwargs, methods)
        except BaseException:
            job.__exit__()  # removes pods that were not there before
            raise
        return job.name, mesh, job.kill

    def by_kubetorch(
        self, kind: str, init_args: Mapping[str, Any] | None, timeout: float | None
    ) -> KubetorchService:
        """Deploy in Kubetorch's own way, by ``kubetorch.cls`` or ``kubetorch.fn``.

        Raises:
            DeploymentFailed: Kubetorch cannot deploy it.
        """
        import kubetorch

        given: dict[str, object] = {"stream_logs": self.stream_logs}
        if kind == "cls":
            given["init_args"] = init_args
        try:
            module = {"cls": kubetorch.cls, "fn": kubetorch.fn}[kind](self.target, name=self._base())
            prefixes = list(self.reload_prefixes)
            deployed = module.to(self.compute, get_if_exists=self.get_if_exists, reload_prefixes=prefixes, **given)
        except Exception as error:
            raise self._failed(error) from error

        def again() -> None:
            try:
                deployed.to(self.compute, **given)
            except Exception as error:
                raise self._failed(error) from error

        # An earlier deployment is another program's, to which deploying again would give a new object.
        return service_of(deployed, timeout, self.target, again if deployed is module else None), deployed.teardown

    def _failed(self, error: Exception) -> DeploymentFailed:
        return DeploymentFailed(
            f"Kubetorch has not deployed {self.name} in namespace {self.compute.namespace}: "
            f"{error or type(error).__name__}"
        )

    def _base(self) -> str:
        return base_name(self.name)


KubetorchService = tuple[DeployedService, Callable[[], object]]
"""A service that Kubetorch serves itself, and a function that removes it."""


def base_name(name: str) -> str:
    """Return a name as Kubetorch gives it to a service, before it puts the user's name before it."""
    require({"kubetorch": "kubetorch"}, "a deployed class or function", "kubetorch")
    try:
        return kubetorch_names.kubernetes_name(name)
    except ValueError as error:
        raise WrongArguments(f"{name!r} cannot name a service: {error}") from error


def join(found: FoundService) -> Joined | None:
    """Join the session that holds an object, next to its other clients; None if there is none."""
    job = found.open()
    if job is None:
        return None
    mesh = job.meshes.get(found.name)
    if not isinstance(mesh, ActorMeshProxy):  # it was torn down at this moment
        job.detach()
        return None

    def remove() -> None:
        job.detach()
        found.remove()

    return found.name, mesh, remove


def find(kind: str, name: str, namespace: str | None, reload_prefixes: Sequence[str]) -> Joined | KubetorchService:
    """Find the deployment of a name.

    Args:
        kind: ``cls`` or ``fn``.

    Raises:
        NotFound: nothing is, or its session is over.
        DeploymentFailed: Kubetorch does not tell.
    """
    base = base_name(name)
    import kubetorch

    namespace = namespace or str(kubetorch.config.namespace)
    found = find_service(base, namespace, reload_prefixes)
    if found is None:
        looked = ", ".join(kubetorch_names.services_to_look_for(base, reload_prefixes))
        raise NotFound(
            f"nothing is deployed as {name!r} in namespace {namespace} (looked for {looked}): deploy it with "
            f"loom.{kind}(…, {name!r}).to(kubetorch.Compute(…)), or see `kt list`"
        )
    if not found.is_looms:
        try:
            deployed = {"cls": kubetorch.cls, "fn": kubetorch.fn}[kind](name=found.name)
        except Exception as error:
            raise DeploymentFailed(f"Kubetorch does not load {found.name}: {error}") from error
        return service_of(deployed), deployed.teardown
    joined = join(found)
    if joined is None:
        raise NotFound(
            f"the pods of {found.name} in namespace {namespace} have no session that holds it: its session was "
            "closed, or its gateway's pod was lost. Deploy it again with .to(kubetorch.Compute(…))"
        )
    return joined


def service_of(
    deployed: Any,
    timeout: float | None = None,
    target: Any = None,
    deploy_again: Callable[[], object] | None = None,
) -> DeployedService:
    """Return the service of a deployed result of ``kubetorch.cls`` or ``kubetorch.fn``."""

    def url() -> str:
        return kubetorch_names.endpoint_of(deployed)

    return DeployedService(url, deployed.callable_name, deployed.serialization, timeout, target, deploy_again)
