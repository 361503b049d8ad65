"""``loom demo``: all of Loom in half a minute, on one machine.

The demo starts two worker hosts and a gateway, trains `loom.train.digits` on them through the gateway's WebSocket,
kills a process on purpose and shows its recovery. On a terminal it draws a live table, elsewhere it prints lines,
and with ``--json`` it prints one object at the end.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer
from rich.console import Console

import loom
from loom.cli.demo_display import Display, LineDisplay, LiveDisplay
from loom.cli.demo_training import DemoTraining, Event, Summary, describe, exit_code, summarize
from loom.cli.output import counted
from loom.extras import GATEWAY_MODULES, require

EXIT_INTERRUPTED = 130

MODULES = {
    **GATEWAY_MODULES,
    "torch": "torch",
    "torchft": "torchft-nightly",
    "numpy": "numpy",
    "sklearn": "scikit-learn",
}
"""Modules that the demo needs on this machine, and the distributions that bring them."""


def demo(
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
    require(MODULES, "loom demo", extra="all")
    try:
        with _display(as_json) as display:
            summary = run_demo(hosts, procs, steps, failure, display)
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    typer.echo(json.dumps(asdict(summary)) if as_json else f"\n{describe(summary)}")
    raise typer.Exit(exit_code(summary))


def _display(as_json: bool) -> Display:
    if as_json:
        return Display()
    return LiveDisplay(Console(highlight=False)) if sys.stdout.isatty() else LineDisplay()


def run_demo(hosts: int, procs: int, steps: int, failure: bool, display: Display) -> Summary:
    """Start a local cluster, train on it, and stop the cluster."""
    began = perf_counter()
    events: list[Event] = []
    display.wait(f"Starting {counted(hosts, 'worker host')} and a gateway")
    with tempfile.TemporaryDirectory(prefix="loom-demo-") as folder, loom.local(hosts=hosts) as job:
        connected = perf_counter()
        processes = counted(hosts * procs, "training process", "training processes")
        display.wait(f"Connected to {job.url}; starting {processes}")
        try:
            for event in DemoTraining(job, Path(folder), hosts * procs, steps, failure).run():
                events.append(event)
                display.show(event)
        except KeyboardInterrupt:
            display.wait("Interrupted; ending the training, the gateway and the workers")
            raise
    return summarize(events, hosts, procs, connected - began, perf_counter() - began)
