"""The exit status of a process, and the kernel's count of processes killed for memory, as the process's agent asks.

Only its parent gets the exit status of a process. The agent is its child, and asks the kernel: by the process's
descriptor, which keeps the status from Linux 6.15 on, or by ``/proc``, which has it until the parent has asked.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
import time

_STATUS_WITHIN = 0.1  # seconds for which the kernel may know nothing of a process that has just ended

MEMORY_EVERY = 30.0
"""Seconds between two looks at the count of processes that were killed for memory."""

_GET_INFO = 3 << 30 | 64 << 16 | 0xFF << 8 | 11  # PIDFD_GET_INFO, for the first version of its struct
_INFO_EXIT = 1 << 3


def exit_status(pid: int, descriptor: int | None) -> tuple[int | None, int | None]:
    """Return the signal and the exit code of a process that has ended; both None if the machine does not tell."""
    until = time.monotonic() + _STATUS_WITHIN
    while True:
        status, later = _status(pid, descriptor)
        if status is not None:
            return (status & 0x7F, None) if status & 0x7F else (None, status >> 8)
        if not later or time.monotonic() >= until:
            return None, None
        time.sleep(0.005)


def _status(pid: int, descriptor: int | None) -> tuple[int | None, bool]:
    """Return a wait status, or None and whether it may be known later."""
    if descriptor is not None:
        import fcntl

        info = bytearray(64)
        struct.pack_into("Q", info, 0, _INFO_EXIT)
        with contextlib.suppress(OSError):  # the kernel is older, or the process is not reaped
            fcntl.ioctl(descriptor, _GET_INFO, info)
            if struct.unpack_from("Q", info, 0)[0] & _INFO_EXIT:
                return struct.unpack_from("i", info, 60)[0], False
    try:
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        # To other users the kernel shows 0 instead.
        if fields[0] == "Z" and os.stat(f"/proc/{pid}").st_uid == os.geteuid():
            return int(fields[49]), False
        return None, True
    except (OSError, ValueError, IndexError):
        return None, descriptor is not None


class MemoryKills:
    """The kernel's count of the processes that it killed for memory, in the cgroup of this process.

    Args:
        cgroups, memberships, machine: where the kernel shows the cgroups, those of this process, and the machine's
            counts.
    """

    def __init__(
        self,
        cgroups: str = "/sys/fs/cgroup",
        memberships: str = "/proc/self/cgroup",
        machine: str = "/proc/vmstat",
    ) -> None:
        self._files = [*_memory_files(cgroups, memberships), machine]
        self._counts = [self._count()] * 2  # the last two looks: the kernel counts before the process has ended
        self._looked = time.monotonic()

    def look(self) -> None:
        """Look at the count, unless that was done lately: an earlier kill was of another process."""
        if time.monotonic() >= self._looked + MEMORY_EVERY:
            self._counts = [self._counts[1], self._count()]
            self._looked = time.monotonic()

    def more(self) -> bool:
        """Return whether a process was killed lately."""
        return self._count() > self._counts[0]

    def _count(self) -> int:
        for file in self._files:
            with contextlib.suppress(OSError):
                if found := re.search(r"^oom_kill (\d+)$", _read(file), re.MULTILINE):
                    return int(found[1])
        return 0


def _read(path: str) -> str:
    with open(path, errors="replace") as file:
        return file.read()


def _memory_files(cgroups: str, memberships: str) -> list[str]:
    """Return the files that may have the count of this process's cgroup, the best first."""
    found: list[str] = []
    try:
        lines = _read(memberships).splitlines()
    except OSError:
        return found
    for line in lines:
        number, controllers, path = line.split(":", 2)
        # In a container, the path may be that of the host, and what is mounted the container's own.
        places = [path.lstrip("/"), ""]
        if number == "0":
            names = ("memory.events.local", "memory.events")
            found += [os.path.join(cgroups, place, name) for place in places for name in names]
        elif "memory" in controllers.split(","):
            found += [os.path.join(cgroups, "memory", place, "memory.oom_control") for place in places]
    return found
