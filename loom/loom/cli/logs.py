"""``loom logs``: the output of a session's processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal

import typer

from loom.cli.options import Access, asking, only_session
from loom.cli.output import say
from loom.errors import NoSuchRun, UnknownSession, WrongArguments
from loom.rest_client import Gateway
from loom.terminal_text import without_styles


@asking
def logs(
    access: Access,
    session: Annotated[str | None, typer.Option(help="Name of a session; not needed if only one lives.")] = None,
    mesh: Annotated[str | None, typer.Option(help="Only this proc mesh; driver: the output of job.run.")] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Only this rank of the mesh.")] = None,
    stream: Annotated[Literal["stdout", "stderr"] | None, typer.Option(help="Only this stream.")] = None,
    run: Annotated[int | None, typer.Option(min=1, help="Only what the run of this id printed.")] = None,
    tail: Annotated[int | None, typer.Option(min=0, help="Only this many of the last lines.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the session ends or Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each line.")] = False,
) -> None:
    """Show the output of a session's processes, also of a session that ended recently.

    Lines are not aggregated. If a session prints much, the newest 8 to 16 MiB are kept.
    """
    if rank is not None and mesh is None:
        raise WrongArguments(f"--rank {rank} needs --mesh NAME: ranks are counted in each mesh")
    gateway = access.gateway()
    session = session or only_session(gateway)
    wanted = {"mesh": mesh, "rank": rank, "stream": stream, "run": run, "tail": tail}
    shown = 0
    with suppress(KeyboardInterrupt):
        for line in gateway.logs(session, follow, **wanted):
            say(json.dumps(line) if as_json else _shown(line))
            shown += 1
        if run is not None and not (shown or follow):
            _check_run(gateway, session, run)


def _check_run(gateway: Gateway, session: str, run: int) -> None:
    """Raise `NoSuchRun` unless a run has a line in a session's log, or is known to its driver."""
    if any(gateway.logs(session, False, run=run, tail=1)):
        return
    try:
        known = {int(each["id"]): _called(each) for each in gateway.runs(session)}
    except UnknownSession:  # it has ended: only the log is left
        raise NoSuchRun(f"the log of session {session!r} has no line of a run {run}") from None
    if run not in known:
        runs = ", ".join(f"{id} ({name})" for id, name in known.items()) or "none"
        raise NoSuchRun(
            f"session {session!r} knows no run {run}, and its log has no line of it; the driver's runs: {runs}"
        )


def _called(run: Mapping[str, Any]) -> str:
    trains = ", ".join(f"{one['name']} {one['id']}" for one in run.get("trains", ()))
    return f"{run['name']}{trains and f', trains {trains}'}"


def _shown(line: Mapping[str, Any]) -> str:
    place = f"/{line['place']}" if line["place"] else ""
    return f"[{line['mesh']}{place}] {without_styles(line['text'])}"
