"""The WebSocket over which Kubetorch's pod servers learn what to run, and are told to load it again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fastapi import WebSocket, WebSocketDisconnect

from tests.support.cluster.kubelet.pod import Pod
from tests.support.cluster.state import State

__all__ = ["Registered", "Servers"]

RELOADED = 120.0
"""Seconds that a pod has for loading its code again."""


@dataclass(frozen=True)
class Registered:
    """What a client registered: a module for some pods. The fields are those of its request."""

    namespace: str
    name: str
    selector: dict[str, str]
    module: dict[str, Any] | None
    metadata: dict[str, Any]
    request: dict[str, Any]

    def message(self, action: str) -> dict[str, Any]:
        """What a pod server reads."""
        module = self.module or {}
        pointers = dict(module.get("pointers") or {})
        return {
            "action": action,
            "module": {
                **pointers,
                "callable_type": module.get("type"),
                "distributed_config": self.metadata.get("distributed_config"),
            },
            "service_name": self.name,
            "namespace": self.namespace,
            "service_dns": f"{self.name}-headless.{self.namespace}.svc.cluster.local",
            "deployment_mode": self.metadata.get("deployment_mode"),
            "username": self.metadata.get("username"),
            "runtime_config": self.metadata.get("runtime_config") or {},
            "launch_id": self.metadata.get("launch_id"),
            "dockerfile": self.metadata.get("dockerfile", ""),
        }


@dataclass
class _Connection:
    socket: WebSocket
    acknowledged: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)


class Servers:
    """The pod servers that are connected."""

    def __init__(self, state: State) -> None:
        self.registered: dict[tuple[str, str], Registered] = {}
        self._state = state
        self._connections: dict[tuple[str, str], _Connection] = {}

    @property
    def connected(self) -> list[tuple[str, str]]:
        """The namespaces and names of the pods that are connected."""
        return list(self._connections)

    async def serve(self, socket: WebSocket) -> None:
        """Serve one pod server until it goes."""
        await socket.accept()
        hello = await socket.receive_json()
        key = hello["namespace"], hello["pod_name"]
        connection = self._connections[key] = _Connection(socket)
        try:
            found = self._for_pod(*key, hello.get("service_name", ""))
            # Without a module, the server starts without one, and waits for a reload.
            await socket.send_json(found.message("metadata") if found else {"action": "metadata"})
            while True:
                message = await socket.receive_json()
                if message.get("action") == "reload_ack":
                    connection.acknowledged.put_nowait(message)
        except WebSocketDisconnect:
            pass
        finally:
            connection.acknowledged.put_nowait({"status": "error", "message": "the connection was lost"})
            if self._connections.get(key) is connection:
                del self._connections[key]

    def _for_pod(self, namespace: str, name: str, service: str) -> Registered | None:
        if service:
            return self.registered.get((namespace, service))
        labels = self._state.pod(namespace, name).labels
        for found in self.registered.values():
            if found.namespace == namespace and found.selector.items() <= labels.items():
                return found
        return None

    async def reload(self, registered: Registered, pods: Iterable[Pod]) -> list[str]:
        """Have pods load what is registered now; what went wrong, a line a pod."""
        connections = [
            (pod.name, self._connections[pod.namespace, pod.name])
            for pod in pods
            if (pod.namespace, pod.name) in self._connections
        ]
        failed = await asyncio.gather(*(self._reload(registered, name, to) for name, to in connections))
        return [line for line in failed if line]

    async def _reload(self, registered: Registered, name: str, connection: _Connection) -> str:
        with contextlib.suppress(RuntimeError):
            await connection.socket.send_json(registered.message("reload"))
        try:
            answer = await asyncio.wait_for(connection.acknowledged.get(), RELOADED)
        except asyncio.TimeoutError:
            return f"pod {name} did not reload within {RELOADED:g} s"
        return "" if answer.get("status") == "ok" else f"pod {name}: {answer.get('message')}"
