"""Parsers of Monarch's texts: its reports of faults, and errors that only their text distinguishes.

This is the only module that reads texts of Monarch's. They are those of torchmonarch 0.7 and,
as far as the tests of failures show, of 0.8.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

_CAME_BACK = re.compile(
    r"undeliverable message for .*?\bdest: (?P<label>[\w-]+)<(?P<uid>\w+)>\.\S+?-(?P<rank>\d+)<"
    r".*?: (?P<why>invalid reference [^\n]+)",
    re.DOTALL,
)
"""A call that came back: the actor it was meant for, and why it was not delivered."""

_CONTROLLER = re.compile(r"The actor actor_mesh_controller_(?P<mesh>[\w-]+)<")


_SPAWN_TIMEOUT = re.compile(r"error spawning \w+ mesh: statuses: .*\bTimeout\(")

_SPAWN_FAILED = re.compile(r"error spawning actor mesh: statuses: .*?\bFailed\((?P<why>.*?)\n?\)=\d", re.DOTALL)

_PROCESS_ENDED = re.compile(r"\bprocess (?:this actor was running on|exited)\b")

_COORDINATE = re.compile(r"'([^']*)': (\d+)/(\d+)")


class Fault(NamedTuple):
    """An unhandled fault after which actors cannot answer."""

    mesh: str  # Monarch's name of the actor mesh, in lower case
    rank: int | None  # rank in the proc mesh; None for all ranks
    why: str


def read_fault(report: str) -> Fault | None:
    """Return the fault in a report of Monarch's; None if the report names no actors that cannot answer."""
    if found := _CONTROLLER.search(report):
        return Fault(found["mesh"].lower(), None, "Monarch's controller of the mesh has failed")
    if found := _CAME_BACK.search(report):
        return Fault(f"{found['label']}-{found['uid']}".lower(), int(found["rank"]), found["why"].strip())
    return None


class MeshElement(NamedTuple):
    """An element of a mesh, as Monarch's reports name it."""

    mesh: str  # mesh's name
    point: dict[str, tuple[int, int]]  # element's index in each dimension, and the dimension's size

    def is_at(self, point: Mapping[str, int]) -> bool:
        """Return whether the element is at a point of its mesh."""
        return {label: index for label, (index, _) in self.point.items()} == dict(point)


def died_with_its_process(cls: type | None, name: str, point: object) -> str:
    """Return a report like Monarch's of an actor whose process has died."""
    kind = "" if cls is None else f"{cls.__module__}.{cls.__qualname__} "
    return (
        f"The actor <root>.<{kind}{name}{point}> and all its descendants have failed:\n"
        f"  the process this actor was running on failed"
    )


def failed_element(mesh: str, report: str) -> MeshElement | None:
    """Return the element that a report names as failed, if any. ``mesh`` is Monarch's name with its suffix."""
    name = mesh.rpartition("-")[0] or mesh
    found = re.search(re.escape(name) + r"(?:-\w+)?\{([^{}]*)\}", report)
    if found is None:
        return None
    coordinates = _COORDINATE.findall(found[1])
    return MeshElement(name, {label: (int(index), int(size)) for label, index, size in coordinates})


def is_of_a_dead_process(text: str) -> bool:
    """Return whether the text of a SupervisionError says that the process of an actor has ended."""
    return _PROCESS_ENDED.search(text) is not None


def is_of_a_dead_mesh(text: str) -> bool:
    """Return whether the text of a RuntimeError says that a spawn failed because a process is dead."""
    return "on mesh with supervision events" in text


def unanswered_spawn(text: str) -> str | None:
    """Return the explanation of a spawn that a host has not answered; None if the text is of another error."""
    first = text.partition("\n")[0]  # a backtrace of Monarch's follows
    if _SPAWN_TIMEOUT.search(first) is None:
        return None
    return (
        f"a host has not answered in time: it has died, or the network to it was away when this was asked for; "
        f"if the host is there, ask again ({first})"
    )


def failed_spawn(text: str) -> str | None:
    """Return why an actor of a mesh that Monarch has not made failed; None if the text is of another error.

    Monarch makes no mesh if an actor fails while it waits for all, and then reports no fault (torchmonarch 0.7).
    """
    found = _SPAWN_FAILED.search(text)
    return None if found is None else found["why"]


def about_endpoint(text: str, asked: str, meant: str) -> str:
    """Return Monarch's text about a failed call of ``asked`` as one about ``meant``.

    A sentinel calls a method that every actor has, and Monarch's text, made in Rust, names that method.
    """
    return text.replace(f".{asked}()", f".{meant.partition('(')[0]}()")
