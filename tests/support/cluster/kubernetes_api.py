"""The part of the API of Kubernetes that the real kubectl needs here: objects, their states, watching. A test tool.

Served under ``/api``, ``/apis``, ``/openapi`` and ``/version``. What it is given has to be valid for Kubernetes'
own schemas, as it would have to be for an API server.
"""

from __future__ import annotations

import asyncio
import datetime
import itertools
import json
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import kubernetes_validate
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from tests.support.cluster.state import INSTALLED, NotFound, State, Workload

__all__ = ["add_kubernetes_api"]

VERSION = "1.32"

POLL = 0.1
"""Seconds between looks at what is watched."""

LONGEST_WATCH = 600.0

LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"

PROTOBUF = b"k8s\x00"
"""What a body in Kubernetes' protobuf begins with."""

Json = dict[str, Any]


@dataclass(frozen=True)
class Resource:
    """A kind of object, and where it is served."""

    group: str
    """With its version, such as ``apps/v1``."""
    plural: str
    kind: str
    short: str
    namespaced: bool = True

    @property
    def root(self) -> str:
        return f"/apis/{self.group}" if "/" in self.group else f"/api/{self.group}"

    @property
    def paths(self) -> tuple[str, str]:
        """Of all objects, and of one."""
        base = self.root + ("/namespaces/{namespace}" if self.namespaced else "")
        return f"{base}/{self.plural}", f"{base}/{self.plural}/{{name}}"


RESOURCES = [
    Resource("v1", "namespaces", "Namespace", "ns", namespaced=False),
    Resource("v1", "nodes", "Node", "no", namespaced=False),
    Resource("v1", "pods", "Pod", "po"),
    Resource("v1", "services", "Service", "svc"),
    Resource("v1", "secrets", "Secret", ""),
    Resource("v1", "serviceaccounts", "ServiceAccount", "sa"),
    Resource("v1", "persistentvolumeclaims", "PersistentVolumeClaim", "pvc"),
    Resource("apps/v1", "deployments", "Deployment", "deploy"),
    Resource("apps/v1", "statefulsets", "StatefulSet", "sts"),
    Resource("policy/v1", "poddisruptionbudgets", "PodDisruptionBudget", "pdb"),
    Resource("rbac.authorization.k8s.io/v1", "roles", "Role", ""),
    Resource("rbac.authorization.k8s.io/v1", "rolebindings", "RoleBinding", ""),
    Resource("networking.k8s.io/v1", "networkpolicies", "NetworkPolicy", "netpol"),
]

_versions = itertools.count(1)


class Refused(Exception):
    """A request is refused: an HTTP status, the reason in one word, and the sentence that kubectl shows."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.answer = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
            "code": code,
        }


def add_kubernetes_api(app: FastAPI, state: State) -> None:
    """Serve the API. Pods' own routes, which Kubetorch's client uses too, are the controller's."""

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> JSONResponse:
        return JSONResponse(error.answer, error.answer["code"])

    _add_discovery(app)
    for resource in RESOURCES:
        if resource.kind == "Pod":
            continue
        _add_resource(app, state, resource)


def listing(resource: Resource, items: list[Json]) -> Json:
    return {
        "kind": f"{resource.kind}List",
        "apiVersion": resource.group,
        "metadata": {"resourceVersion": str(next(_versions))},
        "items": items,
    }


