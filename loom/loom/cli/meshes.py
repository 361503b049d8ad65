"""``loom meshes``: the hosts, processes and actors of a session."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from loom.cli.options import Access, Json, asking, only_session
from loom.cli.output import print_json, print_table, say
from loom.errors import because

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
