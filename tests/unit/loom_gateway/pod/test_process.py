"""A pod's supervised process: what has its port already, and what becomes of one that ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from loom.process.child import Child, ProcessState, python
from loom.process.listen import free_ports
from loom_gateway.pod.supervisor import SupervisedProcess
from tests.support.paths import ROOT

ANNOUNCES = "tests.unit.loom_gateway.pod.announces"
"""A module that listens on the port that it is given, and says so."""


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


async def until(process: SupervisedProcess, *states: ProcessState) -> None:
    while process.state not in states:
        process._changed.clear()
        await asyncio.wait_for(process._changed.wait(), 30)


@asynccontextmanager
async def kept(port: int) -> AsyncIterator[SupervisedProcess]:
    process = SupervisedProcess("worker", ANNOUNCES, port, lambda: [str(port)])
    process.keep()
    try:
        yield process
    finally:
        await process.end()


async def test_a_process_that_ends_is_started_again() -> None:
    async with kept(*free_ports(1)) as process:
        await until(process, ProcessState.LISTENING)
        assert process.problem == ""
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        await until(process, ProcessState.ENDED)
        assert "ended with code -9" in process.problem
        await until(process, ProcessState.LISTENING)
        assert process.starts == 2


async def test_a_process_that_is_restarted_is_another() -> None:
    async with kept(*free_ports(1)) as process:
        await until(process, ProcessState.LISTENING)
        before = process.pid
        await process.restart()
        assert process.pid != before


async def test_a_process_that_runs_already_is_found_and_ended_in_the_end() -> None:
    (port,) = free_ports(1)
    earlier = Child("an earlier worker", python(ANNOUNCES, str(port)), parent_pipe=False)
    await asyncio.wrap_future(earlier.ready)
    async with kept(port) as process:
        await until(process, ProcessState.LISTENING)
        assert process.pid == earlier.pid
        assert process.starts == 0

    await asyncio.wait_for(asyncio.wrap_future(earlier.ended), 10)


async def test_a_port_that_is_taken_is_a_state_of_its_own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with kept(port) as process:
            await until(process, ProcessState.PORT_TAKEN)
            assert process.starts == 0
            assert f"port {port} is in use, by process" in process.problem
    assert process.state is ProcessState.ENDED