def _add_resource(app: FastAPI, state: State, resource: Resource) -> None:  # noqa: C901 - many routes, each simple
    many, single = resource.paths

    @app.get(many, response_model=None)
    async def find(
        request: Request, namespace: str = "", fieldSelector: str = "", watch: str = "", timeoutSeconds: float = 0.0
    ) -> Response:
        wanted = fieldSelector.removeprefix("metadata.name=")

        def items() -> list[Json]:
            return [
                found for name in _names(state, resource, namespace, wanted) if (found := look(namespace, name))
            ]

        if watch in ("1", "true"):
            limit = timeoutSeconds or LONGEST_WATCH
            return StreamingResponse(watching(items, request, limit), media_type="application/json")
        return JSONResponse(listing(resource, items()))

    def look(namespace: str, name: str) -> Json | None:
        try:
            return _object(state, resource, namespace, name)
        except NotFound:
            return None

    @app.get(single)
    async def get(name: str, namespace: str = "") -> Json:
        found = look(namespace, name)
        if found is None:
            raise _not_found(resource, name)
        return found

    @app.post(many, status_code=201)
    async def create(request: Request, namespace: str = "") -> Json:
        sent = await request.body()
        body: Json = {"metadata": {"name": _named(sent)}} if sent.startswith(PROTOBUF) else json.loads(sent)
        name = body["metadata"]["name"]
        if look(namespace, name) is not None:
            raise Refused(409, "AlreadyExists", f'{resource.plural} "{name}" already exists')
        return put(body, namespace, name)

    @app.patch(single)
    async def patch(request: Request, name: str, namespace: str = "") -> Json:
        """What kubectl applies comes as a patch; the whole of it is in an annotation, which is put in its place."""
        if look(namespace, name) is None:
            raise _not_found(resource, name)
        changes = json.loads(await request.body())
        annotations = (changes.get("metadata") or {}).get("annotations") or {}
        if LAST_APPLIED in annotations:
            body = json.loads(annotations[LAST_APPLIED])
            body["metadata"]["annotations"] = {**body["metadata"].get("annotations", {}), **annotations}
        else:
            body = _merged(state.manifests[resource.kind, namespace, name], changes)
        return put(body, namespace, name)

    def put(body: Json, namespace: str, name: str) -> Json:
        if namespace and namespace not in state.namespaces:
            raise Refused(404, "NotFound", f'namespaces "{namespace}" not found')
        body = {"apiVersion": resource.group, "kind": resource.kind, **body}
        try:
            kubernetes_validate.validate(body, VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            message = f'{resource.kind} "{name}" is invalid: {error.message}'
            raise Refused(422, "Invalid", message) from error
        if any(one["kind"] == "ServiceAccount" and not one.get("namespace") for one in body.get("subjects") or []):
            message = f'{resource.kind} "{name}" is invalid: subjects[0].namespace: Required value'
            raise Refused(422, "Invalid", message)
        if namespace:
            body["metadata"]["namespace"] = namespace
        known = state.manifests.get((resource.kind, namespace, name), {"metadata": {}})["metadata"]
        body["metadata"] = {
            **body["metadata"],
            "uid": known.get("uid") or str(uuid.uuid4()),
            "creationTimestamp": known.get("creationTimestamp") or _now(),
            "generation": known.get("generation", 0) + 1,
        }
        state.apply(body)
        found = look(namespace, name)
        assert found is not None
        return found

    @app.delete(single)
    async def delete(name: str, namespace: str = "") -> Json:
        """It is answered when the object, and the pods that it owned, are gone."""
        found = look(namespace, name)
        if found is None:
            raise _not_found(resource, name)
        await state.forget(resource.kind, namespace, name)
        details = {"name": name, "kind": resource.plural, "uid": found["metadata"].get("uid", "")}
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}


def _named(sent: bytes) -> str:
    """The name of an object in Kubernetes' protobuf: kubectl sends namespaces so, which are no more than a name."""
    sent = sent.removeprefix(PROTOBUF)
    for wanted in (2, 1, 1):  # the object in its envelope, its metadata, the name; all lengths are below 128
        while sent[0] != wanted << 3 | 2:
            sent = sent[2 + sent[1] :]
        sent = sent[2 : 2 + sent[1]]
    return sent.decode()


def _merged(known: Json, changes: Json) -> Json:
    """As a merge patch; Kubernetes would merge some lists by the names of their items."""
    made = dict(known)
    for key, value in changes.items():
        if value is None:
            made.pop(key, None)
        else:
            made[key] = _merged(made.get(key) or {}, value) if isinstance(value, dict) else value
    return made


def _not_found(resource: Resource, name: str) -> Refused:
    group = resource.group.rpartition("/")[0]
    return Refused(404, "NotFound", f'{resource.plural}{group and "."}{group} "{name}" not found')


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _names(state: State, resource: Resource, namespace: str, wanted: str) -> list[str]:
    if wanted:
        return [wanted]
    known = [name for kind, of, name in state.manifests if (kind, of) == (resource.kind, namespace)]
    if resource.kind == "Service":
        known += [name for of, name in state.services if of == namespace]
    return sorted({*known, *(state.namespaces if resource.kind == "Namespace" else ())})


def _object(state: State, resource: Resource, namespace: str, name: str) -> Json:
    """An object with its state. Raises NotFound."""
    manifest = state.manifests.get((resource.kind, namespace, name))
    found: Json
    if resource.kind == "Namespace" and name in state.namespaces:
        found = {"metadata": {"name": name}, "status": {"phase": "Active"}, **(manifest or {})}
    elif resource.kind == "Service" and namespace != INSTALLED:
        if (namespace, name) not in state.services:
            raise NotFound(name)
        made = state.services[namespace, name].to_json()
        manifest = manifest or {"metadata": made["metadata"], "spec": {}}
        spec = {**manifest["spec"], "clusterIP": made["spec"]["clusterIP"]}
        spec["ports"] = manifest["spec"].get("ports") or made["spec"]["ports"]
        found = {**made, **manifest, "spec": spec, "status": {"loadBalancer": {}}}
    elif resource.kind == "Secret" and (namespace, name) in state.secrets:
        found = {"type": "Opaque", **state.secrets[namespace, name]}
    elif resource.kind in ("Deployment", "StatefulSet") and manifest is not None:
        workload = state.workloads.get((namespace, name))
        if workload is None:
            raise NotFound(name)
        found = _with_status(workload)
    elif manifest is not None:
        found = manifest
    else:
        raise NotFound(name)
    metadata = {"resourceVersion": str(next(_versions)), **found["metadata"]}
    return {"apiVersion": resource.group, "kind": resource.kind, **found, "metadata": metadata}


