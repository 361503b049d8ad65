"""The command line of the benchmarks."""

from __future__ import annotations

import inspect
import json
import os
import shlex
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from rich.console import Console, RenderableType

from tests.benchmarks import (
    analyze,
    calls,
    engines,
    gpu_rl,
    gpus,
    handshakes,
    lanes,
    large,
    meshes,
    methods,
    ports,
    ray_environment,
    recovery,
    report,
    run,
    scale,
    siege,
    spans,
    tensors,
    threadlet,
    two_looms,
    weaver,
)
from tests.benchmarks.caller_process import CallerError
from tests.benchmarks.machine import describe_machine
from tests.benchmarks.page.plan import PagePlan
from tests.benchmarks.queue.plan import QueuePlan, ServersPlan
from tests.benchmarks.results_page import results_page

WIDTH = 110
"""Columns of a report that goes to a file or a pipe."""

Write = Annotated[
    Path | None, typer.Option("--write", metavar="FILE", help="Write the run's page of docs/results to this file.")
]

app = typer.Typer(add_completion=False, no_args_is_help=True)


Rounds = Annotated[int, typer.Option(min=1, help="Rounds; in each, everything is measured once.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Check = Annotated[bool, typer.Option("--check", help="Exit with 1 if a budget is missed.")]


@app.callback()
def benchmarks() -> None:
    """Measure Loom on this machine, beside its budgets."""


@app.command("calls")
def measure_calls(
    rounds: Rounds = 5,
    as_json: Json = False,
    check: Check = False,
    write: Write = None,
    ray: Annotated[bool, typer.Option("--ray", help="Measure Ray Client as well.")] = False,
    ray_python: Annotated[
        Path | None,
        typer.Option(envvar="LOOM_RAY_PYTHON", help="The interpreter of an environment with ray[client]."),
    ] = None,
    only: Annotated[
        list[calls.SubjectName] | None,
        typer.Option(help="Measure this subject only; may be repeated. Ratios need all of theirs."),
    ] = None,
    before: Annotated[
        Path | None,
        typer.Option(
            metavar="PYTHON",
            exists=True,
            dir_okay=False,
            help="Measure another Loom as well: that of this interpreter's environment.",
        ),
    ] = None,
) -> None:
    """One call, pipelined calls and a 64 MiB echo: raw WebSocket, native Monarch and through Loom."""
    # Those that need an interpreter are added below.
    subjects = [calls.SUBJECTS[name] for name in only or calls.DEFAULT_SUBJECTS if name in calls.SUBJECTS]
    notes = []
    if ray:
        try:
            subjects.append(ray_environment.subject(ray_python))
        except ray_environment.RayNotInstalled as error:
            notes.append(f"Ray Client was not measured: {error}")

    if before is not None:
        subjects.append(two_looms.before(before))

    def measure(say: Callable[[str], object]) -> Findings:
        measured = calls.measure(subjects, calls.Plan(rounds=rounds), say)
        compared = two_looms.before_ratios(measured) if before is not None else ()
        return report.Report(_command(), describe_machine(), measured, report.ratios(measured), (*notes, *compared))

    _report(measure, as_json, check, write)


class Findings(Protocol):
    """What a benchmark found."""

    @property
    def within_budgets(self) -> bool: ...

    def as_json(self) -> dict[str, Any]: ...

    def as_table(self) -> RenderableType: ...


def _report(
    measure: Callable[[Callable[[str], object]], Findings], as_json: bool, check: bool, write: Path | None
) -> None:
    """Measure, saying how far it is; print and write what was found; exit with 1 if a budget is missed.

    Findings that have a method ``plot`` write a picture next to the page.
    """
    log = Console(stderr=True)
    with log.status("starting") as status:
        try:
            findings = measure(status.update if log.is_terminal else log.print)
        except CallerError as error:
            log.print(f"error: {error}", style="red", highlight=False, markup=False)
            raise typer.Exit(1) from error
    if as_json:
        print(json.dumps(findings.as_json(), indent=2))
    else:
        console = Console()
        if not console.is_terminal:
            console.width = WIDTH
        console.print(findings.as_table())
    if write is not None:
        page = _page(findings)
        if (plot := getattr(findings, "plot", None)) is not None:
            plot(write.with_suffix(".png"))
            page += f"\n![The figures of the tables]({write.with_suffix('.png').name})\n"
        write.write_text(page)
    if check and not findings.within_budgets:
        raise typer.Exit(1)


def _page(findings: Findings) -> str:
    suite = sys.argv[1]
    about = next(inspect.getdoc(one.callback) for one in app.registered_commands if one.name == suite)
    return results_page(suite, about or "", findings.as_table(), datetime.now(timezone.utc), os.getloadavg()[1])


def _command() -> str:
    return f"python -m tests.benchmarks {shlex.join(sys.argv[1:])}"


@app.command("large")
def measure_large(
    rounds: Rounds = 5,
    mebibytes: Annotated[int, typer.Option("--size", min=1, max=1024, help="MiB of the tensor.")] = 1024,
    as_json: Json = False,
    check: Check = False,
    write: Write = None,
) -> None:
    """A large tensor's echo, small calls while it moves, the gateway's memory, and a stream's first result."""
    plan = large.LargePlan(mebibytes << 20, rounds)
    _report(lambda say: large.measure(plan, _command(), say), as_json, check, write)


@app.command("meshes")
def measure_meshes(
    rounds: Rounds = 3,
    meshes_a_round: Annotated[int, typer.Option("--meshes", min=10, help="Actor meshes of a round.")] = 200,
    as_json: Json = False,
    write: Write = None,
) -> None:
    """What a stopped actor mesh leaves in the memory of each process: Monarch alone, and through Loom."""
    plan = meshes.MeshPlan(rounds, meshes_a_round)
    _report(lambda say: meshes.measure(plan, _command(), say), as_json, False, write)


@app.command("methods")
def measure_methods(
    rounds: Rounds = 5,
    calls_a_round: Annotated[int, typer.Option("--calls", min=20, help="Calls of each kind in a round.")] = 1000,
    as_json: Json = False,
    check: Check = False,
    write: Write = None,
) -> None:
    """A method call of a remote object, beside an endpoint call."""
    plan = methods.MethodPlan(rounds, calls_a_round)
    _report(lambda say: methods.measure(plan, _command(), say), as_json, check, write)


@app.command("ports")
def measure_ports(
    rounds: Rounds = 5,
    messages: Annotated[int, typer.Option(min=10, help="Messages of one round.")] = 10_000,
    as_json: Json = False,
    check: Check = False,
    write: Write = None,
) -> None:
    """Messages of one actor to a receiver, a second: native Monarch, and through Loom to the laptop."""
    plan = ports.PortPlan(rounds, messages)
    _report(lambda say: ports.measure(plan, _command(), say), as_json, check, write)


@app.command("handshakes")
def measure_doors(
    rounds: Rounds = 3,
    seconds: Annotated[float, typer.Option(min=0.1, max=60, help="How long each measurement takes.")] = 10.0,
    per_second: Annotated[int, typer.Option(min=1, max=1000, help="Bad handshakes and tokens a second.")] = 200,
    as_json: Json = False,
    check: Check = False,
    write: Write = None,
) -> None:
    """One call while bad handshakes and wrong tokens come in, beside one while nothing else happens."""
    plan = handshakes.HandshakePlan(rounds, seconds, per_second)
    _report(lambda say: handshakes.measure(plan, _command(), say), as_json, check, write)


@app.command("siege")
def measure_siege(
    rounds: Rounds = siege.SiegePlan.rounds,
    connections: Annotated[int, typer.Option(min=1, max=10_000, help="Connections without a token.")] = 2000,
    sessions: Annotated[int, typer.Option(min=1, max=64, help="Sessions that make calls.")] = 8,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=60, help="How long each measurement takes.")
    ] = siege.SiegePlan.seconds,
    kind: Annotated[list[str] | None, typer.Option(help="Only this kind of connection; may be repeated.")] = None,
    as_json: Json = False,
    check: Check = False,
    write: Write = None,
) -> None:
    """Calls of sessions beside thousands of connections that show no token, and without these."""
    plan = siege.SiegePlan(rounds, connections, sessions, seconds, kinds=tuple(kind or siege.SiegePlan.kinds))
    _report(lambda say: siege.measure(plan, _command(), say), as_json, check, write)


