"""How ``loom demo`` shows what happens: a live table on a terminal, lines elsewhere, nothing with ``--json``."""

from __future__ import annotations

import typer
from rich.console import Console, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.spinner import Spinner
from rich.table import Table

from loom.cli.demo_training import Event, LearningRateChanged, ProcessKilled, Progress
from loom.train.controller.job_events import JobEvent


def counted(number: int, one: str, many: str) -> str:
    """Return a number with the noun that fits it."""
    return f"{number} {one if number == 1 else many}"


def sentence(event: Event) -> str:
    """Return a line that tells a reader what happened."""
    match event:
        case Progress():
            return (
                f"step {event.step:4}   loss {event.loss:.3f}   accuracy {event.accuracy:6.1%}   "
                f"{event.samples_per_second:7,.0f} samples/s   call {event.call_ms:.1f} ms"
            )
        case LearningRateChanged():
            return f"learning rate {event.before:g} → {event.after:g}"
        case ProcessKilled():
            return f"killed rank {event.rank} (pid {event.pid}) with SIGKILL"
        case JobEvent(kind="checkpoint_written", data=data):
            return f"checkpoint at step {data['step']}"
        case JobEvent(kind="group_failed", replica=replica, data=data):
            return f"{replica} is lost: {data['reason']}; the others go on"
        case JobEvent(kind="group_restored", replica=replica, data=data):
            return f"{replica} trains again, with the state of {data['restored']}, after {data['seconds']:.1f} s"
        case JobEvent(replica=replica, data=data):
            return f"{replica} trains on host {data['host']}"


class Display:
    """Shows what the training does. This one shows nothing, for ``--json``."""

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Leave the terminal as it was."""

    def wait(self, what: str) -> None:
        """Tell what is under way while there are no events."""

    def show(self, event: Event) -> None:
        """Show what has just happened."""


class LineDisplay(Display):
    """A line for each event, for logs and pipes."""

    def wait(self, what: str) -> None:
        typer.echo(f"{what} …")

    def show(self, event: Event) -> None:
        typer.echo(sentence(event))


class LiveDisplay(Display):
    """A table that grows while the job runs; a failure ends it, and another one follows."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live: Live | None = None
        self.rows: list[Progress] = []
        self.notes: dict[int, list[str]] = {}

    def __exit__(self, *exc_info: object) -> None:
        self._stop()

    def wait(self, what: str) -> None:
        self._start(Spinner("dots", f"{what} …"), transient=True)

    def show(self, event: Event) -> None:
        match event:
            case Progress():
                self.rows.append(event)
                self._draw()
            case LearningRateChanged() | ProcessKilled() | JobEvent(kind="checkpoint_written") if self.rows:
                self.notes.setdefault(self.rows[-1].step, []).append(sentence(event))
                self._draw()
            case JobEvent(kind="group_failed"):
                self._stop()
                self.console.print(Panel(escape(sentence(event)), title="What the job sees", border_style="red"))
            case _:
                self._stop()
                self.console.print(f"[green]✓[/green] {sentence(event)}")

    def _draw(self) -> None:
        if self.live is None:
            self._start(self._table(), transient=False)
        else:
            self.live.update(self._table())

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 2), header_style="bold")
        for column in ("step", "loss", "test accuracy", "samples/s", "call"):
            table.add_column(column, justify="right")
        table.add_column()
        # What does not fit on the screen cannot be redrawn: show the newest rows.
        for row in self.rows[-max(5, self.console.height - 6) :]:
            table.add_row(
                str(row.step),
                f"{row.loss:.3f}",
                f"{row.accuracy:.1%}",
                f"{row.samples_per_second:,.0f}",
                f"{row.call_ms:.1f} ms",
                ", ".join(self.notes.get(row.step, [])),
            )
        return table

    def _start(self, renderable: RenderableType, transient: bool) -> None:
        self._stop()
        self.live = Live(renderable, console=self.console, transient=transient, refresh_per_second=10)
        self.live.start()

    def _stop(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None
            self.rows = []
            self.notes = {}
