"""A pod's supervised process, when another program has its port."""

from __future__ import annotations

import asyncio
import socket

from loom.process.state import ProcessState
from loom_gateway.pod.process import SupervisedProcess


async def test_a_port_that_is_taken_is_a_state_of_its_own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = SupervisedProcess("worker", "loom_gateway.workers.host", port, list)
        process.keep()
        try:
            while process.state is ProcessState.STARTING:
                await asyncio.wait_for(process._changed.wait(), 30)
        finally:
            await process.end()

    assert process.state is ProcessState.PORT_TAKEN
    assert process.starts == 0
    assert f"port {port} is in use, by process" in process.problem
