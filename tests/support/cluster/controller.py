"""A stand-in for Kubetorch's controller and for the API of Kubernetes. A test tool.

The controller's own image is closed, so this one answers the requests that Kubetorch's public client and pod server
make, in the form in which they read the answers, and starts and ends pods on this machine accordingly.
Run as ``python -m tests.support.cluster.controller OPTIONS``, on the network of the control namespace.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import Body, FastAPI, Query, Request, WebSocket
from fastapi.responses import JSONResponse, PlainTextResponse

from tests.support.cluster.forwarding import serve_forwards
from tests.support.cluster.kubelet.image import Image
from tests.support.cluster.kubelet.pod import Pod
from tests.support.cluster.kubelet.probes import port_number
from tests.support.cluster.kubernetes_api import add_kubernetes_api
from tests.support.cluster.kubetorch_pods import Registered, Servers
from tests.support.cluster.network import CONTROL, Network
from tests.support.cluster.service_accounts import OnlyPermitted
from tests.support.cluster.state import FRONT, INSTALLED, NotFound, State

__all__ = ["make_app"]

Json = Annotated[dict[str, Any], Body()]

PORT = 8081
"""Where pods reach it. The laptop reaches it through nginx only."""

POLL = 0.1

FATAL = ("ImagePullBackOff", "ErrImagePull", "CrashLoopBackOff")
"""Reasons for which a container waits that tell a client not to wait with it."""

FATAL_RESTARTS = 2
"""Ends of a container after which its pod counts as failed, rather than slow."""


FRONT_POD: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": FRONT, "namespace": INSTALLED, "labels": {"app": FRONT}, "uid": FRONT},
    "spec": {"containers": [{"name": "nginx", "image": "nginx"}]},
    "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
}

log = logging.getLogger(__name__)


def make_app(state: State) -> FastAPI:
    """The controller of a cluster."""
    servers = Servers(state)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        publisher = asyncio.create_task(state.publish())
        publisher.add_done_callback(_end_if_failed)
        state.changed.set()
        forwards = await serve_forwards(state, "127.0.0.1")
        yield
        forwards.close()
        publisher.cancel()
        await state.close()

    app = FastAPI(lifespan=lifespan)
    app.state.cluster = state

    @app.exception_handler(NotFound)
    async def not_found(_: Request, error: NotFound) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 404)

    _add_workloads(app, state, servers)
    _add_pods(app, state)
    _add_objects(app, state)
    _add_cluster_tool(app, state, servers)
    add_kubernetes_api(app, state)

    @app.websocket("/controller/ws/pods")
    async def pods_socket(socket: WebSocket) -> None:
        await servers.serve(socket)

    @app.get("/controller/debug/connections")
    async def connections() -> dict[str, Any]:
        return {"connections": [f"{namespace}/{name}" for namespace, name in servers.connected]}

    return app


def _end_if_failed(task: asyncio.Task[None]) -> None:
    """A cluster whose names and rules stay as they are would fail its tests in ways that are hard to read."""
    if not task.cancelled() and task.exception() is not None:
        log.error("the cluster's names and rules are not published any more", exc_info=task.exception())
        os._exit(1)


def _selector(text: str | None) -> dict[str, str]:
    return dict(part.split("=", 1) for part in text.split(",")) if text else {}


def _failure(pod: Pod) -> str:
    """Why a pod will not become ready by waiting; empty if it may."""
    for container in pod.containers:
        crashed = container.waiting == "CrashLoopBackOff" and container.restarts + 1 >= FATAL_RESTARTS
        if container.waiting in FATAL and (crashed or container.waiting != "CrashLoopBackOff"):
            return f"Pod {pod.name}: {container.waiting}: {container.message}"
    return ""


def _add_workloads(app: FastAPI, state: State, servers: Servers) -> None:  # noqa: C901 - many routes, each simple
    def register(request: dict[str, Any]) -> Registered:
        name = request.get("service_name") or request["name"]
        namespace = request["namespace"]
        state.require_namespace(namespace)
        selector = request["specifier"]["selector"]
        found = Registered(
            namespace, name, selector, request.get("module"), request.get("workload_metadata") or {}, request
        )
        servers.registered[namespace, name] = found
        routed = (request.get("service") or {}).get("selector", selector)
        state.add_service(namespace, name, routed, {80: int(request.get("server_port", 32300))})
        if request.get("create_headless_service"):
            state.add_service(namespace, f"{name}-headless", selector, {}, headless=True)
        return found

    @app.post("/controller/deploy")
    async def deploy(request: Json) -> dict[str, Any]:
        found = register(request)
        manifest = request["resource_manifest"]
        manifest["metadata"].setdefault("namespace", found.namespace)
        state.apply(manifest)
        failed = await servers.reload(found, state.workloads[found.namespace, manifest["metadata"]["name"]].kept)
        return {
            "apply_status": "success",
            "workload_status": "partial" if failed else "success",
            "workload_message": "; ".join(failed),
            "service_url": f"{found.name}.{found.namespace}.svc.cluster.local",
            "resource": manifest,
        }

    @app.post("/controller/apply")
    async def apply(request: Json) -> dict[str, Any]:
        state.apply(request["resource_manifest"])
        return {"status": "success", "resource": request["resource_manifest"]}

    @app.post("/controller/workload")
    async def workload(request: Json) -> dict[str, Any]:
        found = register(request)
        failed = await servers.reload(found, state.select(found.namespace, found.selector))
        return {
            "status": "partial" if failed else "success",
            "message": "; ".join(failed),
            "service_url": f"{found.name}.{found.namespace}.svc.cluster.local",
        }

    @app.get("/controller/check-ready/{namespace}/{name}")
    async def check_ready(namespace: str, name: str, timeout: float = 30.0) -> dict[str, Any]:
        state.require_namespace(namespace)
        deadline = time.monotonic() + timeout
        while True:
            workload = state.workloads.get((namespace, name))
            if workload is None:
                raise NotFound(f'deployments.apps "{name}" not found')
            if workload.ready:
                return {"ready": True, "message": f"{name} is ready", "details": {}}
            failures = [line for pod in workload.pods if (line := _failure(pod))]
            if failures:
                return {"ready": False, "message": "; ".join(failures), "details": {"error_type": "pod_error"}}
            if time.monotonic() > deadline:
                return {"ready": False, "message": f"{name} is not ready after {timeout:g} s", "details": {}}
            await asyncio.sleep(POLL)

    def describe(found: Registered, pods: bool) -> dict[str, Any]:
        owner = state.workloads.get((found.namespace, found.name))
        return {
            "name": found.name,
            "namespace": found.namespace,
            "kind": owner.kind if owner else None,
            "specifier": {"type": "label_selector", "selector": found.selector},
            "module": found.module,
            "workload_metadata": found.metadata,
            "labels": found.request.get("labels") or {},
            "annotations": found.request.get("annotations") or {},
            "created_at": "",
            "pods": [pod.to_json() for pod in state.select(found.namespace, found.selector)] if pods else [],
        }

    @app.get("/controller/workload/{namespace}/{name}")
    async def one(namespace: str, name: str) -> dict[str, Any]:
        if (namespace, name) not in servers.registered:
            raise NotFound(f'workloads "{name}" not found')
        return describe(servers.registered[namespace, name], pods=False)

    @app.get("/controller/workloads/{namespace}")
    @app.get("/controller/discover/{namespace}")
    async def discover(
        namespace: str, name_filter: str = "", prefix_filter: str = "", include_pods: bool = False
    ) -> dict[str, Any]:
        found = [
            describe(item, include_pods)
            for item in servers.registered.values()
            if item.namespace == namespace and name_filter in item.name and item.name.startswith(prefix_filter)
        ]
        return {"workloads": found}

    @app.delete("/controller/teardown")
    async def teardown(request: Json) -> dict[str, Any]:
        namespace = request["namespace"]
        wanted = request.get("services") or []
        wanted = [wanted] if isinstance(wanted, str) else list(wanted)
        if request.get("prefix"):
            wanted = [
                name for of, name in servers.registered if of == namespace and name.startswith(request["prefix"])
            ]
        known = [name for name in wanted if servers.registered.pop((namespace, name), None)]
        if not known:
            raise NotFound(f"no workload named {', '.join(wanted)} in namespace {namespace}")
        grace = 0.0 if request.get("force") else None
        owned = [await state.remove(namespace, name, grace) for name in known]
        return {"status": "success", "deleted": known, "deleted_unmanaged": not all(owned)}

    @app.delete("/controller/workload/{namespace}/{name}")
    async def forget(namespace: str, name: str) -> dict[str, Any]:
        if servers.registered.pop((namespace, name), None) is None:
            raise NotFound(f'workloads "{name}" not found')
        await state.remove(namespace, name)
        return {"status": "success"}


def _add_pods(app: FastAPI, state: State) -> None:  # noqa: C901 - many routes, each simple
    @app.get("/controller/pods/{namespace}")
    @app.get("/api/v1/namespaces/{namespace}/pods")
    async def pods(
        namespace: str,
        label_selector: str = "",
        api_selector: str = Query("", alias="labelSelector"),
        api_fields: str = Query("", alias="fieldSelector"),
    ) -> dict[str, Any]:
        state.require_namespace(namespace)
        wanted = _selector(label_selector or api_selector)
        name = api_fields.removeprefix("metadata.name=")
        found = [pod.to_json() for pod in state.select(namespace, wanted) if name in ("", pod.name)]
        if namespace == INSTALLED and wanted.items() <= FRONT_POD["metadata"]["labels"].items():
            found.append(FRONT_POD)
        return {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": found}

    @app.get("/controller/pods/{namespace}/{name}")
    @app.get("/api/v1/namespaces/{namespace}/pods/{name}")
    async def pod(namespace: str, name: str) -> dict[str, Any]:
        return FRONT_POD if (namespace, name) == (INSTALLED, FRONT) else state.pod(namespace, name).to_json()

    @app.get("/controller/pods/{namespace}/{name}/logs")
    @app.get("/api/v1/namespaces/{namespace}/pods/{name}/log")
    async def logs(namespace: str, name: str) -> PlainTextResponse:
        found = state.pod(namespace, name).log
        return PlainTextResponse(found.read_text(errors="replace") if found.exists() else "")

    @app.delete("/api/v1/namespaces/{namespace}/pods/{name}", response_model=None)
    async def delete(namespace: str, name: str, request: Request) -> dict[str, Any] | JSONResponse:
        found, options = state.pod(namespace, name), json.loads(await request.body() or b"{}")
        wanted = (options.get("preconditions") or {}).get("uid", found.uid)
        if wanted != found.uid:
            message = f"Precondition failed: UID in precondition: {wanted}, UID in object meta: {found.uid}"
            return JSONResponse({"kind": "Status", "status": "Failure", "message": message, "code": 409}, 409)
        described = found.to_json()
        if options.get("dryRun") == ["All"]:
            return described
        if "gracePeriodSeconds" in options:
            state.begin_to_delete(found, float(options["gracePeriodSeconds"]))
        else:
            await state.delete(found)
        return described

    @app.post("/api/v1/namespaces/{namespace}/pods/{name}/exec")
    async def execute(namespace: str, name: str, request: Json) -> dict[str, Any]:
        code, output = await state.pod(namespace, name).execute(request["command"])
        return {"output": output, "exit_code": code}

    @app.get("/api/v1/namespaces/{namespace}/{kind}/{name}/forwarded")
    async def forwarded(namespace: str, kind: str, name: str, port: int) -> dict[str, Any]:
        """The pod to which a port-forward goes: kubectl picks one at its start, and stays with it."""
        if (namespace, kind, name) == (INSTALLED, "services", FRONT.removesuffix("-0")):
            return {"pod": FRONT, "port": port}
        if kind == "pods":
            return {"pod": state.pod(namespace, name).name, "port": port}
        service = state.services.get((namespace, name))
        if service is None:
            raise NotFound(f'services "{name}" not found')
        if port not in service.ports:
            raise NotFound(f"Service {name} does not have a service port {port}")
        ready = service.endpoints(state.pods)
        if not ready:
            raise NotFound(f"no ready pod behind service {name}")
        return {"pod": ready[0].name, "port": port_number(service.ports[port], ready[0].spec["containers"][0])}


def _add_objects(app: FastAPI, state: State) -> None:
    @app.get("/controller/services/{namespace}/{name}")
    async def service(namespace: str, name: str) -> dict[str, Any]:
        if (namespace, name) not in state.services:
            raise NotFound(f'services "{name}" not found')
        return state.services[namespace, name].to_json()

    @app.get("/controller/deployments/{namespace}/{name}")
    async def deployment(namespace: str, name: str) -> dict[str, Any]:
        if (namespace, name) not in state.workloads:
            raise NotFound(f'deployments.apps "{name}" not found')
        return state.workloads[namespace, name].manifest

    @app.get("/controller/secrets/{namespace}")
    async def secrets(namespace: str) -> dict[str, Any]:
        return {"items": [item for (of, _), item in state.secrets.items() if of == namespace]}

    @app.post("/controller/secrets/{namespace}")
    async def create_secret(namespace: str, body: Json) -> dict[str, Any]:
        state.apply({**body, "kind": "Secret", "metadata": {**body["metadata"], "namespace": namespace}})
        return body

    @app.get("/controller/secrets/{namespace}/{name}")
    async def secret(namespace: str, name: str) -> dict[str, Any]:
        if (namespace, name) not in state.secrets:
            raise NotFound(f'secrets "{name}" not found')
        return state.secrets[namespace, name]

    @app.delete("/controller/secrets/{namespace}/{name}")
    async def delete_secret(namespace: str, name: str) -> dict[str, Any]:
        if state.secrets.pop((namespace, name), None) is None:
            raise NotFound(f'secrets "{name}" not found')
        return {"status": "success"}

    @app.get("/controller/configmaps/{namespace}")
    async def config_maps(namespace: str) -> dict[str, Any]:
        return {"items": []}

    @app.get("/api/v1/namespaces/{namespace}/configmaps/{name}")
    async def config_map(namespace: str, name: str) -> dict[str, Any]:
        raise NotFound(f'configmaps "{name}" not found')


def _add_cluster_tool(app: FastAPI, state: State, servers: Servers) -> None:
    """What tests do to the cluster, and Kubetorch never."""

    @app.get("/cluster/pods")
    async def pods() -> list[dict[str, Any]]:
        return [
            {
                "name": pod.name,
                "namespace": pod.namespace,
                "address": pod.address,
                "pid": pod.containers[0].init,
                "ready": pod.ready,
                "owner": pod.owner,
                "labels": pod.labels,
                "host": pod.host,
                "state": pod.containers[0].why_not or "Running",
            }
            for pod in state.pods
            if not pod.ending
        ]

    @app.post("/cluster/apply")
    async def apply(manifests: Annotated[list[dict[str, Any]], Body()]) -> dict[str, Any]:
        for manifest in manifests:
            state.apply(manifest)
        return {}

    @app.post("/cluster/remove/{namespace}/{name}")
    async def remove(namespace: str, name: str) -> dict[str, Any]:
        servers.registered.pop((namespace, name), None)
        return {"removed": await state.remove(namespace, name, 0.0)}

    @app.post("/cluster/kill/{namespace}/{name}")
    async def kill(namespace: str, name: str) -> dict[str, Any]:
        await state.kill(state.pod(namespace, name))
        return {}


def main() -> None:
    """Serve until SIGTERM; then end all pods."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--prefix", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--namespaces", type=json.loads, default=["default"])
    parser.add_argument("--missing-images", type=json.loads, default=[])
    parser.add_argument("--images", type=json.loads, default={})
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    asyncio.run(_serve(options))


async def _serve(options: argparse.Namespace) -> None:
    network = Network(options.prefix)
    images = {name: Image(**says) for name, says in options.images.items()}
    state = State(network, options.folder, options.namespaces, options.missing_images, images)
    for_pods = socket.create_server((CONTROL, PORT))
    for_nginx = socket.create_server(("127.0.0.1", PORT))
    for_tests = socket.socket(socket.AF_UNIX)
    for_tests.bind(str(options.folder / "controller.sock"))
    app = OnlyPermitted(make_app(state), state.accounts)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: setattr(server, "should_exit", True))
    for_tests.listen()
    await server.serve([for_pods, for_nginx, for_tests])


if __name__ == "__main__":
    main()