def _with_status(workload: Workload) -> Json:
    manifest, pods = workload.manifest, [pod for pod in workload.pods if not pod.ending]
    updated = [pod for pod in pods if pod.template == workload.template]
    ready = sum(pod.ready for pod in pods)
    spec = {"replicas": 1, **manifest["spec"]}
    status: Json = {
        "observedGeneration": manifest["metadata"].get("generation", 1),
        "replicas": len(pods),
        "updatedReplicas": len(updated),
        "readyReplicas": ready,
        "availableReplicas": ready,
    }
    if workload.kind == "StatefulSet":
        spec.setdefault("updateStrategy", {"type": "RollingUpdate"})
        finished = sum(pod.ready for pod in updated) >= workload.replicas
        revision = workload.template if finished else ""
        status |= {"currentRevision": revision, "currentReplicas": ready, "updateRevision": workload.template}
    else:
        spec.setdefault("strategy", {"type": "RollingUpdate"})
        available = "True" if ready >= workload.replicas else "False"
        status["conditions"] = [
            {"type": "Available", "status": available, "reason": "MinimumReplicas", "message": ""},
            {"type": "Progressing", "status": "True", "reason": "ReplicaSetUpdated", "message": ""},
        ]
    return {**manifest, "spec": spec, "status": status}


async def watching(items: Callable[[], list[Json]], request: Request, limit: float) -> AsyncIterator[str]:
    """Events of a watch: what there is at first, and then every change, a line of JSON each."""
    known: dict[str, Json] = {}
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit
    while loop.time() < deadline and not await request.is_disconnected():
        now = {item["metadata"]["name"]: item for item in items()}
        for name, item in now.items():
            if _without_version(item) != known.get(name):
                known[name] = _without_version(item)
                yield json.dumps({"type": "MODIFIED", "object": item}) + "\n"
        for name in known.keys() - now.keys():
            yield json.dumps({"type": "DELETED", "object": known.pop(name)}) + "\n"
        await asyncio.sleep(POLL)


def _without_version(item: Json) -> Json:
    metadata = {key: value for key, value in item["metadata"].items() if key != "resourceVersion"}
    return {**item, "metadata": metadata}


def _add_discovery(app: FastAPI) -> None:
    groups = sorted({resource.group for resource in RESOURCES if "/" in resource.group})
    known = {resource.group: resource.root for resource in RESOURCES}

    @app.get("/version")
    async def version() -> Json:
        major, minor = VERSION.split(".")
        return {"major": major, "minor": minor, "gitVersion": f"v{VERSION}.0", "platform": "linux/amd64"}

    @app.get("/api")
    async def core() -> Json:
        return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}

    @app.get("/apis")
    async def api_groups() -> Json:
        described = []
        for group in groups:
            name, _, number = group.rpartition("/")
            at = {"groupVersion": group, "version": number}
            described.append({"name": name, "versions": [at], "preferredVersion": at})
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": described}

    def resources(group: str) -> Callable[[], Any]:
        async def found() -> Json:
            verbs = ["create", "delete", "get", "list", "patch", "watch"]
            described = [
                {
                    "name": one.plural,
                    "singularName": one.kind.lower(),
                    "shortNames": [one.short] if one.short else [],
                    "kind": one.kind,
                    "namespaced": one.namespaced,
                    "verbs": verbs,
                }
                for one in RESOURCES
                if one.group == group
            ]
            return {"kind": "APIResourceList", "groupVersion": group, "resources": described}

        return found

    def validates(group: str) -> Callable[[], Any]:
        """Tells kubectl that what it sends is validated here, so that it need not do so itself."""

        async def found() -> Json:
            paths = {}
            for one in RESOURCES:
                if one.group == group:
                    name, _, number = group.rpartition("/")
                    paths[one.paths[1]] = {
                        "patch": {
                            "parameters": [{"name": "fieldValidation", "in": "query"}],
                            "x-kubernetes-group-version-kind": {"group": name, "version": number, "kind": one.kind},
                        }
                    }
            return {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": VERSION}, "paths": paths}

        return found

    for group, root in known.items():
        app.get(root)(resources(group))
        app.get(f"/openapi/v3{root}")(validates(group))

    @app.get("/openapi/v3")
    async def index() -> Json:
        urls = {root.lstrip("/"): {"serverRelativeURL": f"/openapi/v3{root}"} for root in known.values()}
        return {"paths": urls}