@app.command("http")
def measure_http(
    rounds: Rounds = 5,
    as_json: Json = False,
    write: Write = None,
) -> None:
    """The same calls through Loom over a WebSocket and over plain HTTP."""

    def measure(say: Callable[[str], object]) -> Findings:
        measured = calls.measure(two_looms.HTTP_SUBJECTS, calls.Plan(rounds=rounds), say)
        notes = two_looms.http_ratios(measured)
        return report.Report(_command(), describe_machine(), measured, report.ratios(measured), notes)

    _report(measure, as_json, False, write)


@app.command("lanes")
def measure_lanes(
    rounds: Rounds = 3,
    mebibytes: Annotated[int, typer.Option("--size", min=1, max=1024, help="MiB of the argument.")] = 32,
    as_json: Json = False,
    check: Check = False,
    write: Write = None,
) -> None:
    """Small calls while a large argument moves over a narrow line: with a connection for bulk, and without."""
    plan = lanes.LanesPlan(rounds, mebibytes << 20)
    _report(lambda say: lanes.measure(plan, _command(), say), as_json, check, write)


@app.command("threadlet")
def measure_threadlet(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of single calls.")] = 3,
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of trainings without a threadlet and with one.")] = (
        threadlet.ThreadletPlan.pairs
    ),
    alone: Annotated[
        int, typer.Option(min=1, help="The same, in one process.")
    ] = threadlet.ThreadletPlan.pairs_alone,
    procs: Annotated[int, typer.Option(min=1, help="Processes that train.")] = threadlet.ThreadletPlan.procs,
    as_json: Json = False,
    check: Check = False,
    write: Write = None,
) -> None:
    """What a threadlet costs the training thread: one call, and a training that publishes every step."""
    plan = threadlet.ThreadletPlan(rounds, procs=procs, pairs=pairs, pairs_alone=alone)
    _report(lambda say: threadlet.measure(plan, _command(), say), as_json, check, write)


