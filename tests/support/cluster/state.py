"""What is in the cluster, and what makes it so: workloads get their pods, Services their records and rules."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import json
import logging
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.cluster.kubelet.image import Image
from tests.support.cluster.kubelet.pod import Pod
from tests.support.cluster.network import CONTROL, DATA_STORE, INGRESS, NGINX_PORT, PODS, Network
from tests.support.cluster.policies import Peer, policy_rules
from tests.support.cluster.service_accounts import MOUNTED, ServiceAccounts, mounted
from tests.support.cluster.services import DOMAIN, Service, cluster_ips, hosts_file, load_rules, publish_names

__all__ = ["FRONT", "INSTALLED", "NotFound", "State", "Workload"]

INSTALLED = "kubetorch"
"""The namespace in which Kubetorch itself is."""

FRONT = "kubetorch-controller-0"
"""The pod in which Kubetorch's nginx and controller are. Here they run in the control namespace."""

INGRESS_NAMESPACE = "ingress-nginx"

PARTS = [
    Peer(INSTALLED, CONTROL, {"app": FRONT}),
    Peer(INSTALLED, DATA_STORE, {"app": "kubetorch-data-store"}),
    Peer(INGRESS_NAMESPACE, INGRESS, {"app.kubernetes.io/name": "ingress-nginx"}),
]
"""What is a pod in a cluster, and has no network namespace of its own here."""

EVICTION = 1.0
"""Seconds that a pod has that is evicted for what it keeps on the disk."""

