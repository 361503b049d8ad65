"""What a process with secrets keeps from other processes, those of its own user id included.

Linux shows every process of a user id the memory, the descriptors and the first environment of its other processes
(``/proc/PID/mem``, ``fd``, ``environ``). Removing a variable from `os.environ` changes nothing in ``environ``: the
kernel reads it from the memory in which the process was given it.
"""

from __future__ import annotations

import ctypes
import os
import sys

_PR_SET_DUMPABLE = 4


def hide_from_proc(name: str) -> None:
    """Overwrite a variable's value where this process was given it. `os.environ` keeps it until it is removed."""
    value = os.environ.get(name)
    if value is None or sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    place = libc.getenv(os.fsencode(name))
    if place:
        ctypes.memset(place, 0, len(os.fsencode(value)))


def keep_memory_private() -> None:
    """Let no process without CAP_SYS_PTRACE read this one's memory, and the kernel write it to no core file."""
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE)")
