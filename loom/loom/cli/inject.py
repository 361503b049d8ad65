"""``loom inject``: failures on purpose, one by one or by a plan."""

from __future__ import annotations

import json
import random
import secrets
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from loom.cli.options import Json, Timeout, UserAccess, acknowledgements, asking, read_assignments
from loom.cli.output import show
from loom.errors import WrongArguments
from loom.process.exit_codes import FAILURE

app = typer.Typer(help="Inject failures on purpose into what is marked as injectable.", no_args_is_help=True)

PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan in YAML, or in Python (.py).")]


@app.command("list")
def list_faults(as_json: Json = False) -> None:
    """List the kinds of faults, and what they do."""
    from loom.chaos.faults import FAULTS

    rows = []
    for kind in FAULTS.values():
        params = ", ".join(f"{name}={param.default!r}" for name, param in kind.params.items())
        rows.append(
            [kind.name, kind.of, "at once" if kind.lasts is None else f"{kind.lasts:g} s", kind.what, params]
        )
    columns = ["fault", "of", "lasts", "what it does", "parameters"]
    show(as_json, {"faults": [_described(kind) for kind in FAULTS.values()]}, f"{len(rows)} faults", columns, rows)


def _described(kind: Any) -> dict[str, Any]:
    params = {
        name: {"what": param.what, "default": param.default, "type": param.type.__name__}
        for name, param in kind.params.items()
    }
    return {"name": kind.name, "of": kind.of, "place": kind.place.value, "what": kind.what, "lasts": kind.lasts,
            "params": params}  # fmt: skip


@app.command()
@asking
def check(
    access: UserAccess,
    plan: PlanFile,
) -> None:
    """Check that a plan makes sense, and that each fault has a target if there is a gateway; change nothing."""
    from loom.chaos.plans.files import read_plan
    from loom.chaos.runs.run import Run

    read = read_plan(plan)
    if access.is_given:
        Run(read, access.weaver()).check()
    typer.echo(f"{plan}: {len(read.faults)} faults, {len(read.expect)} expectations of the whole, seed {read.seed}")


@app.command()
@asking
def run(
    access: UserAccess,
    plan: PlanFile,
    seed: Annotated[int | None, typer.Option(min=0, help="A seed in place of the plan's own.")] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where the report goes. Default: NAME-SEED-report.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Carry out a plan and write a report. Exits with 1 unless all of the plan's expectations held."""
    from dataclasses import replace

    from loom.chaos.plans.files import read_plan
    from loom.chaos.runs.reports import Report
    from loom.chaos.runs.run import Run

    read = read_plan(plan)
    if seed is not None:
        read = replace(read, seed=seed)
    running = Run(read, access.weaver(), lambda line: typer.echo(line, err=True))
    running.run()
    found = Report(running)
    written = found.write(report or Path(f"{read.name}-{read.seed}-report"))
    typer.echo(written[0].read_text() if as_json else found.markdown())
    typer.echo(f"written: {', '.join(map(str, written))}", err=True)
    if not found.held:
        raise typer.Exit(FAILURE)


@app.command()
@asking
def once(
    access: UserAccess,
    fault: Annotated[str, typer.Argument(metavar="KIND", help="A kind that `loom inject list` shows.")],
    replica: Annotated[str | None, typer.Option(metavar="NAME", help="A replica, or a glob.")] = None,
    mesh: Annotated[str | None, typer.Option(help="A proc mesh, or a group.")] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="The rank in the mesh.")] = None,
    host: Annotated[str | None, typer.Option(help="Replicas on this host.")] = None,
    session: Annotated[str | None, typer.Option(help="Replicas of this session; for dead_driver.")] = None,
    pick: Annotated[int | None, typer.Option("--random", min=1, help="This many of them, at random.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the random choice.")] = None,
    duration: Annotated[str | None, typer.Option("--for", metavar="TIME", help="How long it lasts: 5 s.")] = None,
    params: Annotated[
        list[str] | None, typer.Option("--with", metavar="NAME=VALUE", help="A parameter of the fault.")
    ] = None,
    timeout: Timeout = 10.0,
    as_json: Json = False,
) -> None:
    """Inject one fault, and show the evidence. Exits with 1 if no replica has it."""
    from loom.chaos.durations import parse_time
    from loom.chaos.faults import Place, check_fault
    from loom.chaos.targets import Target, check_target, chosen

    kind, given, seconds = check_fault(
        fault,
        read_assignments(params or [], "NAME=VALUE, such as seconds=0.5"),
        None if duration is None else parse_time(duration),
    )
    weaver = access.weaver()
    target: Any = session or "*"
    if kind.place is not Place.GATEWAY:
        wanted = Target(replica, mesh, rank, host, session, pick)
        if wanted == Target():
            raise WrongArguments(f"say whom {kind.name} is to strike: --replica, --mesh, --rank, --host, --random")
        found = check_target(wanted, weaver.replicas())
        seed = secrets.randbelow(1 << 32) if seed is None else seed
        target = [one.id for one in chosen(wanted, found, random.Random(seed))]
    elif kind.of == "session" and session is None:
        raise WrongArguments(f"say which session's driver is to be killed by {kind.name}: --session")
    injection = weaver.inject(kind.name, target, seconds, given)
    outcomes = acknowledgements(injection, timeout)
    evidence = injection.evidence
    acknowledged = {id: asdict(one) for id, one in outcomes.items()}
    answer = {"id": injection.id, "seed": seed, "evidence": evidence, "outcomes": acknowledged}
    rows = [[id or kind.of, json.dumps(dict(one))] for id, one in evidence.items()]
    rows += [[id, f"not injected: {one.reason}"] for id, one in outcomes.items() if id not in evidence]
    show(as_json, answer, f"{kind.name} {injection.id}", ["struck", "evidence"], rows)
    if not evidence:
        raise typer.Exit(FAILURE)


@app.command()
@asking
def remove(
    access: UserAccess,
    injection: Annotated[str, typer.Argument(metavar="ID", help="The id that `loom inject once` shows.")],
    timeout: Timeout = 10.0,
) -> None:
    """Remove a fault before its time is over. Exits with 1 if no replica could."""
    command = access.weaver().remove_injection(injection)
    outcomes = acknowledgements(command, timeout)
    done = [id for id, one in outcomes.items() if one.ok]
    typer.echo(
        f"removed by {', '.join(done)}" if done else f"not removed: {[one.reason for one in outcomes.values()]}"
    )
    if not done:
        raise typer.Exit(FAILURE)
