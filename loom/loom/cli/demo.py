"""``loom demo``: all of Loom in half a minute, on one machine.

The demo starts two worker hosts and a gateway, trains `loom.train.digits` on them through the gateway's WebSocket,
kills a process on purpose and shows its recovery. On a terminal it draws a live table, elsewhere it prints lines,
and with ``--json`` it prints one object at the end.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.spinner import Spinner
from rich.table import Table

import loom
from loom.cli.demo_training import (
    DemoProgress,
    DemoSummary,
    DemoTraining,
    Event,
    LearningRateChanged,
    ProcessKilled,
    describe,
    exit_code,
    summarize,
)
from loom.cli.output import counted, say, say_lines
from loom.extras import GATEWAY_MODULES, require
from loom.train.controller.job_events import JobEvent

if TYPE_CHECKING:
    from loom.rl.settings import RunSummary, StepRecord


RL_MODULES = {**GATEWAY_MODULES, "torch": "torch", "torchft": "torchft-nightly", "safetensors": "safetensors"}
HF_MODULES = {"transformers": "transformers", "tokenizers": "tokenizers", "jinja2": "jinja2"}
ENGINES = ("loom", "vllm", "transformers")
EVERY = 10  # steps of a line
BAR = 40  # characters of a reward of 1


def rl(
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimizer steps to take: 150, or 250 with another engine than loom.")
    ] = None,
    async_level: Annotated[
        int, typer.Option(min=0, help="Steps that the generators' policy may be behind; 0 takes turns.")
    ] = 1,
    weights: Annotated[
        str, typer.Option(help="How weights travel to the generators: files or messages.")
    ] = "files",
    generators: Annotated[int, typer.Option(min=1, help="Processes that sample completions.")] = 1,
    trainers: Annotated[int, typer.Option(min=1, help="Groups that learn from them.")] = 1,
    engine: Annotated[
        str, typer.Option(help="Engine of the generators: loom, or with a small Qwen2 vllm or transformers.")
    ] = "loom",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end, and no lines.")
    ] = False,
) -> None:
    """Teach a small transformer to reverse and to add digits by reward alone.

    With --engine vllm it starts a vLLM server, in the environment that LOOM_VLLM names or images/vllm-cpu.sh made.

    Exits with 0 if the mean reward of the last 20 steps is at least 0.9.
    """
    if engine not in ENGINES:
        raise typer.BadParameter(f"{engine!r} is none of {', '.join(ENGINES)}", param_hint="--engine")
    require(RL_MODULES, "loom demo rl", extra="all")
    if engine != "loom":
        require(HF_MODULES, f"loom demo rl --engine {engine}", extra="hf")
        if weights != "files" and engine == "vllm":
            raise typer.BadParameter("a vLLM server takes weights as files", param_hint="--weights")
    if weights not in ("files", "messages"):
        raise typer.BadParameter(f"{weights!r} is neither files nor messages", param_hint="--weights")
    settings = {
        "async_level": async_level,
        "weights": weights,
        "generators": generators,
        "groups": trainers,
        "engine": engine,
    }
    began = perf_counter()
    try:
        summary = _run(steps, settings, quiet=as_json)
    except KeyboardInterrupt:
        say("interrupted", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    from loom.rl.arithmetic import Arithmetic

    reward, seconds = summary.reward(), perf_counter() - began
    if as_json:
        say(json.dumps({"reward": reward, "seconds": seconds, "steps": [asdict(one) for one in summary.steps]}))
    else:
        say_lines(
            f"\nThe mean reward is {reward:.3f} after {len(summary.steps)} steps, {seconds:.0f} s from start to "
            f"end; {summary.trained} completions were trained on, {summary.dropped} were too old."
        )
    raise typer.Exit(0 if reward >= Arithmetic.threshold else 1)


def _run(steps: int | None, settings: Mapping[str, Any], quiet: bool) -> RunSummary:
    """Start a local cluster, learn on it, and stop the cluster."""
    from loom.rl.arithmetic import arithmetic_run

    def say(text: str) -> None:
        if not quiet:
            say_lines(text)

    say("Starting a worker host and a gateway …")
    with tempfile.TemporaryDirectory(prefix="loom-rl-") as folder, loom.local(hosts=1) as job:
        job.print_logs = False  # the lines of events
        say(f"Watch it in a browser, within a minute: {job.dashboard(view=False).url}")
        say("Starting the generators and the trainers …")
        orchestrator = arithmetic_run(folder, steps=steps, on_step=_print, **settings)
        run = job.run(orchestrator.run, detach=True, name="rl")
        try:
            for record in _records(run.follow()):
                if record.step % EVERY == 0 or record.step == orchestrator.steps - 1:
                    say(_line(record))
        except KeyboardInterrupt:
            run.cancel()
            raise
        found: RunSummary = run.result()
    return found


def _print(record: StepRecord) -> None:
    """Print the record of a step in the cluster, from which the laptop reads it."""
    say(json.dumps(asdict(record)))


def _records(output: Iterator[str]) -> Iterator[StepRecord]:
    """Read the records among the lines that a run prints, whose pieces end anywhere."""
    from loom.rl.settings import StepRecord

    rest = ""
    for text in output:
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            if line.startswith('{"step"'):
                yield StepRecord(**json.loads(line))


def _line(record: StepRecord) -> str:
    bar = "█" * round(BAR * record.reward)
    return f"step {record.step:4}   reward {record.reward:.3f} {bar:{BAR}}  staleness {record.staleness}"


EXIT_INTERRUPTED = 130

MODULES = {
    **GATEWAY_MODULES,
    "torch": "torch",
    "torchft": "torchft-nightly",
    "numpy": "numpy",
    "sklearn": "scikit-learn",
}
"""Modules that the demo needs on this machine, and the distributions that bring them."""


app = typer.Typer()


@app.callback(invoke_without_command=True)
def demo(
    context: typer.Context,
    hosts: Annotated[int, typer.Option(min=1, help="Worker hosts to start on this machine.")] = 2,
    procs: Annotated[int, typer.Option(min=1, help="Training processes on each host.")] = 2,
    steps: Annotated[int, typer.Option(min=5, help="Optimizer steps to take.")] = 300,
    failure: Annotated[
        bool, typer.Option("--failure/--no-failure", help="Kill one process on purpose, and recover.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and no table.")] = False,
) -> None:
    """Train a small network on this machine through Loom, kill one of its processes and recover.

    Exits with 0 if the network then reads at least 95 % of the test digits correctly.
    """
    if context.invoked_subcommand is not None:
        return
    require(MODULES, "loom demo", extra="all")
    try:
        with _display(as_json) as display:
            summary = run_demo(hosts, procs, steps, failure, display)
    except KeyboardInterrupt:
        say("interrupted", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    say_lines(json.dumps(asdict(summary)) if as_json else f"\n{describe(summary)}")
    raise typer.Exit(exit_code(summary))


app.command()(rl)


def _display(as_json: bool) -> Display:
    if as_json:
        return Display()
    return LiveDisplay(Console(highlight=False)) if sys.stdout.isatty() else LineDisplay()


def run_demo(hosts: int, procs: int, steps: int, failure: bool, display: Display) -> DemoSummary:
    """Start a local cluster, train on it, and stop the cluster."""
    began = perf_counter()
    events: list[Event] = []
    display.wait(f"Starting {counted(hosts, 'worker host')} and a gateway")
    with tempfile.TemporaryDirectory(prefix="loom-demo-") as folder, loom.local(hosts=hosts) as job:
        connected = perf_counter()
        processes = counted(hosts * procs, "training process", "training processes")
        display.note(f"Watch it in a browser, within a minute: {job.dashboard(view=False).url}")
        display.wait(f"Connected to {job.url}; starting {processes}")
        try:
            for event in DemoTraining(job, Path(folder), hosts * procs, steps, failure).run():
                events.append(event)
                display.show(event)
        except KeyboardInterrupt:
            display.wait("Interrupted; ending the training, the gateway and the workers")
            raise
    return summarize(events, hosts, procs, connected - began, perf_counter() - began)


def sentence(event: Event) -> str:
    """Return a line of text about an event."""
    match event:
        case DemoProgress():
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
    """The display of the training's events. This one shows nothing, for ``--json``."""

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Restore the terminal."""

    def wait(self, what: str) -> None:
        """Show the current activity while there are no events."""

    def note(self, text: str) -> None:
        """Show a line that stays."""

    def show(self, event: Event) -> None:
        """Show an event."""


class LineDisplay(Display):
    """A line for each event, for logs and pipes."""

    def wait(self, what: str) -> None:
        say(f"{what} …")

    def note(self, text: str) -> None:
        say_lines(text)

    def show(self, event: Event) -> None:
        say(sentence(event))


class LiveDisplay(Display):
    """A table that grows while the job runs, below the other events."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live = Live(console=console, refresh_per_second=10)
        self._waits: RenderableType = ""
        self._rows: list[DemoProgress] = []
        self._notes: dict[int, list[str]] = {}

    def __enter__(self) -> Display:
        self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._waits = ""
        self._draw()
        self._live.stop()

    def wait(self, what: str) -> None:
        self._waits = Spinner("dots", f"{what} …")
        self._draw()

    def note(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)

    def show(self, event: Event) -> None:
        match event:
            case DemoProgress():
                self._waits = ""
                self._rows.append(event)
            case LearningRateChanged() | ProcessKilled() | JobEvent(kind="checkpoint_written") if self._rows:
                self._notes.setdefault(self._rows[-1].step, []).append(sentence(event))
            case JobEvent(kind="group_failed"):
                self.console.print(Panel(escape(sentence(event)), title="What the job sees", border_style="red"))
            case _:
                self.console.print(f"[green]✓[/green] {sentence(event)}")
        self._draw()

    def _draw(self) -> None:
        self._live.update(Group(self._table(), self._waits) if self._rows else self._waits)

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 2), header_style="bold")
        for column in ("step", "loss", "test accuracy", "samples/s", "call"):
            table.add_column(column, justify="right")
        table.add_column()
        # Rows beyond the screen's height cannot be redrawn: show only the newest.
        for row in self._rows[-max(5, self.console.height - 6) :]:
            table.add_row(
                str(row.step),
                f"{row.loss:.3f}",
                f"{row.accuracy:.1%}",
                f"{row.samples_per_second:,.0f}",
                f"{row.call_ms:.1f} ms",
                ", ".join(self._notes.get(row.step, [])),
            )
        return table