@app.command("run")
def measure_run(
    rounds: Rounds = run.RunPlan.rounds,
    as_json: Json = False,
    check: Check = False,
    write: Write = None,
) -> None:
    """What `loom run` costs a training: the time within its hooks in a step, and the later start."""
    plan = run.RunPlan(rounds)
    _report(lambda say: run.measure(plan, _command(), say), as_json, check, write)


@app.command("spans")
def measure_spans(
    rounds: Rounds = spans.SpansPlan.rounds,
    as_json: Json = False,
    check: Check = False,
    write: Write = None,
) -> None:
    """What events and spans of `loom.tracing` cost: one of each, and all of a step."""
    plan = spans.SpansPlan(rounds)
    _report(lambda say: spans.measure(plan, _command(), say), as_json, check, write)


@app.command("tensors")
def measure_tensors(
    rounds: Rounds = tensors.TensorsPlan.rounds,
    as_json: Json = False,
    check: Check = False,
    write: Write = None,
) -> None:
    """Lazy tensors: an operation on the laptop, the way through the gateway, a read, and a training step."""
    plan = tensors.TensorsPlan(rounds)
    _report(lambda say: tensors.measure(plan, _command(), say), as_json, check, write)


@app.command("gpu-rl")
def measure_gpu_rl(
    steps: Annotated[int, typer.Option(min=2, help="Steps of the run.")] = 10,
    cpus: Annotated[bool, typer.Option("--cpus", help="Try it on CPUs, with a small model.")] = False,
    as_json: Json = False,
    write: Write = None,
) -> None:
    """Reinforcement learning with one engine and one trainer on GPUs, in less than 10 minutes."""
    plan = gpu_rl.GpuRlPlan(steps)
    if cpus:
        plan = gpu_rl.GpuRlPlan(steps, batch=16, layers=2, hidden=128, cpus=True)
    _report(lambda say: gpu_rl.measure(plan, _command(), say), as_json, False, write)


@app.command("gpus")
def measure_gpus(
    rounds: Rounds = gpus.GpusPlan.rounds,
    as_json: Json = False,
    write: Write = None,
) -> None:
    """What Loom does with a GPU: NVML, tensors in calls, NCCL and FSDP2, checkpoints, restarts, lazy tensors."""
    plan = gpus.GpusPlan(rounds)
    _report(lambda say: gpus.measure(plan, _command(), say), as_json, False, write)


@app.command("recovery")
def measure_recovery(
    rounds: Rounds = recovery.RecoveryPlan.rounds,
    as_json: Json = False,
    check: Check = False,
    write: Write = None,
) -> None:
    """How soon three groups that train are complete again after some were killed, or one was cut off."""
    plan = recovery.RecoveryPlan(rounds)
    _report(lambda say: recovery.measure(plan, _command(), say), as_json, check, write)


@app.command("weaver")
def measure_weaver(
    rounds: Rounds = 3,
    seconds: Annotated[float, typer.Option(min=0.1, max=60, help="How long the weaver is kept busy.")] = 10.0,
    replicas: Annotated[
        list[int] | None, typer.Option(min=1, help="Simulated replicas at 1 Hz; may be repeated.")
    ] = None,
    as_json: Json = False,
    check: Check = False,
    write: Write = None,
) -> None:
    """Reports and replicas that the weaver can take, and how soon a command is applied and a death noticed."""
    plan = weaver.WeaverPlan(rounds, seconds, replicas=tuple(replicas or weaver.WeaverPlan.replicas))
    _report(lambda say: weaver.measure(plan, _command(), say), as_json, check, write)


