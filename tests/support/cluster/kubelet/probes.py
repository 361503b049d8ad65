"""Probes of containers, ``httpGet``, ``tcpSocket`` and ``exec``, with their periods and thresholds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

from tests.support.cluster.network import NODE

if TYPE_CHECKING:
    from tests.support.cluster.kubelet.container import Container
    from tests.support.cluster.kubelet.pod import Pod

__all__ = ["passes", "port_number", "verdicts"]

QUICK, QUICK_PROGRAM = 0.3, 1.0
"""Seconds between probes until the first that passes, whatever longer period the manifest has."""


def port_number(port: int | str, container: dict[str, Any]) -> int:
    """The number of a container's port, which manifests may give by its name."""
    if isinstance(port, int) or port.isdigit():
        return int(port)
    for known in container.get("ports", []):
        if known.get("name") == port:
            return int(known["containerPort"])
    raise ValueError(f"container {container['name']} has no port named {port}")


async def verdicts(probe: dict[str, Any], check: Callable[[], Awaitable[bool]]) -> AsyncIterator[bool]:
    """Whether a container passes a probe, whenever that changes, as its manifest has it.

    It fails when it has failed for as long as ``failureThreshold`` probes take, and passes after
    ``successThreshold`` of them.
    """
    period, loop = float(probe.get("periodSeconds", 10)), asyncio.get_running_loop()
    patience = (int(probe.get("failureThreshold", 3)) - 1) * period
    verdict: bool | None = None
    passed, failing_since = 0, None
    await asyncio.sleep(float(probe.get("initialDelaySeconds", 0)))
    while True:
        asked = loop.time()
        if await check():
            passed, failing_since = passed + 1, None
            now = verdict if passed < int(probe.get("successThreshold", 1)) else True
        else:
            passed, failing_since = 0, asked if failing_since is None else failing_since
            now = verdict if asked - failing_since < patience else False
        if now is not None and now is not verdict:
            verdict = now
            yield verdict
        await asyncio.sleep(period if verdict else min(period, QUICK_PROGRAM if "exec" in probe else QUICK))


async def passes(probe: dict[str, Any], pod: Pod, container: Container) -> bool:
    """Whether a container passes its probe now."""
    seconds = float(probe.get("timeoutSeconds", 1))
    try:
        return await asyncio.wait_for(_probe(probe, pod, container, seconds), seconds)
    except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
        return False


async def _probe(probe: dict[str, Any], pod: Pod, container: Container, seconds: float) -> bool:
    if "exec" in probe:
        # What a probe starts ends with it
        command = ["timeout", "--signal=KILL", str(seconds), *probe["exec"]["command"]]
        code, _ = await pod.execute(command, container)
        return code == 0
    where = probe.get("httpGet") or probe["tcpSocket"]
    reader, writer = await asyncio.open_connection(
        pod.address, port_number(where["port"], container.spec), local_addr=(NODE, 0)
    )
    try:
        if "httpGet" not in probe:
            return True
        path = where.get("path", "/")
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {pod.address}\r\nConnection: close\r\n\r\n".encode())
        status = (await reader.readuntil(b"\r\n")).split()[1]
        return 200 <= int(status) < 400
    finally:
        writer.close()
