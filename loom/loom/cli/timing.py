"""Commands about where time goes: ``loom analyze``, ``trace`` and ``tune``."""

from __future__ import annotations

import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from loom.chaos.durations import parse_time
from loom.cli.options import Access, Json, UserAccess, asking, check_lives, only_session, read_assignments
from loom.cli.output import counted, file_name, print_json, say, say_lines, show
from loom.errors import LoomError, WrongArguments
from loom.process.state_file import replace_file
from loom.process.threads import start_thread
from loom.tracing.collecting import LONGEST, ProcessSpans, no_spans


@asking
def analyze(
    access: Access,
    logs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="LOG...", help="Logs, folders of logs, JSON lines of loom.tracing; also with gzip."),
    ] = None,
    session: Annotated[str | None, typer.Option(metavar="NAME", help="A session whose log to read.")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the folder analysis_TIMESTAMP is made.")] = Path(
        "."
    ),
    async_level: Annotated[
        int | None, typer.Option(min=0, help="The run's async level, if no line says it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the diagnosis.")] = False,
) -> None:
    """Say where the time of an RL run goes, and write statistics, evidence and a diagnosis into a folder.

    Exits with 0 whatever the diagnosis is.
    """
    from loom.rl.diagnosis import sources
    from loom.rl.diagnosis.run import analyze as analyze_logs
    from loom.rl.diagnosis.summary import headline

    if not logs and session is None:
        raise WrongArguments("nothing to analyse: name logs, or a session with --session NAME")
    given = []
    if session is not None:
        given.append(sources.session(session, access.gateway().logs(session, follow=False)))
    found = analyze_logs(logs or (), out, sources=given, async_level=async_level)
    if as_json:
        print_json(found.as_dict())
        return
    assert found.folder is not None
    say(f"PRIMARY: {found.primary}")
    say_lines(headline(found))
    if found.broken.count:
        said = counted(found.broken.count, "broken line is", "broken lines are")
        say(f"{said} left out; the summary names the first.", err=True)
    say(f"written: {found.folder / 'SUMMARY.md'}")


@asking
def tune(
    access: UserAccess,
    session: Annotated[str | None, typer.Option(help="Name of a session; not needed if only one lives.")] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Apply what is proposed; keep what helps.")] = False,
    steps: Annotated[int, typer.Option(min=2, help="Steps that are measured before and after a change.")] = 20,
    rounds: Annotated[int, typer.Option(min=1, help="Changes that are tried at most.")] = 4,
    change: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Try this change in place of a diagnosis.")
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Apply the changes that a ledger of another run kept.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the ledger is; default tuning_SESSION here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the ledger's new lines as JSON.")] = False,
) -> None:
    """Say which change would make a running RL run faster; with --apply, try it, and keep it or take it back.

    Each change is applied at a step boundary, and measured over as many steps as before it. The ledger has every
    change with steps an hour, loss and reward. Exits with 0 whatever it finds.
    """
    from loom.rl.tuning.changes import NoChange
    from loom.rl.tuning.ledger import Ledger, read
    from loom.rl.tuning.target import TunedRun
    from loom.rl.tuning.tuner import Tuner

    if (change or replay) and not apply:
        raise WrongArguments("--change and --replay change the run: give --apply, too")
    if change and replay:
        raise WrongArguments("--change and --replay do not go together")
    gateway = access.gateway()
    name = session or only_session(gateway)
    given = read_assignments(change or (), "KEY=VALUE, such as async_level=2")
    replayed = read(replay)[1] if replay else []
    if session:
        check_lives(gateway, session)
    run = TunedRun(access.weaver(), partial(gateway.logs, name, follow=False), name)
    ledger = Ledger(out or Path(f"tuning_{file_name(name)}"), name)
    ledger.write()  # before anything is changed
    known = len(ledger.entries)
    tuner = Tuner(run, ledger, steps=steps, say=lambda line: None if as_json else say(line))
    if replay:
        tuner.replay(replayed)
    elif given:
        for option, value in given.items():
            proposed = tuner.given(option, value)
            tuner.attempt(proposed, tuner.look()[0])
    elif apply:
        tuner.tune(rounds)
    else:
        before, found = tuner.look()
        proposal = tuner.propose(found)
        if proposal is not None:
            tuner.note(proposal, before)
            told = proposal.why if isinstance(proposal, NoChange) else f"{proposal}. {proposal.why}"
            say(f"{proposal.rule}: {told}", err=as_json)
    new = ledger.entries[known:]
    if as_json:
        print_json({"session": name, "entries": [entry.as_dict() for entry in new]})
    elif new:
        say(f"written: {ledger.folder / 'ledger.md'}")
    else:
        say("nothing is found that a change would answer")


