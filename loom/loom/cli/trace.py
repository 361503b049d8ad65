"""``loom trace``: the spans of a session's processes, as one file for Perfetto."""

from __future__ import annotations

import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Annotated

import typer

from loom.chaos.durations import parse_time
from loom.cli.options import Access, Json, asking, only_session
from loom.cli.output import file_name, show
from loom.errors import LoomError, WrongArguments
from loom.process.state_file import replace_file
from loom.process.threads import DaemonExecutor
from loom.tracing.collecting import LONGEST, ProcessSpans, no_spans

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
        relayed = DaemonExecutor("loom-relayed").submit(_observe, access, name, wanted)
        found = collect_spans(job._calls, wanted, kernels)
        processes = [_of_gateway(relayed), *found]
    replace_file(path, to_perfetto(processes))
    rows = [_row(each) for each in processes]
    columns = ["process", "host", "pid", "clock", "spans", "operators", "left out", "problem"]
    told = [{key: value for key, value in each.items() if key != "records"} for each in processes]
    show(as_json, {"file": str(path), "processes": told}, f"spans in {path}", columns, rows)


def _observe(access: Access, session: str, seconds: float) -> ProcessSpans:
    """Return the spans of the gateway; none, with the reason, if it has no answer: the others are worth showing."""
    try:
        return access.gateway().spans(session, seconds)
    except LoomError as error:
        return no_spans("gateway", str(error)[:300])


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
