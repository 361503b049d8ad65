"""The node of a worker's pod, at the cluster's stand-in for the API of Kubernetes."""

from __future__ import annotations

import json
import ssl
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import trustme
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from loom.process.listen import free_ports
from tests.support.cluster.kubernetes_api import add_kubernetes_api

__all__ = ["NODE", "NodeApi", "node_api"]

NODE = "gpu-7"


class NodeApi:
    """The API with one node, and the service account of a pod in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (self.port,) = free_ports(1)
        self.allowed = True
        """Whether the service account may get nodes."""
        authority = trustme.CA()
        self._certificate = authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem
        authority.cert_pem.write_to_path(folder / "ca.crt")
        (folder / "token").write_text("secret\n")
        self._trusted = ssl.create_default_context(cafile=str(folder / "ca.crt"))

    @property
    def environment(self) -> dict[str, str]:
        return {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(self.port)}

    def app(self) -> FastAPI:
        app = FastAPI()
        manifests: dict[tuple[str, str, str], Any] = {}

        def apply(body: Any) -> None:
            manifests[body["kind"], "", body["metadata"]["name"]] = body

        @app.middleware("http")
        async def check(request: Request, following: Any) -> Response:
            if request.headers.get("authorization") == "Bearer secret" and self.allowed:
                answer: Response = await following(request)
                return answer
            return JSONResponse({"kind": "Status", "message": f'nodes "{NODE}" is forbidden'}, 403)

        state: Any = SimpleNamespace(manifests=manifests, services={}, secrets={}, namespaces=set(), apply=apply)
        add_kubernetes_api(app, state)
        apply({"kind": "Node", "metadata": {"name": NODE}, "spec": {}})
        return app

    def taint(self, *keys: str) -> None:
        """Let the node have these taints and no others, as Kubernetes' own schema allows them."""
        spec = {"taints": [{"key": key, "effect": "NoSchedule"} for key in keys]}
        request = urllib.request.Request(
            f"https://127.0.0.1:{self.port}/api/v1/nodes/{NODE}",
            json.dumps({"spec": spec}).encode(),
            {"Authorization": "Bearer secret", "Content-Type": "application/merge-patch+json"},
            method="PATCH",
        )
        urllib.request.urlopen(request, timeout=10, context=self._trusted).close()


@contextmanager
def node_api(folder: Path) -> Iterator[NodeApi]:
    """Serve the API while the block runs. ``folder`` is an empty one."""
    api = NodeApi(folder)
    pem = folder.parent / f"{folder.name}.pem"
    api._certificate.write_to_path(pem)
    started = threading.Event()

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            started.set()

    server = Server(uvicorn.Config(api.app(), "127.0.0.1", api.port, ssl_certfile=pem, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert started.wait(30)
        yield api
    finally:
        server.should_exit = True
        thread.join()
