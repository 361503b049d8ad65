"""``loom status`` and ``loom sessions``: what a gateway is doing."""

from __future__ import annotations

import datetime
import json
from typing import Annotated, Any

import typer

from loom.errors import WeaverUnavailable
from loom.rest import Gateway

__all__ = ["print_json", "print_table", "sessions_app", "status", "when"]

Url = Annotated[
    str,
    typer.Option(envvar="LOOM_URL", metavar="ws://HOST:PORT", help="Address of the gateway.", show_default=False),
]
Token = Annotated[str | None, typer.Option(envvar="LOOM_TOKEN", help="The gateway's token.", show_default=False)]
Ca = Annotated[
    str | None,
    typer.Option("--ca", envvar="LOOM_CA", metavar="FILE", help="Certificate of your own authority, for wss://.",
                 show_default=False),
]  # fmt: skip
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

ENDED_SHOWN = 10
"""Sessions that have ended that `status` shows; as JSON it gives all that the gateway remembers."""

sessions_app = typer.Typer(help="List the sessions of a gateway, or end one.", no_args_is_help=True)


def status(url: Url, token: Token = None, as_json: Json = False, ca: Ca = None) -> None:
    """Show a gateway's version, its workers, sessions and replicas, and why the last sessions have ended."""
    gateway = Gateway(url, token, ca=ca)
    answer, ended = gateway.status(), gateway.ended_sessions()
    away: str | None = None
    try:
        replicas, goodput = gateway.ask("replicas"), gateway.ask("goodput")
    except WeaverUnavailable as error:
        replicas, goodput, away = [], [], str(error)
    if as_json:
        told = {"replicas": replicas, "goodput": [{**job, "course": []} for job in goodput], "weaver_away": away}
        print_json({**answer, "ended": ended, **told})
        return
    print_table(
        f"gateway {answer.get('version', '?')} at {url}, {_count(answer.get('sessions', 0), 'session')}",
        ["worker", "reachable"],
        [[str(worker["address"]), "yes" if worker["reachable"] else "no"] for worker in answer["workers"]],
    )
    if away is not None:
        typer.echo(away)
    if replicas:
        _print_replicas(replicas)
    for job in goodput:
        if job["ratio"] is not None:
            typer.echo(_goodput_line(job))
    if ended:
        print_table(
            "sessions that have ended, the last first",
            ["name", "ended", "why", "exit code"],
            [_ended_row(session) for session in reversed(ended[-ENDED_SHOWN:])],
        )


def _print_replicas(replicas: list[dict[str, Any]]) -> None:
    from loom.cli.weaver_display import REPLICA_COLUMNS, replica_row
    from loom.weaver.views import ReplicaInfo

    rows = [replica_row(one) for one in sorted(map(ReplicaInfo.from_body, replicas), key=lambda one: one.place)]
    print_table(_count(len(replicas), "replica"), REPLICA_COLUMNS, rows)


def _goodput_line(job: dict[str, Any]) -> str:
    """Such as ``goodput of train: 91.2 % (compute); lost 1.0 %, idle 7.8 %; 1 death``."""
    whole = sum(job["seconds"].values())
    lost = {reason: seconds / whole for reason, seconds in job["seconds"].items() if reason != "compute"}
    shown = ", ".join(f"{reason} {share:.1%}" for reason, share in lost.items() if share >= 0.0005)
    deaths = f"; {_count(len(job['faults']), 'death')}" if job["faults"] else ""
    return (
        f"goodput of {job['job']}: {job['ratio']:.1%} of {whole:.0f} s" + (f"; {shown}" if shown else "") + deaths
    )


@sessions_app.command("list")
def list_sessions(url: Url, token: Token = None, as_json: Json = False, ca: Ca = None) -> None:
    """List the living sessions."""
    sessions = Gateway(url, token, ca=ca).sessions()
    if as_json:
        print_json({"sessions": sessions})
        return
    print_table(
        f"{_count(len(sessions), 'session')} at {url}",
        ["name", "state", "client", "created", "pid", "operations"],
        [_row(session) for session in sessions],
    )


@sessions_app.command("end")
def end_session(
    name: Annotated[str, typer.Argument(help="Name of the session.")], url: Url, token: Token = None, ca: Ca = None
) -> None:
    """End a session, with its meshes and what runs in them."""
    Gateway(url, token, ca=ca).end_session(name)
    typer.echo(f"ended session {name}")


def _ended_row(session: dict[str, Any]) -> list[str]:
    code = session.get("exit_code")
    return [
        str(session.get("name", "")),
        when(session.get("ended_at")),
        str(session.get("reason", "")),
        "unknown" if code is None else str(code),
    ]


def _row(session: dict[str, Any]) -> list[str]:
    return [
        str(session.get("name", "")),
        str(session.get("state", "")),
        "connected" if session.get("client_connected") else "away",
        when(session.get("created_at")),
        str(session.get("pid") or ""),
        str(session.get("operations", "")),
    ]


def when(created: object) -> str:
    """Return a local date and time for a timestamp in seconds."""
    if isinstance(created, (int, float)):
        return datetime.datetime.fromtimestamp(created).isoformat(" ", "seconds")
    return str(created or "")


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("" if number == 1 else "s")


def print_json(answer: dict[str, Any]) -> None:
    """Print an answer of the gateway as indented JSON."""
    typer.echo(json.dumps(answer, indent=2))


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print rows of texts under a title; markup in them is not interpreted."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)