STARTING_AT_ONCE = max(1, (os.cpu_count() or 1) // 2)
"""Pods of Kubetorch that start at once: its server gives a helper 5 s, and is broken if that is too short."""

log = logging.getLogger(__name__)


class NotFound(Exception):
    """There is no such object; the text is what Kubernetes says."""


@dataclass
class Workload:
    """A Deployment or a StatefulSet."""

    manifest: dict[str, Any]
    pods: list[Pod] = field(default_factory=list)
    leaving: list[Pod] = field(default_factory=list)
    """Those of a Deployment that end, and have been replaced."""
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    removed: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return self.manifest["metadata"]["namespace"], self.manifest["metadata"]["name"]

    @property
    def kind(self) -> str:
        return str(self.manifest["kind"])

    @property
    def replicas(self) -> int:
        return 0 if self.removed else int(self.manifest["spec"].get("replicas", 1))

    @property
    def template(self) -> str:
        """What the pods' template hashes to."""
        text = json.dumps(self.manifest["spec"]["template"], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    @property
    def kept(self) -> list[Pod]:
        """Those of its pods that are as its manifest says, and stay."""
        current = [pod for pod in self.pods if pod.template == self.template and not pod.ending]
        return current[: self.replicas]

    @property
    def ready(self) -> bool:
        return sum(pod.ready for pod in self.kept) >= self.replicas

    @property
    def surges(self) -> bool:
        """Whether each of its pods ends only when another one is ready. Else all are replaced at once here."""
        return ((self.manifest["spec"].get("strategy") or {}).get("rollingUpdate") or {}).get("maxUnavailable") == 0

    @property
    def outdated(self) -> list[Pod]:
        """Those of its pods that are to end now."""
        other = [pod for pod in self.pods if pod.template != self.template]
        if self.surges:
            spare = sum(pod.ready for pod in self.pods) - self.replicas
            current = [pod for pod in self.pods if pod not in other]
            ready = [pod for pod in other if pod.ready]
            return [pod for pod in other if not pod.ready] + ready[: max(0, spare)] + current[self.replicas :]
        if (self.manifest["spec"].get("updateStrategy") or {}).get("type") == "OnDelete":
            other = []
        return other + [pod for pod in self.pods[self.replicas :] if pod not in other]


class State:
    """All objects of the cluster, and the tasks that act on them.

    Args:
        namespaces: those that exist.
        missing_images: images that cannot be pulled.
        images: what those say that are known.
    """

    def __init__(
        self,
        network: Network,
        folder: Path,
        namespaces: list[str],
        missing_images: list[str],
        images: Mapping[str, Image],
    ) -> None:
        self.network = network
        self.folder = folder
        self.namespaces = {INSTALLED, *namespaces}
        self.missing_images = frozenset(missing_images)
        self.images = images
        self.workloads: dict[tuple[str, str], Workload] = {}
        self.services: dict[tuple[str, str], Service] = {}
        self.secrets: dict[tuple[str, str], dict[str, Any]] = {}
        self.manifests: dict[tuple[str, str, str], dict[str, Any]] = {}
        """All that was applied, by kind, namespace ("" if it is in none) and name."""
        self.accounts = ServiceAccounts(self.manifests, folder)
        metadata = {"name": FRONT.removesuffix("-0"), "namespace": INSTALLED}
        self.manifests["Service", INSTALLED, metadata["name"]] = {
            "metadata": metadata,
            "spec": {"selector": {"app": FRONT}, "clusterIP": "None", "ports": [{"port": NGINX_PORT}]},
        }
        self.changed = asyncio.Event()
        self._addresses = (f"{PODS}.{1 + number // 250}.{1 + number % 250}" for number in itertools.count())
        self._service_addresses = (f"10.96.{number // 250}.{10 + number % 240}" for number in itertools.count())
        self._turn = asyncio.Semaphore(STARTING_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        self._rules: dict[str, str] = {}
        """The rules that each host has."""

    @property
    def pods(self) -> list[Pod]:
        return [pod for workload in self.workloads.values() for pod in workload.pods]

    @property
    def present(self) -> list[Pod]:
        """All pods that have a network, those that end and were replaced too."""
        leaving = [pod for workload in self.workloads.values() for pod in workload.leaving]
        return [pod for pod in self.pods + leaving if pod.networked and not pod.lost.is_set()]

    def pod(self, namespace: str, name: str) -> Pod:
        for pod in self.pods:
            if (pod.namespace, pod.name) == (namespace, name):
                return pod
        raise NotFound(f'pods "{name}" not found')

    def select(self, namespace: str, selector: Mapping[str, str]) -> list[Pod]:
        """The pods that have all of these labels."""
        return [pod for pod in self.pods if pod.namespace == namespace and selector.items() <= pod.labels.items()]

    def require_namespace(self, namespace: str) -> None:
        if namespace not in self.namespaces:
            raise NotFound(f'namespaces "{namespace}" not found')

    def apply(self, manifest: dict[str, Any]) -> None:
        """Create or replace an object: a Deployment, StatefulSet, Service, Secret or Namespace."""
        metadata = manifest["metadata"]
        kind, name = manifest["kind"], metadata["name"]
        if kind == "Namespace":
            self.namespaces.add(name)
            self.manifests[kind, "", name] = manifest
            self.changed.set()
            return
        namespace = metadata.setdefault("namespace", "default")
        self.require_namespace(namespace)
        self.manifests[kind, namespace, name] = manifest
        if kind in ("Deployment", "StatefulSet"):
            workload = self.workloads.setdefault((namespace, name), Workload(manifest))
            workload.manifest = manifest
            workload.removed = False
            self.reconcile(workload)
        elif kind == "Service":
            spec = manifest["spec"]
            ports = {int(port["port"]): port.get("targetPort", port["port"]) for port in spec.get("ports", [])}
            self.add_service(
                namespace,
                name,
                spec.get("selector", {}),
                ports,
                headless=spec.get("clusterIP") == "None",
                unready=bool(spec.get("publishNotReadyAddresses")),
                affinity=spec.get("sessionAffinity") == "ClientIP",
            )
        elif kind == "Secret":
            plain = manifest.get("stringData", {})
            encoded = {key: base64.b64encode(text.encode()).decode() for key, text in plain.items()}
            self.secrets[namespace, name] = {**manifest, "data": {**manifest.get("data", {}), **encoded}}
        elif kind == "NetworkPolicy":
            self.changed.set()
        elif kind == "PersistentVolumeClaim":
            (self.folder / "claims" / namespace / name).mkdir(parents=True, exist_ok=True)
        else:
            log.info("a %s does nothing here: %s", kind, name)

    def add_service(
        self,
        namespace: str,
        name: str,
        selector: dict[str, str],
        ports: dict[int, int | str],
        *,
        headless: bool = False,
        unready: bool = False,
        affinity: bool = False,
    ) -> Service:
        """Create or replace a Service. Its address stays."""
        known = self.services.get((namespace, name))
        address = None if headless else (known and known.address) or next(self._service_addresses)
        service = Service(namespace, name, selector, ports, address, unready, affinity)
        self.services[namespace, name] = service
        self.changed.set()
        return service

    async def remove(self, namespace: str, name: str, grace: float | None = None) -> bool:
        """Remove a workload, its pods and its Services. Whether there was one."""
        for service in (name, f"{name}-headless"):
            self.services.pop((namespace, service), None)
        return await self._remove_workload(namespace, name, grace)

    async def _remove_workload(self, namespace: str, name: str, grace: float | None = None) -> bool:
        workload = self.workloads.get((namespace, name))
        self.changed.set()
        if workload is None:
            return False
        workload.removed = True
        await asyncio.gather(*(pod.end(grace) for pod in workload.pods))
        async with workload.busy:
            await asyncio.gather(*(pod.end(grace) for pod in workload.pods))
            workload.pods.clear()
            if workload.removed:
                self.workloads.pop(workload.key, None)
        return True

    async def forget(self, kind: str, namespace: str, name: str) -> None:
        """Delete one object; of a workload its pods, too, each in the way that it asks for."""
        self.manifests.pop((kind, namespace, name), None)
        if kind == "Namespace":
            self.namespaces.discard(name)
        elif kind in ("Deployment", "StatefulSet"):
            await self._remove_workload(namespace, name)
        elif kind == "Service":
            self.services.pop((namespace, name), None)
        elif kind == "Secret":
            self.secrets.pop((namespace, name), None)
        self.changed.set()

    async def kill(self, pod: Pod) -> None:
        """Kill a pod at once, as if its host were lost. Its workload replaces it."""
        await self._end(pod, 0.0)

    async def delete(self, pod: Pod, grace: float | None = None) -> None:
        """Delete a pod, in the way that it asks for: SIGTERM first. Its workload replaces it."""
        await self._end(pod, grace)

    def begin_to_delete(self, pod: Pod, grace: float) -> None:
        """Delete a pod, which takes ``grace`` seconds at most, and do not wait for its end."""
        pod.ending = True
        self._keep(asyncio.create_task(self._end(pod, grace)))

    async def _end(self, pod: Pod, grace: float | None) -> None:
        workload = self.workloads[pod.namespace, pod.owner]
        if pod not in workload.pods:
            return
        if workload.kind == "Deployment":  # whose new pod has another name
            leaves = self._replace(workload, pod, grace)
            self.reconcile(workload)
            await leaves
            return
        await pod.end(grace)
        if pod in workload.pods:
            workload.pods.remove(pod)
            self.reconcile(workload)
        self.changed.set()

    def _replace(self, workload: Workload, pod: Pod, grace: float | None) -> asyncio.Task[None]:
        """End a pod of a Deployment, for which the next one need not wait."""
        workload.pods.remove(pod)
        workload.leaving.append(pod)

        async def leave() -> None:
            await pod.end(grace)
            workload.leaving.remove(pod)
            self.changed.set()

        task = asyncio.create_task(leave())
        self._keep(task)
        return task

    def reconcile(self, workload: Workload) -> None:
        """Have a workload's pods become what its manifest says, soon."""
        self._keep(asyncio.create_task(self._reconcile(workload)))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reconcile(self, workload: Workload) -> None:
        async with workload.busy:
            template, replicas = workload.template, workload.replicas
            old = workload.outdated
            if workload.surges:
                for pod in old:
                    self._replace(workload, pod, None)
                missing = replicas - sum(pod.template == template for pod in workload.pods)
                replicas = len(workload.pods) + min(missing, replicas + 1 - len(workload.pods))
            else:
                await asyncio.gather(*(pod.end() for pod in old))
                workload.pods[:] = [pod for pod in workload.pods if pod not in old]
            self.changed.set()
            ordered = workload.manifest["spec"].get("podManagementPolicy", "OrderedReady") == "OrderedReady"
            for ordinal in range(replicas):
                if workload.kind == "StatefulSet":
                    name = f"{workload.key[1]}-{ordinal}"
                    if any(pod.name == name for pod in workload.pods):
                        continue
                    if ordered and not all(pod.ready for pod in workload.pods[:ordinal]):
                        break
                elif len(workload.pods) >= replicas:
                    break
                else:
                    name = f"{workload.key[1]}-{template}-{secrets.token_hex(3)[:5]}"
                self._start(workload, name)
            if workload.kind == "StatefulSet":
                workload.pods.sort(key=lambda pod: int(pod.name.rpartition("-")[2]))

    def _start(self, workload: Workload, name: str) -> None:
        template = workload.manifest["spec"]["template"]
        metadata = template.get("metadata", {})
        labels = dict(metadata.get("labels") or {})
        if workload.kind == "StatefulSet":
            labels["apps.kubernetes.io/pod-index"] = name.rpartition("-")[2]
            labels["statefulset.kubernetes.io/pod-name"] = name

        def changed() -> None:
            self.changed.set()
            if workload.kind == "StatefulSet" or workload.surges:
                self.reconcile(workload)

        pod = Pod(
            network=self.network,
            folder=self.folder,
            namespace=workload.key[0],
            name=name,
            address=next(self._addresses),
            owner=workload.key[1],
            template=workload.template,
            labels=labels,
            annotations=dict(metadata.get("annotations") or {}),
            spec=mounted(self._claimed(workload, name)),
            subdomain=workload.manifest["spec"].get("serviceName", ""),
            changed=changed,
            environment=self._environment,
            secret=self._secret,
            evicted=self._evict,
            images=self.images,
            missing_images=self.missing_images,
            turn=self._turn if "kubetorch.com/service" in labels else None,
        )
        workload.pods.append(pod)
        pod.start()
        self.changed.set()

    def _claimed(self, workload: Workload, name: str) -> dict[str, Any]:
        """What a pod's template says, with the pod's own claims, which outlive it."""
        spec: dict[str, Any] = workload.manifest["spec"]["template"]["spec"]
        volumes = list(spec.get("volumes") or [])
        for claim in workload.manifest["spec"].get("volumeClaimTemplates") or []:
            named = claim["metadata"]["name"]
            metadata = {"name": f"{named}-{name}", "namespace": workload.key[0]}
            self.apply({"kind": "PersistentVolumeClaim", "metadata": metadata, "spec": claim["spec"]})
            volumes.append({"name": named, "persistentVolumeClaim": {"claimName": metadata["name"]}})
        return {**spec, "volumes": volumes}

    def _environment(self, pod: Pod, container: Mapping[str, Any]) -> dict[str, str]:
        found: dict[str, str] = {}
        for variable in container.get("env") or []:
            source = variable.get("valueFrom", {})
            if "fieldRef" in source:
                found[variable["name"]] = _field(pod, source["fieldRef"]["fieldPath"])
            elif "secretKeyRef" in source:
                wanted = source["secretKeyRef"]
                secret = self.secrets.get((pod.namespace, wanted["name"]), {"data": {}})
                if wanted["key"] in secret["data"]:
                    found[variable["name"]] = base64.b64decode(secret["data"][wanted["key"]]).decode()
            elif "value" in variable:
                found[variable["name"]] = str(variable["value"])
        # $(NAME) in a value is another variable's value.
        return {name: _expanded(value, found) for name, value in found.items()}

    def _secret(self, pod: Pod, name: str) -> dict[str, bytes] | None:
        if name == MOUNTED:
            return self.accounts.files(pod.namespace, pod.spec.get("serviceAccountName", "default"))
        found = self.secrets.get((pod.namespace, name))
        return None if found is None else {key: base64.b64decode(value) for key, value in found["data"].items()}

    def _evict(self, pod: Pod) -> None:
        self._keep(asyncio.create_task(self._end(pod, EVICTION)))

    async def publish(self) -> None:
        """Keep DNS and the addresses of Services as the pods are, until cancelled."""
        fixed = {f"kubetorch-controller.{INSTALLED}.{DOMAIN}": CONTROL}
        while True:
            await self.changed.wait()
            self.changed.clear()
            fixed |= {f"kubetorch-data-store.{namespace}.{DOMAIN}": DATA_STORE for namespace in self.namespaces}
            services, pods = list(self.services.values()), self.pods
            publish_names(self.folder, hosts_file(services, pods, fixed))
            routes = cluster_ips(services, pods)
            rules = {"control": routes, "data-store": routes}
            for pod in self.present:
                # With the pod's own id: the next pod of this name has a host that is as yet without rules.
                rules[pod.host] = f"# {pod.uid}\n{routes}{self._policy_rules(pod)}"
            new = {host: text for host, text in rules.items() if self._rules.get(host) != text}
            loaded = await asyncio.to_thread(load_rules, self.network, new)
            self._rules = {host: text for host, text in rules.items() if host in loaded or host not in new}
            for pod in pods:
                if pod.uid in self._rules.get(pod.host, ""):
                    pod.ruled.set()

    def _policy_rules(self, pod: Pod) -> str:
        policies = [manifest for (kind, _, _), manifest in self.manifests.items() if kind == "NetworkPolicy"]
        if not policies:
            return policy_rules(_peer(pod), (), (), {})
        namespaces = {
            name: {**self._labels("Namespace", name), "kubernetes.io/metadata.name": name}
            for name in self.namespaces | {INGRESS_NAMESPACE}
        }
        return policy_rules(_peer(pod), policies, [*PARTS, *map(_peer, self.present)], namespaces)

    def _labels(self, kind: str, name: str) -> dict[str, str]:
        manifest = self.manifests.get((kind, "", name), {"metadata": {}})
        return dict(manifest["metadata"].get("labels") or {})

    async def close(self) -> None:
        """End all pods, at once."""
        for workload in self.workloads.values():
            workload.removed = True
        await asyncio.gather(*(pod.end(0.0) for pod in self.pods))


def _peer(pod: Pod) -> Peer:
    return Peer(pod.namespace, pod.address, pod.labels, pod.spec["containers"][0])


def _field(pod: Pod, path: str) -> str:
    known = {
        "metadata.name": pod.name,
        "metadata.namespace": pod.namespace,
        "metadata.uid": pod.uid,
        "status.podIP": pod.address,
        "status.hostIP": CONTROL,
        "spec.nodeName": "one-machine",
    }
    for key, value in pod.labels.items():
        known[f"metadata.labels['{key}']"] = value
    return known[path]


def _expanded(value: str, variables: Mapping[str, str]) -> str:
    for name, found in variables.items():
        value = value.replace(f"$({name})", found)
    return value
