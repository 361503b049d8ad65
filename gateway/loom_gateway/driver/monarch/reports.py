"""What Monarch's texts say: its reports of faults, and the errors that only their text tells apart.

Everything that is read from a text of Monarch's is read here, for torchmonarch 0.7.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_CAME_BACK = re.compile(
    r"undeliverable message for .*?\bdest: (?P<label>[\w-]+)<(?P<uid>\w+)>\.\S+?-(?P<rank>\d+)<"
    r".*?: (?P<why>invalid reference [^\n]+)",
    re.DOTALL,
)
"""Of a call that came back: whom it was for, and why it was not delivered."""

_CONTROLLER = re.compile(r"The actor actor_mesh_controller_(?P<mesh>[\w-]+)<")


_COORDINATE = re.compile(r"'([^']*)': (\d+)/(\d+)")


class Fault(NamedTuple):
    """An unhandled fault that leaves actors without an answer."""

    mesh: str
    """Monarch's name of the actor mesh, in small letters."""
    rank: int | None
    """The process of the proc mesh; None for all of them."""
    why: str


def read_fault(report: str) -> Fault | None:
    """Return what Monarch's report of a fault says of actors that will not answer; None if it says nothing."""
    if found := _CONTROLLER.search(report):
        return Fault(found["mesh"].lower(), None, "Monarch's controller of the mesh has failed")
    if found := _CAME_BACK.search(report):
        return Fault(f"{found['label']}-{found['uid']}".lower(), int(found["rank"]), found["why"].strip())
    return None


class Place(NamedTuple):
    """An element of a mesh, as Monarch's reports name it."""

    mesh: str
    """The mesh's name."""
    point: dict[str, tuple[int, int]]
    """The element's index in each dimension, and the dimension's size."""


def failed_element(mesh: str, report: str) -> Place | None:
    """Return which element a report says has failed; None if it names none.

    Args:
        mesh: Monarch's name of the mesh, which has a suffix of its own.
        report: the text.
    """
    name = mesh.rpartition("-")[0] or mesh
    found = re.search(re.escape(name) + r"(?:-\w+)?\{([^{}]*)\}", report)
    if found is None:
        return None
    coordinates = _COORDINATE.findall(found[1])
    return Place(name, {label: (int(index), int(size)) for label, index, size in coordinates})


def is_of_a_dead_mesh(text: str) -> bool:
    """Whether a RuntimeError of Monarch's says that an actor could not be spawned because a process is dead."""
    return "on mesh with supervision events" in text


def about_endpoint(text: str, asked: str, meant: str) -> str:
    """Return Monarch's text about a failed call, with another endpoint's name.

    Monarch writes its error in Rust, with the name of the method that was called, and gives it in the text only. A
    sentinel has to call a method that every actor has, so its error names that one.

    Args:
        text: of the error.
        asked: the endpoint that was called.
        meant: the endpoint that failed with it, as a client names it.
    """
    return text.replace(f".{asked}()", f".{meant.partition('(')[0]}()")
