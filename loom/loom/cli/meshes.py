"""``loom meshes``, ``dashboard`` and ``logs``: views of a session."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
import webbrowser
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from html import escape
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from loom.cli.options import Access, Json, asking, only_session
from loom.cli.output import print_json, print_table, say
from loom.errors import NoSuchRun, UnknownSession, WrongArguments, because
from loom.rest_client import Gateway
from loom.screen_text import without_styles
from loom.token_file import state_folder

FILES_LAST = 120.0
"""Seconds after which the file of an earlier command is removed: its code is long of no use."""

_PAGE = """<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer"><title>Loom</title>
<script>location.replace({address})</script><a href="{link}">The gateway's page</a>
"""


@asking
def dashboard(
    access: Access,
    view: Annotated[bool, typer.Option("--view", help="Sign in with a scope that may look only.")] = False,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open a browser; without, only print the address.")
    ] = True,
) -> None:
    """Open the gateway's page, on which a training is watched and steered. The browser is signed in.

    The address is good once, and for a minute: it has a code in the token's place. The browser gets it by a file
    that only you can read. With a kube:// address the command runs, and forwards, until Ctrl-C.
    """
    address = access.gateway().page("view" if view else None)
    # The user may press Ctrl-C as soon as the address is shown.
    with nullcontext() if access.forward is None else suppress(KeyboardInterrupt):
        if browser and _open(address):
            say(f"opened {address.partition('#')[0]} in a browser")
        else:
            say(address)
        if access.forward is not None:
            say(f"forwarding to {access.forward.name} until Ctrl-C", err=True)
            threading.Event().wait()


def _open(address: str) -> bool:
    """Open an address in a browser, by a file that leads there: every user sees a browser's command line."""
    try:
        file = _leading_to(address)
    except OSError:  # such as a home that cannot be written: who is asked for the address gets it printed
        return False
    return webbrowser.open(file.as_uri())


def _leading_to(address: str) -> Path:
    """Return a new file, which only this user can read, with a page that leads to an address."""
    folder = state_folder() / "page"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    for old in folder.glob("open-*.html"):
        with suppress(OSError):
            if old.stat().st_mtime < time.time() - FILES_LAST:
                old.unlink()
    descriptor, path = tempfile.mkstemp(prefix="open-", suffix=".html", dir=folder)  # of mode 600
    with os.fdopen(descriptor, "w") as file:
        # The address as a text of JavaScript that cannot end the script.
        file.write(_PAGE.format(address=json.dumps(address).replace("<", "\\u003c"), link=escape(address)))
    return Path(path)


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
        known = {int(each["id"]): str(each["name"]) for each in gateway.runs(session)}
    except UnknownSession:  # it has ended: only the log is left
        raise NoSuchRun(f"the log of session {session!r} has no line of a run {run}") from None
    if run not in known:
        runs = ", ".join(f"{id} ({name})" for id, name in known.items()) or "none"
        raise NoSuchRun(
            f"session {session!r} knows no run {run}, and its log has no line of it; the driver's runs: {runs}"
        )


def _shown(line: Mapping[str, Any]) -> str:
    place = f"/{line['place']}" if line["place"] else ""
    return f"[{line['mesh']}{place}] {without_styles(line['text'])}"


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
