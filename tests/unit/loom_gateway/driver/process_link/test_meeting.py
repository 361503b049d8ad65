"""Where the processes of a mesh may meet: real processes agree on it over their process links."""

from __future__ import annotations

import asyncio
import contextlib

from tests.support.network.gate import Gate
from tests.unit.loom_gateway.driver.process_link.processes import Driver, Process

PROCS = 7


async def said(driver: Driver, process: Process, rank: int, what: str) -> str:
    """Return the line that a process prints when it is told to do something."""
    process.tell(what)
    await driver.until(lambda: driver.printed.get((PROCS, rank), b"").endswith(b"\n"))
    return driver.printed.pop((PROCS, rank)).decode().strip()


async def test_processes_of_a_mesh_meet_at_a_port_that_the_first_of_them_can_listen_on() -> None:
    async with Driver() as driver:
        with contextlib.ExitStack() as running:
            # The last first: it waits until the first one has come.
            processes = {}
            for rank in (2, 1, 0):
                process = Process(driver.server.address, PROCS, rank, meets=True)
                processes[rank] = running.enter_context(process)
                if rank:
                    await driver.until(lambda: (PROCS, rank) in driver.started)  # noqa: B023
            places = {await said(driver, processes[rank], rank, "master") for rank in processes}
            assert len(places) == 1
            assert places.pop().startswith("('127.0.0.1', ")
            assert await said(driver, processes[0], 0, "listen") == "listening"


async def test_processes_of_two_meshes_meet_at_different_ports() -> None:
    async with Driver() as driver:
        with (
            Process(driver.server.address, 7, meets=True) as one,
            Process(driver.server.address, 8, meets=True) as other,
        ):
            for process in (one, other):
                process.tell("master")
            await driver.until(lambda: len(driver.printed) == 2)
            assert driver.printed[7, 0] != driver.printed[8, 0]


async def test_a_mesh_whose_first_process_is_gone_before_it_came_starts_without_a_place_to_meet() -> None:
    async with Driver() as driver:
        with Process(driver.server.address, PROCS, 1, meets=True) as process:
            await driver.until(lambda: (PROCS, 1) in driver.started)
            driver.server.give_up(PROCS, 0)
            assert await said(driver, process, 1, "master") == "None"


async def test_a_process_that_starts_after_the_first_one_has_ended_does_not_wait_for_it() -> None:
    async with Driver() as driver:
        with Process(driver.server.address, PROCS, 0, meets=True) as first:
            assert await said(driver, first, 0, "master") != "None"
            first.tell("end 0")
            await driver.until(lambda: driver.gone == [(PROCS, 0)] and driver.closed)
        with Process(driver.server.address, PROCS, 1, meets=True) as process:
            assert await said(driver, process, 1, "master") == "None"


async def test_a_process_that_was_cut_off_while_it_waited_for_the_first_one_still_gets_the_place() -> None:
    async with Driver() as driver:
        address = driver.server.address
        with Gate(address.port) as gate, Process(address._replace(port=gate.port), PROCS, 1, meets=True) as waiting:
            await driver.until(lambda: (PROCS, 1) in driver.started)
            gate.cut()
            with Process(address, PROCS, 0, meets=True) as first:
                place = await said(driver, first, 0, "master")
                assert place == await said(driver, waiting, 1, "master")
            assert await asyncio.to_thread(waiting.popen.poll) is None