@app.command("scale")
def measure_scale(
    sessions: Annotated[int, typer.Option(min=1, help="Sessions of stand-ins for drivers.")] = (
        scale.ScalePlan.sessions
    ),
    replicas: Annotated[int, typer.Option(min=1, help="Simulated replicas at 1 Hz.")] = scale.ScalePlan.replicas,
    laptops: Annotated[int, typer.Option(min=1, help="Laptops that come and go.")] = scale.ScalePlan.laptops,
    gateways: Annotated[int, typer.Option(min=1, help="Gateways.")] = scale.ScalePlan.gateways,
    as_json: Json = False,
    write: Write = None,
) -> None:
    """What sessions, replicas and laptops cost each process of a large cluster, and what ten times as many need."""
    plan = scale.ScalePlan(sessions, replicas, laptops, gateways)
    _report(lambda say: scale.measure(plan, _command(), say), as_json, False, write)


@app.command("engines")
def measure_engines(
    rounds: Rounds = engines.EnginesPlan.rounds,
    gigabytes: Annotated[float, typer.Option(min=0.01, max=20, help="GB of the weights that are loaded.")] = (
        engines.EnginesPlan.gigabytes
    ),
    as_json: Json = False,
    check: Check = False,
    write: Write = None,
) -> None:
    """What Loom adds to a vLLM server: completions through it, and a pause for weights."""
    plan = engines.EnginesPlan(rounds, gigabytes=gigabytes)
    _report(lambda say: engines.measure(plan, _command(), say), as_json, check, write)


@app.command("analyze")
def measure_analyze(
    rounds: Rounds = analyze.AnalyzePlan.rounds,
    megabytes: Annotated[
        int, typer.Option("--size", min=1, max=10_000, help="MB of the log.")
    ] = analyze.AnalyzePlan.megabytes,
    as_json: Json = False,
    check: Check = False,
    write: Write = None,
) -> None:
    """An analysis of a large log of an RL run: its CPU time and its memory."""
    plan = analyze.AnalyzePlan(rounds, megabytes)
    _report(lambda say: analyze.measure(plan, _command(), say), as_json, check, write)


@app.command("page")
def measure_page(
    rounds: Rounds = PagePlan.rounds,
    seconds: Annotated[float, typer.Option(min=1, max=3600, help="How long all views are measured.")] = (
        PagePlan.seconds
    ),
    replicas: Annotated[int, typer.Option(min=1, help="Simulated replicas at 1 Hz.")] = PagePlan.replicas,
    as_json: Json = False,
    check: Check = False,
    write: Write = None,
) -> None:
    """The page with many replicas: the browser's time for an update, memory, bytes, and a second watcher's cost."""
    from tests.benchmarks.page.measuring import measure_page  # which needs Playwright
    from tests.benchmarks.page.report import page_report

    plan = PagePlan(replicas, seconds=seconds, rounds=rounds)
    _report(
        lambda say: page_report(plan, _command(), describe_machine(), measure_page(plan, say)),
        as_json,
        check,
        write,
    )


@app.command("queue")
def measure_queue(
    rounds: Rounds = QueuePlan.rounds,
    seconds: Annotated[
        float, typer.Option(min=1, max=60, help="How long each way is measured in each round.")
    ] = QueuePlan.seconds,
    as_json: Json = False,
    check: Check = False,
    write: Write = None,
) -> None:
    """Orders to load weights while completions stream: three ways, in four set-ups of where they wait."""
    from tests.benchmarks.queue.measuring import measure_queue  # which needs torch
    from tests.benchmarks.queue.report import QueueReport

    plan = QueuePlan(rounds, seconds)
    _report(
        lambda say: QueueReport(plan, _command(), describe_machine(), measure_queue(plan, say)),
        as_json,
        check,
        write,
    )


@app.command("queue-servers")
def measure_queue_servers(
    rounds: Rounds = ServersPlan.rounds,
    seconds: Annotated[
        float, typer.Option(min=1, max=60, help="How long each way is measured in each round.")
    ] = ServersPlan.seconds,
    as_json: Json = False,
    write: Write = None,
) -> None:
    """Orders to load weights while completions stream: Loom's server, and vLLM's with one API server or two."""
    from tests.benchmarks.queue.servers import known_servers, measure_servers  # which needs torch
    from tests.benchmarks.queue.servers_report import ServersReport

    servers, notes = known_servers()
    plan = ServersPlan(rounds, seconds, servers=servers)
    _report(
        lambda say: ServersReport(plan, _command(), describe_machine(), measure_servers(plan, say), notes),
        as_json,
        False,
        write,
    )


if __name__ == "__main__":
    app()
