"""The memory of a container: a control group of the kernel, which kills what needs more than the limit."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MemoryGroup", "can_limit", "groups", "quantity", "remove_group"]

ROOT = Path("/sys/fs/cgroup/memory")
"""Version 1 of control groups. Version 2 has its files elsewhere, and no such folder."""

_UNITS = {
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(\w*)")


def quantity(text: str | int) -> int:
    """The bytes of a quantity such as ``8Gi``."""
    match = _QUANTITY.fullmatch(str(text))
    if match is None or (match[2] and match[2] not in _UNITS):
        raise ValueError(f"not a quantity of bytes: {text}")
    return int(float(match[1]) * _UNITS.get(match[2], 1))


@functools.cache
def can_limit() -> bool:
    """Whether this machine limits memory."""
    return (ROOT / "memory.limit_in_bytes").exists() and os.access(ROOT, os.W_OK)


@dataclass(frozen=True)
class MemoryGroup:
    """The control group of one container, which is removed and made again when the container starts again.

    Args:
        name: its folder's, unique on this machine.
        limit: bytes.
    """

    name: str
    limit: int

    @property
    def folder(self) -> Path:
        return ROOT / self.name

    def make(self) -> None:
        self.remove()
        self.folder.mkdir()
        (self.folder / "memory.limit_in_bytes").write_text(str(self.limit))

    def kills(self) -> int:
        """How many processes the kernel has killed for want of memory."""
        with contextlib.suppress(OSError):
            for line in (self.folder / "memory.oom_control").read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return 0

    def remove(self) -> None:
        remove_group(self.folder)


def groups(prefix: str) -> list[Path]:
    """The folders of the groups whose names start so."""
    return list(ROOT.glob(f"{prefix}*"))


def remove_group(folder: Path) -> None:
    """Kill what is in a group, and remove it. Nothing happens if there is none."""
    with contextlib.suppress(OSError):
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    with contextlib.suppress(OSError):  # a process that ends holds it, and whoever cleans up later removes it
        folder.rmdir()
