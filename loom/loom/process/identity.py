"""A process's identity on its machine: process ids are given again, also to processes of other namespaces."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

__all__ = ["boot_id", "has_ended", "identity", "start_time"]


def start_time(pid: int) -> int | None:
    """Return a process's start in ticks since the machine's boot; None without such a process or without Linux."""
    status = _status(pid)
    return None if status is None else int(status[19])


def boot_id() -> str:
    """Return an id of the machine's last start; an empty one without Linux."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def identity(pid: int) -> str | None:
    """Return a text that names a process among all that this machine has ever had; None if it does not live.

    Linux only. The text has the machine's boot, the namespace of process ids, the id, and the start in ticks.
    """
    status, namespace = _status(pid), _namespace()
    if status is None or namespace is None or status[0] in _ENDED:
        return None
    return f"{namespace} {pid} {status[19]}"


def has_ended(named: str) -> bool:
    """Return whether the process that `identity` named has ended; False where this cannot be seen from here."""
    namespace, pid, _ = named.rsplit(" ", 2)
    return namespace == _namespace() and identity(int(pid)) != named


_ENDED = "ZX"  # a zombie has ended, though nobody has waited for it


def _status(pid: int) -> list[str] | None:
    """Return the fields of a process's status from its state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


@cache
def _namespace() -> str | None:
    """Return of what the process ids that this process sees are: the machine's boot, and a namespace."""
    try:
        return f"{boot_id()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return None
