"""``loom sessions`` and ``loom meshes``: the living sessions of a gateway, and what one of them has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import typer

from loom.cli.options import Access, Json, asking, only_session
from loom.cli.output import counted, print_json, print_table, say, show, when
from loom.errors import because
from loom.session_alive import AliveBecause

_KINDS = {"procs": "hosts", "actors": "processes", "endpoints": "actors"}
"""The kind of a mesh, by the field that only meshes of the kind have."""


@asking
def meshes(
    access: Access,
    session: Annotated[str | None, typer.Option(help="Name of a session; not needed if only one lives.")] = None,
    as_json: Json = False,
) -> None:
    """Show a living session's hosts, processes and actors, with their states, and how its endpoints are called."""
    gateway = access.gateway()
    session = session or only_session(gateway)
    answer = gateway.meshes(session)
    if as_json:
        print_json(answer)
        return
    found = list(tree(answer["hosts"]))
    rows = [[f"{'  ' * depth}{one['name']}", _kind(one), _extent(one), _states(one)] for depth, one in found]
    print_table(f"meshes of {session}", ["mesh", "kind", "shape", "states"], rows)
    for _, one in found:
        for failed in one["elements"]["failures"]:
            say(because(f"rank {failed['rank']} of {one['name']}", failed["reason"]))
    calls = [[one["name"], *_calls(each)] for _, one in found for each in one.get("endpoints", ())]
    if calls:
        columns = ["mesh", "endpoint", "calls", "failed", "in flight", "calls a second", "p50", "p99"]
        print_table("calls; the times are of the last minute", columns, calls)
    if answer["left_out"]:
        say(f"{answer['left_out']} other meshes, most of them stopped")


def tree(mesh: Mapping[str, Any], depth: int = 0) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield a mesh that a gateway describes and the meshes below it, each with its depth."""
    yield depth, mesh
    for below in mesh.get("procs") or mesh.get("actors") or ():
        yield from tree(below, depth + 1)


def _kind(mesh: Mapping[str, Any]) -> str:
    kind = next(kind for field, kind in _KINDS.items() if field in mesh)
    return f"{kind}, stopped" if mesh["stopped"] else kind


def _extent(mesh: Mapping[str, Any]) -> str:
    return " x ".join(f"{name} {size}" for name, size in mesh["extent"].items())


def _states(mesh: Mapping[str, Any]) -> str:
    return ", ".join(f"{count} {state}" for state, count in mesh["elements"]["counts"].items())


def _calls(endpoint: Mapping[str, Any]) -> list[object]:
    times = [
        None if seconds is None else f"{seconds * 1000:.3g} ms" for seconds in (endpoint["p50"], endpoint["p99"])
    ]
    counts = [endpoint[name] for name in ("name", "calls", "failures", "in_flight")]
    return [*counts, f"{endpoint['calls_per_second']:.3g}", *times]


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
