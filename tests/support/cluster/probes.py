"""Readiness probes of containers: ``httpGet``, ``tcpSocket`` and ``exec``."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.cluster.pods import Container, Pod

__all__ = ["passes", "port_number"]


def port_number(port: int | str, container: dict[str, Any]) -> int:
    """The number of a container's port, which manifests may give by its name."""
    if isinstance(port, int) or port.isdigit():
        return int(port)
    for known in container.get("ports", []):
        if known.get("name") == port:
            return int(known["containerPort"])
    raise ValueError(f"container {container['name']} has no port named {port}")


async def passes(probe: dict[str, Any], pod: Pod, container: Container) -> bool:
    """Whether a container passes its probe now."""
    try:
        return await asyncio.wait_for(_probe(probe, pod, container), float(probe.get("timeoutSeconds", 1)))
    except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
        return False


async def _probe(probe: dict[str, Any], pod: Pod, container: Container) -> bool:
    if "exec" in probe:
        code, _ = await pod.execute(probe["exec"]["command"], container)
        return code == 0
    where = probe.get("httpGet") or probe["tcpSocket"]
    reader, writer = await asyncio.open_connection(pod.address, port_number(where["port"], container.spec))
    try:
        if "httpGet" not in probe:
            return True
        path = where.get("path", "/")
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {pod.address}\r\nConnection: close\r\n\r\n".encode())
        status = (await reader.readuntil(b"\r\n")).split()[1]
        return 200 <= int(status) < 400
    finally:
        writer.close()
