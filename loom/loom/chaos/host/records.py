"""The records of a host's faults: each names its agent, and what has to be repaired if the agent is killed.

An agent writes its record before it injects the fault, adds each damage before it does it, and removes the record
when the fault is gone. `loom.chaos.host.sweep` repairs the damage in a killed agent's record.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loom.errors import FaultRefused
from loom.process.state_file import write_json

FOLDER_VARIABLE = "LOOM_CHAOS_DIR"
"""The environment variable for the folder of a host's records; the default is in ``/tmp``."""


@dataclass(frozen=True)
class Stopped:
    """A process that was stopped."""

    pid: int
    started: str


@dataclass(frozen=True)
class Table:
    """An nftables table of a network namespace."""

    family: str
    name: str
    namespace: int


@dataclass(frozen=True)
class Qdisc:
    """A queueing discipline at the root of a network device."""

    device: str
    kind: str
    namespace: int


@dataclass(frozen=True)
class LinkDown:
    """A network device that was taken down."""

    device: str
    routes: list[list[str]]
    """The words of ``ip route`` for each route that the kernel does not restore."""
    namespace: int


@dataclass(frozen=True)
class Filler:
    """A file that fills a disk."""

    path: str


@dataclass(frozen=True)
class Corrupted:
    """A file of a checkpoint with changed bytes."""

    path: str
    digest: str
    """The SHA-256 of the whole file before."""
    places: list[int]
    values: str
    """The bytes that were at these places, in hexadecimal digits."""


Damage = Stopped | Table | Qdisc | LinkDown | Filler | Corrupted

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Stopped, Table, Qdisc, LinkDown, Filler, Corrupted)
}


@dataclass(frozen=True)
class HostFaultRecord:
    """The record of a fault."""

    path: Path
    agent: tuple[int, str]
    """The agent's pid and its start time."""
    damage: list[Damage]

    @classmethod
    def read(cls, path: Path) -> HostFaultRecord:
        """Read a record; raise `FileNotFoundError` or `ValueError`."""
        content = json.loads(path.read_text())
        try:
            pid, started = content["agent"]
            damage = [_KINDS[each.pop("what")](**each) for each in content["damage"]]
        except (TypeError, KeyError) as error:
            raise ValueError(f"{path} is no record of a fault: {error}") from error
        return cls(path, (int(pid), str(started)), damage)

    def write(self) -> None:
        """Write the record to the disk, whole or not at all."""
        damage = [{"what": type(each).__name__, **asdict(each)} for each in self.damage]
        write_json(self.path, {"agent": self.agent, "damage": damage})


def folder(create: bool = True) -> Path:
    """Return the folder of this host's records, after checking that nobody else can write to it."""
    found = Path(os.environ.get(FOLDER_VARIABLE) or f"/tmp/loom-chaos-{os.geteuid()}")
    if create:
        found.mkdir(0o700, parents=True, exist_ok=True)
    elif not found.exists():
        return found
    status = found.lstat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise FaultRefused(f"the folder {found} has to be this user's own, and nobody else's to open: chmod 700 it")
    return found


def records() -> Iterator[Path]:
    """Yield the paths of this host's records."""
    yield from sorted(folder(create=False).glob("*.json"))


_current: HostFaultRecord | None = None


def begin(record: HostFaultRecord) -> None:
    """Write the record of this process's fault, to which `note` adds."""
    global _current
    _current = record
    record.write()


def note(*damage: Damage) -> None:
    """Record damage that is about to be done, if this process is the agent of a fault."""
    if _current is not None:
        _current.damage.extend(damage)
        _current.write()


def network_namespace() -> int:
    """Return the number of this thread's network namespace."""
    return Path("/proc/thread-self/ns/net").stat().st_ino
