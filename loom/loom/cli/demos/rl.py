"""``loom demo rl``: a small transformer learns digit arithmetic by reward alone, on this machine."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

import loom
from loom.cli.output import say, say_lines
from loom.extras import GATEWAY_MODULES, require

if TYPE_CHECKING:
    from loom.rl.settings import RunSummary, StepRecord

EXIT_INTERRUPTED = 130
MODULES = {**GATEWAY_MODULES, "torch": "torch", "torchft": "torchft-nightly", "safetensors": "safetensors"}
EVERY = 10  # steps of a line
BAR = 40  # characters of a reward of 1


def rl(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to take.")] = 150,
    async_level: Annotated[
        int, typer.Option(min=0, help="Steps that the generators' policy may be behind; 0 takes turns.")
    ] = 1,
    weights: Annotated[
        str, typer.Option(help="How weights travel to the generators: files or messages.")
    ] = "files",
    generators: Annotated[int, typer.Option(min=1, help="Processes that sample completions.")] = 1,
    trainers: Annotated[int, typer.Option(min=1, help="Groups that learn from them.")] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end, and no lines.")
    ] = False,
) -> None:
    """Teach a small transformer to reverse and to add digits by reward alone.

    Exits with 0 if the mean reward of the last 20 steps is at least 0.9.
    """
    require(MODULES, "loom demo rl", extra="all")
    if weights not in ("files", "messages"):
        raise typer.BadParameter(f"{weights!r} is neither files nor messages", param_hint="--weights")
    settings = {"async_level": async_level, "weights": weights, "generators": generators, "groups": trainers}
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


def _run(steps: int, settings: Mapping[str, Any], quiet: bool) -> RunSummary:
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
                if record.step % EVERY == 0 or record.step == steps - 1:
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
