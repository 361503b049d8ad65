"""The watch over the hosts of a session."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loom_gateway.driver.handlers.hosts import HostWatcher
from loom_gateway.driver.monarch.mesh_table import MeshEntry, MeshTable

BOUND = 30.0  # seconds that a test waits for anything
PROCS = 7


@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "living"])
async def test_a_host_is_lost_on_which_processes_of_a_mesh_are_connected(stopped: bool) -> None:
    looked, lost = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await looked.wait()
        server.close()
        writer.close()

    def connected() -> Iterator[tuple[int, int]]:
        looked.set()
        yield PROCS, 0

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    meshes = MeshTable()
    meshes.add(PROCS, MeshEntry("procs", "trainers", None, PROCS, procs=PROCS, ranks=(0,), hosts=(0,)))
    if stopped:
        meshes.retire(PROCS)  # of which its processes may not know yet
    nothing = SimpleNamespace(host_gone=lambda host: None)
    context = SimpleNamespace(
        hosts=SimpleNamespace(addresses=[address], lose=lambda host, reason: None, lost=set(), moved=set()),
        meshes=meshes,
        link_address=SimpleNamespace(patience=10 * BOUND),
        failures=nothing,
        send=lambda message: lost.set(),
    )
    watcher = HostWatcher(cast(Any, context), cast(Any, nothing))

    watcher.start(lambda: None, connected)

    await asyncio.wait_for(lost.wait(), BOUND)