GATEWAY_WITHIN = 30.0
"""Seconds that the gateway has for its answer when the session's processes have given theirs."""


@asking
def trace(
    access: Access,
    seconds: Annotated[str, typer.Option("--for", metavar="TIME", help="How long, such as 10s or 500ms.")] = "10s",
    session: Annotated[str | None, typer.Option(help="Name of a session; not needed if only one lives.")] = None,
    out: Annotated[Path | None, typer.Option(help="The file; default loom-trace-SESSION-TIME.json here.")] = None,
    kernels: Annotated[bool, typer.Option(help="Also profile torch, in processes that have loaded it.")] = True,
    as_json: Json = False,
) -> None:
    """Record the spans of a session's processes for a while, as one file for Perfetto (ui.perfetto.dev).

    It has the calls of the program that drives the session, what gateway, driver and actors made of them, the spans
    of the user's own code, and what torch's profiler sees, on one time line.
    """
    from loom.tracing.perfetto import to_perfetto
    from loom_proxy.session.spans import collect_spans

    wanted = parse_time(seconds)
    if not 0 < wanted <= LONGEST:
        raise WrongArguments(f"--for takes more than 0 and at most {LONGEST:g} seconds, not {seconds}")
    name = session or only_session(access.gateway())
    path = out or Path(f"loom-trace-{file_name(name)}-{time.strftime('%Y%m%d-%H%M%S')}.json")
    job = access.connect(name, "watch")
    with job:
        job.print_logs = False
        relayed: Future[ProcessSpans] = Future()
        start_thread("loom-relayed", _observe, access, name, wanted, relayed)
        found = collect_spans(job._calls, wanted, kernels)
        processes = [_of_gateway(relayed), *found]
    replace_file(path, to_perfetto(processes))
    rows = [_row(each) for each in processes]
    columns = ["process", "host", "pid", "clock", "spans", "operators", "left out", "problem"]
    told = [{key: value for key, value in each.items() if key != "records"} for each in processes]
    show(as_json, {"file": str(path), "processes": told}, f"spans in {path}", columns, rows)


def _observe(access: Access, session: str, seconds: float, found: Future[ProcessSpans]) -> None:
    """Find the spans of the gateway; none, with the reason, if it has no answer: the others are worth showing."""
    try:
        found.set_result(access.gateway().spans(session, seconds))
    except LoomError as error:
        found.set_result(no_spans("gateway", str(error)[:300]))
    except BaseException as error:
        found.set_exception(error)
        raise


def _of_gateway(found: Future[ProcessSpans]) -> ProcessSpans:
    try:
        return found.result(GATEWAY_WITHIN)
    except FutureTimeout:
        return no_spans("gateway", f"it had given no answer {GATEWAY_WITHIN:g} s after the session's processes had")


def _row(process: ProcessSpans) -> list[str]:
    operators = sum("kernel" in record for record in process["records"])
    error = process["error"]
    return [
        process["name"],
        process["host"],
        str(process["pid"] or ""),
        "" if error is None else f"±{error * 1000:.2f} ms",
        str(len(process["records"]) - operators),
        str(operators),
        str(process["left_out"]),
        process["problem"] or "",
    ]
