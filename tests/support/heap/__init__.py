"""How many bytes a worker's allocator has given out, which tells growth from settling.

Resident memory does not: an allocator takes memory in steps of megabytes and keeps what was freed, so two runs that
do the same differ by half.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

__all__ = ["heap", "heap_environment"]


def heap_environment(folder: Path) -> dict[str, str]:
    """Return the variables with which a Python child of this process answers `heap`; the folder's path is short."""
    return {"PYTHONPATH": str(Path(__file__).parent), "LOOM_TEST_HEAP": f"{os.getpid()}:{folder}"}


def heap(folder: Path, pid: int) -> int:
    """Return the bytes that a child's allocator has given out and not got back."""
    with socket.socket(socket.AF_UNIX) as asked:
        asked.settimeout(60)
        asked.connect(str(folder / str(pid)))
        return int(asked.recv(64))
