"""``loom inject``: failures on purpose, one by one or by a plan."""

from __future__ import annotations

import json
import random
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from loom.cli.options import (
    Json,
    Since,
    Timeout,
    Until,
    UserAccess,
    acknowledgements,
    asking,
    read_assignments,
    read_moment,
    weaver_clock,
)
from loom.cli.output import file_name, say, say_lines, show
from loom.control.arguments import MOST_EVENTS
from loom.errors import WrongArguments, because
from loom.process.error_exit import FAILURE

app = typer.Typer(help="Inject failures on purpose into what is marked as injectable.", no_args_is_help=True)

PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan in YAML, or in Python (.py).")]


@app.command("list")
def list_faults(as_json: Json = False) -> None:
    """List the kinds of faults, and what they do."""
    from loom.control.fault_kinds import FAULTS

    rows = []
    for kind in FAULTS.values():
        params = ", ".join(f"{name}={param.default!r}" for name, param in kind.params.items())
        rows.append(
            [kind.name, kind.of, "at once" if kind.lasts is None else f"{kind.lasts:g} s", kind.what, params]
        )
    columns = ["fault", "of", "lasts", "what it does", "parameters"]
    show(as_json, {"faults": [_described(kind) for kind in FAULTS.values()]}, f"{len(rows)} faults", columns, rows)


def _described(kind: Any) -> Mapping[str, object]:
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
    from loom.chaos.plans import read_plan
    from loom.chaos.runs.run import PlanExecution

    read = read_plan(plan)
    if access.is_given:
        PlanExecution(read, access.weaver()).check()
    say(f"{plan}: {len(read.faults)} faults, {len(read.expect)} expectations of the whole, seed {read.seed}")


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
    from loom.chaos.runs.reports import Report, prepare

    running = prepare(plan, access.weaver(), seed, lambda line: say(line, err=True))
    with suppress(KeyboardInterrupt):  # the report then says that it was interrupted
        running.run()
    found = Report(running)
    written = found.write(report or Path(f"{file_name(running.plan.name)}-{found.seed}-report"))
    say_lines(written[0].read_text() if as_json else found.markdown())
    say(f"written: {', '.join(map(str, written))}", err=True)
    if not found.ok:
        raise typer.Exit(FAILURE)


@app.command("from-events")
@asking
def from_events(
    access: UserAccess,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="What `loom events --json` printed; - for standard input.")
    ] = None,
    since: Since = None,
    until: Until = None,
    output: Annotated[Path | None, typer.Option(metavar="PLAN", help="Where the plan goes, if not here.")] = None,
) -> None:
    """Make a plan that replays an incident, from its events in a file or since a time.

    Deaths, silent hosts, stalls and injected faults become faults at the same distances in time, which expect the
    same recoveries. Other events stand in comments, with the reason. `loom inject run` carries the plan
    out.
    """
    from loom.chaos.incident_replay import plan_text, read_events

    if (file is None) == (since is None):
        raise WrongArguments("give a file of events, or --since TIME")
    if since is None:
        if until is not None:
            raise WrongArguments("--until goes with --since")
        assert file is not None
        text = plan_text(read_events(file))
    elif access.user == "*":
        raise WrongArguments("a plan is made of one user's events: name the user")
    else:
        weaver = access.weaver()
        now = weaver_clock(weaver)
        begin, end = read_moment(since, now), None if until is None else read_moment(until, now)
        events = list(weaver.events(limit=MOST_EVENTS, since=begin, until=end))
        if len(events) == MOST_EVENTS:
            say(f"these are the newest {MOST_EVENTS} events; earlier ones may be missing", err=True)
        text = plan_text(events, weaver.replicas())
    if output is None:
        say_lines(text, nl=False)
    else:
        output.write_text(text)
        say(f"written: {output}", err=True)


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
    from loom.chaos.targets import Target, check_target, chosen
    from loom.control.fault_kinds import Place, check_fault

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
    rows += [[id, because("not injected", one.reason)] for id, one in outcomes.items() if id not in evidence]
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
    say(f"removed by {', '.join(done)}" if done else f"not removed: {[one.reason for one in outcomes.values()]}")
    if not done:
        raise typer.Exit(FAILURE)
