"""``loom sessions``: the living sessions of a gateway, their end, and with whom they are shared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import typer

from loom.cli.options import Access, Json, asking
from loom.cli.output import counted, say, show, when
from loom.session_alive import AliveBecause

app = typer.Typer(help="List the sessions of a gateway, share one, or end one.", no_args_is_help=True)


@app.command("list")
@asking
def list_sessions(access: Access, as_json: Json = False) -> None:
    """List your living sessions and those that are shared with you; with a token of scope admin, all."""
    sessions = access.gateway().sessions()
    columns = ["name", "state", "client", "user", "lives", "shared with", "created", "pid", "operations"]
    rows = [
        [
            one["name"],
            one["state"],
            "connected" if one["client_connected"] else "away",
            one.get("user", ""),
            _life(one),
            ", ".join(f"{user}: {scope}" for user, scope in one.get("shared", {}).items()),
            when(one["created_at"]),
            one["pid"],
            one["operations"],
        ]
        for one in sessions
    ]
    show(as_json, {"sessions": sessions}, f"{counted(len(sessions), 'session')} at {access.chosen}", columns, rows)


def _life(session: Mapping[str, Any]) -> str:
    """Return why, and until when, a session lives, such as ``run, call`` or ``until 12:00:00``."""
    because = [one for one in session.get("alive_because", ()) if one != AliveBecause.LINGER]
    until = session.get("lives_until")
    return ", ".join([*because, *([] if until is None else [f"until {when(until)}"])])


@app.command("end")
@asking
def end_session(access: Access, name: Annotated[str, typer.Argument(help="Name of the session.")]) -> None:
    """End a session, with its meshes and their processes."""
    access.gateway().end_session(name)
    say(f"ended session {name}")


@app.command("share")
@asking
def share_session(
    access: Access,
    name: Annotated[str, typer.Argument(help="Name of the session.")],
    user: Annotated[str, typer.Argument(help="The user, as `loom token list` shows it.")],
    scope: Annotated[Literal["view", "operate", "drive"], typer.Option(help="What the user may do.")] = "view",
) -> None:
    """Let another user see a session: view reads and watches, operate also commands, drive also takes it over."""
    access.gateway().share_session(name, user, scope)
    say(f"session {name} is shared with {user} for {scope}")


@app.command("unshare")
@asking
def unshare_session(
    access: Access,
    name: Annotated[str, typer.Argument(help="Name of the session.")],
    user: Annotated[str, typer.Argument(help="The user.")],
) -> None:
    """Take a share back. The user's connections to the session are closed."""
    access.gateway().unshare_session(name, user)
    say(f"session {name} is not shared with {user} any more")
