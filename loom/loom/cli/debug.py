"""``loom debug``: Monarch's debugger for the actors of a session, from anywhere."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from loom.cli.options import Access, Json, asking, only_session
from loom.cli.output import show


@asking
def debug(
    access: Access,
    actor: Annotated[str | None, typer.Argument(help="Attach to this actor mesh at once.")] = None,
    rank: Annotated[int, typer.Argument(min=0, help="The rank to attach to.")] = 0,
    session: Annotated[str | None, typer.Option(help="Name of a session; not needed if only one lives.")] = None,
    wait: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="First wait until an actor stops.")
    ] = None,
    only_list: Annotated[bool, typer.Option("--list", help="Only list the actors that have stopped.")] = False,
    as_json: Json = False,
) -> None:
    """Debug a session's actors: breakpoint() in an endpoint stops there. The token must be one that may drive.

    The program that drives the session goes on beside. `help` lists the commands, such as `attach NAME RANK`,
    `cast NAME ranks(0,2) n` and `continue`. `quit`, or Ctrl-D, leaves what has stopped as it is.
    """
    name = session or only_session(access.gateway())
    job = access.connect(name, "debug")
    with job:
        job.print_logs = False
        if wait is not None:
            job.debugger.wait(wait)
        if only_list or as_json:
            found = [asdict(each) for each in job.debugger.breakpoints()]
            columns = ["actor", "rank", "host", "function", "line"]
            rows = [
                [one[name] for name in ("actor_name", "rank", "hostname", "function", "lineno")] for one in found
            ]
            show(as_json, {"breakpoints": found}, "actors that have stopped", columns, rows)
            return
        job.debugger.interact(*([] if actor is None else [f"attach {actor} {rank}"]))
