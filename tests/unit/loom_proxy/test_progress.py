"""What a long wait shows: what is waited for, where, and that nothing of it ever gets into the way of the wait."""

from __future__ import annotations

import asyncio
import io
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from loom.shape import Shape
from loom.wire.bodies import AwaitInitialized, Call, ListMeshes, StartRun, StopMesh
from loom_proxy import progress
from loom_proxy.futures.future import FutureProxy
from loom_proxy.mesh.rank_states import MeshStates
from loom_proxy.progress import Progress, TerminalDisplay, WaitStep, WaitSteps, bar_html, wanted
from tests.unit.loom_proxy.session.silence import Silence

MIB = 1 << 20


class Connection(Silence):
    """What is asked of a connection while it is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.states = MeshStates()
        self.progress: bool | None = True
        self.bytes = (0, 0, 0)

    def moving(self) -> tuple[int, int, int]:
        return self.bytes


class Shown:
    """A display that keeps what it is told to show."""

    def __init__(self) -> None:
        self.steps: list[WaitStep] = []
        self.closed = False
        self.changed = threading.Event()

    def show(self, step: WaitStep, seconds: float) -> None:
        self.steps.append(step)
        self.changed.set()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Progress]:
    def on(connection: Any, display: Callable[[], Any], after: float = 0.0) -> Progress:
        monkeypatch.setattr(progress, "TerminalDisplay", display)
        return Progress(WaitSteps(connection, None), after=after)

    return on


@pytest.fixture
def connection() -> Any:
    connection = Connection()
    connection.states.add(1, "trainers", Shape.row_major({"hosts": 2, "gpus": 2}))
    connection.states.add(2, "counters", Shape.row_major({"hosts": 2, "gpus": 2}), procs=1)
    return connection


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    shown = Shown()
    monkeypatch.setattr(progress, "TerminalDisplay", lambda: shown)
    monkeypatch.setattr(progress, "AFTER", 0.01)
    monkeypatch.setattr(progress, "EVERY", 0.01)
    return shown


# -- whether ------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("choice", "variable", "stderr", "expected"),
    [
        (None, None, io.StringIO(), False),
        (None, None, Terminal(), True),
        (None, "", Terminal(), True),
        (None, "0", Terminal(), False),
        (None, "off", Terminal(), False),
        (None, "1", io.StringIO(), True),
        (True, "0", io.StringIO(), True),
        (False, "1", Terminal(), False),
        (None, None, None, False),
    ],
)
def test_whether_it_is_shown(
    monkeypatch: pytest.MonkeyPatch, choice: bool | None, variable: str | None, stderr: Any, expected: bool
) -> None:
    monkeypatch.delenv("LOOM_PROGRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("LOOM_PROGRESS", variable)
    monkeypatch.setattr(sys, "stderr", stderr)
    assert wanted(choice) is expected


# -- what ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "text"),
    [
        (None, "waiting for the cluster"),
        (StartRun("f", False), "running in the driver"),
        (ListMeshes(), "waiting for the cluster"),
        (Call(99, "add"), "waiting for the cluster"),
        (StopMesh(1, "enough"), "stopping trainers"),
        (AwaitInitialized(1), "starting trainers: 1 of 4 processes"),
        (Call(2, "add"), "starting counters: 1 of 4 processes"),
    ],
)
def test_what_is_waited_for(connection: Any, operation: Any, text: str) -> None:
    connection.states.event("processes_started", {"id": 1, "ranks": [3]})
    assert WaitSteps(connection, operation)().text == text


def test_once_all_processes_run_a_call_waits_for_its_endpoint(connection: Any) -> None:
    connection.states.event("processes_started", {"id": 1, "ranks": [0, 1, 2, 3]})
    assert WaitSteps(connection, Call(2, "add"))().text == "waiting for counters.add"
    assert WaitSteps(connection, AwaitInitialized(1))().text == "starting trainers {hosts: 2, gpus: 2}"


def test_a_large_transfer_says_how_far_it_is(connection: Any) -> None:
    steps = WaitSteps(connection, Call(2, "add"))
    connection.bytes = (100 * MIB, 0, 0)
    assert steps() == WaitStep("sending 0 of 100 MiB", 0, 100 * MIB)
    connection.bytes = (40 * MIB, 0, 0)
    assert steps() == WaitStep("sending 60 of 100 MiB", 60 * MIB, 100 * MIB)
    connection.bytes = (10, 30 * MIB, 90 * MIB)
    assert steps() == WaitStep("receiving 30 of 90 MiB", 30 * MIB, 90 * MIB)


# -- where --------------------------------------------------------------------------------------------------


def test_a_terminal_gets_a_line_that_vanishes() -> None:
    out = io.StringIO()
    display = TerminalDisplay(Console(file=out, force_terminal=True, width=100))
    display.show(WaitStep("starting [bold]x[/bold]: 1 of 4 processes", 1, 4), 2.0)
    assert "starting [bold]x[/bold]: 1 of 4 processes, 2 s" in out.getvalue()
    display.close()
    assert out.getvalue().endswith("\x1b[2K")  # the line is erased


def test_a_notebook_gets_a_bar_and_a_text() -> None:
    assert bar_html(WaitStep("sending <1> MiB", 1, 4), 2.4) == (
        '<div role="status"><progress max="4" value="1" aria-label="sending &lt;1&gt; MiB"></progress> '
        "sending &lt;1&gt; MiB, 2 s</div>"
    )
    assert "progress" not in bar_html(WaitStep("waiting"), 2.4)


# -- during a wait ------------------------------------------------------------------------------------------


def test_a_long_get_is_shown_and_taken_away(connection: Any, shown: Shown) -> None:
    future: FutureProxy[int] = FutureProxy(connection, StartRun("f", False))
    threading.Thread(target=lambda: shown.changed.wait(10) and future._complete(lambda: 5)).start()
    assert future.get(timeout=30) == 5
    assert shown.steps[0].text == "running in the driver"
    assert shown.closed


async def test_a_long_await_is_shown_and_taken_away(connection: Any, shown: Shown) -> None:
    future: FutureProxy[int] = FutureProxy(connection)
    waiter = future.as_asyncio()
    await asyncio.to_thread(shown.changed.wait, 10)
    assert not shown.closed
    future._complete(lambda: 5)
    assert await waiter == 5
    assert shown.closed


def test_a_timeout_is_one_with_progress_too(connection: Any, shown: Shown) -> None:
    future: FutureProxy[int] = FutureProxy(connection)
    with pytest.raises(TimeoutError, match=r"no answer within 0\.1 s"):
        future.get(timeout=0.1)
    assert shown.steps
    assert shown.closed


def test_where_it_is_not_wanted_nothing_is_made(connection: Any, shown: Shown) -> None:
    connection.progress = False
    future: FutureProxy[int] = FutureProxy(connection)
    with pytest.raises(TimeoutError):
        future.get(timeout=0.1)
    assert shown.steps == []


def test_of_several_waits_one_is_shown(connection: Any, on: Callable[..., Progress]) -> None:
    first, second = Shown(), Shown()
    with on(connection, lambda: first):
        assert first.changed.wait(10)
        with on(connection, lambda: second) as unseen:
            unseen.tick()
    assert first.closed
    assert second.steps == []
    with on(connection, lambda: second):
        assert second.changed.wait(10)
    assert second.closed


def test_a_block_that_is_over_before_it_is_due_shows_nothing(connection: Any, on: Callable[..., Progress]) -> None:
    shown = Shown()
    with on(connection, lambda: shown, after=60.0) as quick:
        quick.tick()
    assert shown.steps == []


class Broken:
    def show(self, step: WaitStep, seconds: float) -> None:
        raise OSError("the terminal is gone")

    def close(self) -> None:
        raise OSError("the terminal is gone")


def _no_display() -> Any:
    raise ImportError("no such package")


@pytest.mark.parametrize("display", [Broken, _no_display])
def test_a_display_that_fails_harms_nobody(connection: Any, on: Callable[..., Progress], display: Any) -> None:
    for _ in range(2):  # it lets go of its turn, too
        with on(connection, display) as broken:
            broken.tick()
    shown = Shown()
    with on(connection, lambda: shown):
        assert shown.changed.wait(10)


def test_an_interrupt_in_a_display_ends_the_wait(connection: Any, on: Callable[..., Progress]) -> None:
    class Interrupted(Shown):
        def show(self, step: WaitStep, seconds: float) -> None:
            super().show(step, seconds)
            if threading.current_thread() is threading.main_thread():
                raise KeyboardInterrupt

    interrupted = Interrupted()
    with on(connection, lambda: interrupted) as waiting:
        assert interrupted.changed.wait(10)
        with pytest.raises(KeyboardInterrupt):
            waiting.tick()
    assert interrupted.closed
    shown = Shown()
    with on(connection, lambda: shown):
        assert shown.changed.wait(10)
