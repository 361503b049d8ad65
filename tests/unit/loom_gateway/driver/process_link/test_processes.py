"""Process links of real processes over real sockets: cuts, ends, drivers that go, and what is printed meanwhile."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import psutil
import pytest

from loom.wire.bodies import ProcessEnded
from loom_gateway.driver.process_link import server
from loom_gateway.driver.process_link.link import LinkEnd
from tests.support.network.chaos_proxy import ChaosProxy, Schedule
from tests.support.network.gate import Gate
from tests.unit.loom_gateway.driver.process_link.processes import BOUND, Driver, Process

ONE = (7, 0)


@asynccontextmanager
async def printing(patience: float = 10 * BOUND) -> AsyncIterator[tuple[Driver, Gate, Process]]:
    """A driver, a gate in the line to it, and a process at the other end that has printed ``before``."""
    async with Driver(patience=patience) as driver:
        address = driver.server.address
        with Gate(address.port) as gate, Process(address._replace(port=gate.port)) as process:
            process.tell("print before")
            await driver.until(lambda: driver.printed.get(ONE) == b"before\n")
            yield driver, gate, process


def agent_of(process: Process) -> psutil.Process:
    (agent,) = psutil.Process(process.popen.pid).children()
    return agent


@pytest.mark.guarantees(
    "process link", "A process outlives a reset of its line to the driver, and each printed line arrives once"
)
async def test_a_process_outlives_a_reset_of_its_line_and_prints_each_line_once() -> None:
    async with printing() as (driver, gate, process):
        gate.cut()
        process.tell("print after")
        await driver.until(lambda: driver.printed[ONE] == b"before\nafter\n")
        assert process.popen.poll() is None
        assert driver.gone == []
        assert driver.started == [ONE]


@pytest.mark.guarantees("process link", "What is printed while the network is away comes after it")
async def test_what_is_printed_while_the_network_is_away_comes_after_it() -> None:
    async with printing() as (driver, gate, process):
        gate.shut()
        process.tell("count 5000")
        assert await asyncio.to_thread(gate.knocked.wait, BOUND)
        gate.open()
        expected = b"before\n" + b"".join(b"%d\n" % number for number in range(5000))
        await driver.until(lambda: len(driver.printed[ONE]) >= len(expected))
        assert driver.printed[ONE] == expected
        assert driver.gone == []


@pytest.mark.guarantees("process link", "1,000 cuts of the line neither lose nor double a printed line")
@pytest.mark.parametrize("cuts", [50, pytest.param(1000, marks=pytest.mark.slow)])
async def test_many_cuts_neither_lose_nor_double_a_line(cuts: int) -> None:
    async with Driver() as driver:
        address = driver.server.address
        with ChaosProxy(address.port) as proxy, Process(address._replace(port=proxy.port)) as process:
            process.tell("print ready")
            await driver.until(lambda: ONE in driver.printed)
            proxy.attack(Schedule(seed=5, cuts=cuts, gap=(200, 3000), stall=0.02))
            lines = 0
            while not proxy.calm.is_set():
                process.tell("count 400")
                lines += 400
                await driver.until(lambda: driver.printed[ONE].count(b"\n") > lines)  # noqa: B023
            assert proxy.cuts == cuts
            assert driver.printed[ONE] == b"ready\n" + b"".join(b"%d\n" % number for number in range(400)) * (
                lines // 400
            )
            assert driver.gone == []


@pytest.mark.guarantees("process link", "The end of a process is known at once, whatever the patience")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, 3])
async def test_the_end_of_a_process_is_known_at_once_with_its_last_words(how: int) -> None:
    async with Driver(patience=10 * BOUND) as driver:
        with Process(driver.server.address) as process:
            process.tell("print last words")
            await driver.until(lambda: ONE in driver.printed)
            agent = agent_of(process)
            if how == 3:
                process.tell("end 3")
            else:
                process.popen.send_signal(how)
            await driver.until(lambda: driver.gone == [ONE])
            assert driver.printed[ONE] == b"last words\n"
            end = driver.server.end_of(*ONE)
            assert end is not None
            assert how in (end.signal, end.code)
            await driver.until(lambda: driver.closed)
            process.popen.wait()
            await asyncio.to_thread(agent.wait, BOUND)


@pytest.mark.parametrize("output", [True, False])
async def test_the_end_of_a_process_is_known_that_ends_before_its_agent_has_begun(output: bool) -> None:
    async with Driver(patience=10 * BOUND) as driver:
        with Process(driver.server.address, output=output) as process:
            process.tell("end 0")  # read as soon as the agent's program was started
            await process.ended()
            await driver.until(lambda: driver.gone == [ONE])
            assert driver.server.end_of(*ONE) is not None


async def test_a_driver_that_takes_no_report_of_how_a_process_ended_gets_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bodies: list[Sequence[object]] = []

    class EndOfBefore:
        @staticmethod
        def from_body(body: Sequence[object]) -> ProcessEnded:
            bodies.append(body)
            return ProcessEnded()

    class LineOfBefore(server.ProcessLink):
        def __init__(self, name: str, procs: int, rank: int) -> None:
            super().__init__(name, procs, rank)
            self.line = LinkEnd()  # without the `TellEnd` in it

    monkeypatch.setattr(server, "ProcessEnded", EndOfBefore)
    monkeypatch.setattr(server, "ProcessLink", LineOfBefore)
    async with Driver(patience=10 * BOUND) as driver:
        with Process(driver.server.address) as process:
            process.tell("end 3")
            await driver.until(lambda: driver.gone == [ONE])
    assert [list(body) for body in bodies] == [[]]


async def test_a_process_that_ends_while_the_network_is_away_is_known_to_have_ended_after_it() -> None:
    async with printing() as (driver, gate, process):
        gate.shut()
        process.tell("print last words")
        process.tell("end 0")
        await process.ended()
        assert await asyncio.to_thread(gate.knocked.wait, BOUND)
        assert driver.gone == []
        gate.open()
        await driver.until(lambda: driver.gone == [ONE])
        assert driver.printed[ONE] == b"before\nlast words\n"


@pytest.mark.guarantees("process link", "A process ends at once with its driver")
async def test_a_process_ends_at_once_with_its_driver() -> None:
    async with Driver(patience=10 * BOUND) as driver:
        with Process(driver.server.address) as process:
            process.tell("print before")
            await driver.until(lambda: ONE in driver.printed)
            agent = agent_of(process)
            driver.server.close()  # as the kernel does for a driver that was killed
            assert await process.ended() == -signal.SIGKILL
            await asyncio.to_thread(agent.wait, BOUND)


async def test_either_end_gives_up_the_other_after_the_patience() -> None:
    async with printing(patience=1.0) as (driver, gate, process):
        gate.shut()
        assert await process.ended() == -signal.SIGKILL
        await driver.until(lambda: driver.gone == [ONE])


@pytest.mark.guarantees("process link", "A process that was given up ends when it comes back")
async def test_a_process_that_was_given_up_ends_when_it_comes_back() -> None:
    async with printing() as (driver, gate, process):
        gate.shut()
        driver.server.give_up(*ONE)
        assert process.popen.poll() is None
        gate.open()
        assert await process.ended() == -signal.SIGKILL


async def test_a_process_gets_another_agent_when_its_agent_is_killed() -> None:
    async with printing() as (driver, _, process):
        agent_of(process).kill()
        await driver.until(lambda: len(driver.lines) == 2)
        while not driver.printed[ONE].endswith(b"after\n"):
            process.tell("print after")  # lost, as long as the process has no other agent
            await driver.next_change(0.1)
        assert driver.gone == []
        assert driver.started == [ONE]
        process.popen.kill()
        await driver.until(lambda: driver.gone == [ONE])


async def test_a_process_is_never_blocked_by_a_driver_that_cannot_be_reached() -> None:
    async with printing() as (driver, gate, process):
        gate.shut()
        process.tell(f"flood {20 << 10}")
        process.tell("print the end")
        process.tell("end 0")
        await process.ended()
        gate.open()
        await driver.until(lambda: driver.closed)
        printed = driver.printed[ONE]
        assert printed.endswith(b"the end\n")
        lost = sum(skipped.size for skipped in driver.skipped)
        assert lost > 0
        assert len(printed) + lost == len(b"before\n") + (20 << 20) + len(b"the end\n")


async def test_an_agent_outlives_the_signals_that_end_its_process() -> None:
    async with printing() as (driver, _, process):
        agent = agent_of(process)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            agent.send_signal(number)
        process.tell("print after")
        await driver.until(lambda: driver.printed[ONE] == b"before\nafter\n")
        assert agent.is_running()
