"""The progress display of a long wait: for processes that start, for a large transfer, or just for an answer.

The display appears after a wait of `AFTER` seconds, so that a quick wait pays nothing: on stderr in a terminal, as
an output of the cell in a notebook. A thread of its own draws it, for every kind of wait. An error of the display
is logged and ends the display, never the wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

from loom.terminal_text import fit_html, fit_line
from loom.wire.bodies import AwaitInitialized, AwaitRun, EndpointCall, ReadRunOutput, StartRun, StopMesh
from loom.wire.body import Body
from loom_proxy.session.waits import Waits

logger = logging.getLogger(__name__)

AFTER = 1.0  # seconds that a wait lasts before anything is shown
EVERY = 0.2  # seconds between two updates of the display
LARGE = 1 << 20  # bytes of the smallest transfer that is shown; a smaller one is over too soon
LEAVE = 1.0  # seconds that the end of a wait gives the display to go away, as it may still be asking for the step
_turn = threading.Lock()  # held by the one wait that is shown. Waits of other threads are not shown meanwhile


class WaitStep(NamedTuple):
    """The current step of a wait."""

    text: str
    done: float = 0
    total: float = 0  # the final value of ``done``; 0 if that is not known


def wanted(choice: bool | None) -> bool:
    """Return whether to show progress: the choice, else ``LOOM_PROGRESS``, else in a terminal or a notebook."""
    if choice is not None:
        return choice
    if variable := os.environ.get("LOOM_PROGRESS"):
        return variable.lower() not in ("0", "off", "no", "false")
    if in_notebook():
        return True
    stderr: Any = sys.stderr
    try:
        return bool(stderr.isatty())
    except Exception:  # noqa: BLE001 - it is closed, None, or any object that a program has put there
        return False


def in_notebook() -> bool:
    """Return whether this process is a Jupyter kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class TerminalDisplay:
    """A line in the terminal, drawn by rich, which vanishes at the end of the wait."""

    def __init__(self, console: Any = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24))
        self._progress = Progress(
            *columns,
            console=console or Console(stderr=True),
            transient=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._progress.add_task("", total=None)
        self._progress.start()

    def show(self, step: WaitStep, seconds: float) -> None:
        from rich.markup import escape as escape_markup

        text = f"{escape_markup(fit_line(step.text))}, {seconds:.0f} s"
        self._progress.update(self._task, description=text, completed=step.done, total=step.total or None)
        self._progress.refresh()

    def close(self) -> None:
        self._progress.stop()


class NotebookDisplay:
    """An output of the running cell, updated in place. rich would need ipywidgets to do so."""

    def __init__(self) -> None:
        shown: Any = import_module("IPython.display")
        self._html: Callable[[str], Any] = shown.HTML
        self._handle = shown.display(shown.HTML(""), display_id=True)

    def show(self, step: WaitStep, seconds: float) -> None:
        self._handle.update(self._html(bar_html(step, seconds)))

    def close(self) -> None:
        self._handle.update(self._html(""))


def bar_html(step: WaitStep, seconds: float) -> str:
    """Return a step as HTML."""
    text = fit_html(step.text)
    bar = ""
    if step.total:
        bar = f'<progress max="{step.total:g}" value="{step.done:g}" aria-label="{text}"></progress> '
    return f'<div role="status">{bar}{text}, {seconds:.0f} s</div>'


class WaitSteps:
    """A callable that returns the current step of a wait, for an operation's answer or for room to send."""

    def __init__(self, connection: Waits, operation: Body | None) -> None:
        self._connection = connection
        self._operation = operation
        self._most_to_send = 0

    def __call__(self) -> WaitStep:
        to_send, received, to_receive = self._connection.moving()
        self._most_to_send = max(self._most_to_send, to_send)
        if to_send >= LARGE:
            return _transfer("sending", self._most_to_send - to_send, self._most_to_send)
        if to_receive >= LARGE:
            return _transfer("receiving", received, to_receive)
        return self._of_operation()

    def _of_operation(self) -> WaitStep:
        operation, states = self._operation, self._connection.states
        if isinstance(operation, (StartRun, AwaitRun, ReadRunOutput)):
            return WaitStep("running in the driver")
        if not isinstance(operation, (EndpointCall, AwaitInitialized, StopMesh)):
            return WaitStep("waiting for the cluster")
        found = states.name_and_shape(operation.mesh)
        if found is None:
            return WaitStep("waiting for the cluster")
        name, shape = found
        if isinstance(operation, StopMesh):
            return WaitStep(f"stopping {name}")
        started, total = states.started(operation.mesh)
        if started < total and operation.mesh in states.unseen:
            return WaitStep(f"starting {name}: {started} of {total} processes", started, total)
        if isinstance(operation, AwaitInitialized):
            return WaitStep(f"starting {name} {shape.extent}")
        return WaitStep(f"waiting for {name}.{operation.endpoint}")


def _transfer(what: str, done: int, total: int) -> WaitStep:
    return WaitStep(f"{what} {done / (1 << 20):,.0f} of {total / (1 << 20):,.0f} MiB", done, total)


class Progress:
    """A ``with`` block whose progress is shown.

    Args:
        steps: returns the current step; called on the thread that draws the display, and by `tick`.
        show: whether to show anything at all.
        after: seconds from now until the display appears.
        waited: seconds that the wait has lasted already.
    """

    def __init__(
        self, steps: Callable[[], WaitStep], show: bool = True, after: float = 0.0, waited: float = 0.0
    ) -> None:
        self._steps = steps
        self._show = show
        now = time.monotonic()
        self._began = now - waited
        self._due = now + after
        self._make = NotebookDisplay if in_notebook() else TerminalDisplay
        self._display: TerminalDisplay | NotebookDisplay | None = None
        self._lock = threading.Lock()
        self._is_shown = False
        self._failed = False
        self._over = threading.Event()
        # The context tells a notebook which cell an output belongs to.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._run,), name="loom-progress", daemon=True)

    def __enter__(self) -> Progress:
        if self._show:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._show:
            self._thread.join(LEAVE)

    def tick(self) -> None:
        """Update the display at once, if it is time for a display."""
        if not self._show or time.monotonic() < self._due:
            return
        with self._lock:
            self._is_shown = self._is_shown or _turn.acquire(blocking=False)
            if not self._is_shown or self._failed:
                return
            self._failed = True
            with _logged():
                if self._display is None:
                    self._display = self._make()
                self._display.show(self._steps(), time.monotonic() - self._began)
                self._failed = False

    def _run(self) -> None:
        pause = max(0.0, self._due - time.monotonic())
        while not self._over.wait(pause):
            self.tick()
            pause = EVERY
        with self._lock:
            if not self._is_shown:
                return
            with _logged():
                if self._display is not None:
                    self._display.close()
            _turn.release()


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the terminal or notebook is gone, or stderr is no stream
        logger.debug("progress is not shown: %s", error, exc_info=True)


def shown(connection: Waits, operation: Body | None = None) -> Progress:
    """Show, if wanted, the progress of a block that goes on with a wait which has lasted `AFTER` seconds."""
    return Progress(WaitSteps(connection, operation), wanted(connection.progress), waited=AFTER)


@contextlib.contextmanager
def shown_on(loop: asyncio.AbstractEventLoop, connection: Waits, operation: Body | None = None) -> Iterator[None]:
    """Show, if wanted, the progress of a block that waits on an event loop, after `AFTER` seconds of it."""
    showing = contextlib.ExitStack()
    steps = WaitSteps(connection, operation)

    def now() -> WaitStep:
        # A notebook's kernel cancels the task of an interrupted cell, but does not wake the task's event loop.
        loop.call_soon_threadsafe(lambda: None)
        return steps()

    def show() -> None:
        showing.enter_context(Progress(now, wanted(connection.progress), waited=AFTER))

    timer = loop.call_later(AFTER, show)
    with showing:
        try:
            yield
        finally:
            timer.cancel()
