"""``loom status`` and ``loom sessions``: what a gateway is doing."""

from __future__ import annotations

import datetime
import json
from typing import Annotated, Any

import typer

from loom.cli.rest import Gateway

__all__ = ["sessions_app", "status"]

Url = Annotated[
    str,
    typer.Option(envvar="LOOM_URL", metavar="ws://HOST:PORT", help="Address of the gateway.", show_default=False),
]
Token = Annotated[str | None, typer.Option(envvar="LOOM_TOKEN", help="The gateway's token.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

ENDED_SHOWN = 10
"""Sessions that have ended that `status` shows; as JSON it gives all that the gateway remembers."""

sessions_app = typer.Typer(help="List the sessions of a gateway, or end one.", no_args_is_help=True)


def status(url: Url, token: Token = None, as_json: Json = False) -> None:
    """Show a gateway's version, its workers, how many sessions it has, and why the last ones have ended."""
    gateway = Gateway(url, token)
    answer, ended = gateway.status(), gateway.ended_sessions()
    if as_json:
        _print_json({**answer, "ended": ended})
        return
    _print_table(
        f"gateway {answer.get('version', '?')} at {url}, {_count(answer.get('sessions', 0), 'session')}",
        ["worker", "reachable"],
        [[str(worker["address"]), "yes" if worker["reachable"] else "no"] for worker in answer["workers"]],
    )
    if ended:
        _print_table(
            "sessions that have ended, the last first",
            ["name", "ended", "why", "exit code"],
            [_ended_row(session) for session in reversed(ended[-ENDED_SHOWN:])],
        )


@sessions_app.command("list")
def list_sessions(url: Url, token: Token = None, as_json: Json = False) -> None:
    """List the living sessions."""
    sessions = Gateway(url, token).sessions()
    if as_json:
        _print_json({"sessions": sessions})
        return
    _print_table(
        f"{_count(len(sessions), 'session')} at {url}",
        ["name", "state", "client", "created", "pid", "operations"],
        [_row(session) for session in sessions],
    )


@sessions_app.command("end")
def end_session(
    name: Annotated[str, typer.Argument(help="Name of the session.")], url: Url, token: Token = None
) -> None:
    """End a session, with its meshes and what runs in them."""
    Gateway(url, token).end_session(name)
    typer.echo(f"ended session {name}")


def _ended_row(session: dict[str, Any]) -> list[str]:
    code = session.get("exit_code")
    return [
        str(session.get("name", "")),
        _when(session.get("ended_at")),
        str(session.get("reason", "")),
        "unknown" if code is None else str(code),
    ]


def _row(session: dict[str, Any]) -> list[str]:
    return [
        str(session.get("name", "")),
        str(session.get("state", "")),
        "connected" if session.get("client_connected") else "away",
        _when(session.get("created_at")),
        str(session.get("pid") or ""),
        str(session.get("operations", "")),
    ]


def _when(created: object) -> str:
    if isinstance(created, (int, float)):
        return datetime.datetime.fromtimestamp(created).isoformat(" ", "seconds")
    return str(created or "")


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("" if number == 1 else "s")


def _print_json(answer: dict[str, Any]) -> None:
    typer.echo(json.dumps(answer, indent=2))


def _print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)
