"""What ``/proc`` tells of a process: whether it is still the same one, its parents, how it was started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from loom.errors import FaultRefused


class ProcessId(NamedTuple):
    """A process, which is told from a later one with the same number by when it started."""

    pid: int
    started: str

    @classmethod
    def find(cls, pid: int) -> ProcessId:
        """The process with a number."""
        fields = _fields(pid)
        if fields is None:
            raise FaultRefused(f"there is no process {pid} on this machine")
        return cls(pid, fields[19])

    def alive(self) -> bool:
        """Whether it is there, and no zombie."""
        fields = _fields(self.pid)
        return fields is not None and fields[0] not in "ZX" and fields[19] == self.started


class Start(NamedTuple):
    """How a process was started."""

    arguments: list[str]
    folder: str
    environment: dict[str, str]


def state_of(pid: int) -> str | None:
    """The letter of its state, such as ``S``, ``T`` (stopped) or ``Z``; None where there is no process."""
    fields = _fields(pid)
    return None if fields is None else fields[0]


def ancestors(pid: int) -> Iterator[int]:
    """The parent of a process, that one's, and so on."""
    while (fields := _fields(pid)) is not None and (pid := int(fields[1])) > 0:
        yield pid


def start_of(pid: int) -> Start:
    """How a process of this user was started."""
    folder = Path(f"/proc/{pid}")
    try:
        arguments = (folder / "cmdline").read_bytes().split(b"\0")[:-1]
        pairs = (pair.partition(b"=") for pair in (folder / "environ").read_bytes().split(b"\0") if pair)
        environment = {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
        return Start([os.fsdecode(one) for one in arguments], os.readlink(folder / "cwd"), environment)
    except OSError as error:
        raise FaultRefused(f"process {pid} cannot be looked at: {error.strerror}") from error


def _fields(pid: int) -> list[str] | None:
    try:
        # What follows the name, which is in brackets and may have any characters, brackets too.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
