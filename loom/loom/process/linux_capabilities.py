"""The rights that a process keeps: capabilities, beside those of its user id.

`capabilities(7) <https://man7.org/linux/man-pages/man7/capabilities.7.html>`_ describes them.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path

_VERSION_3 = 0x20080522
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_NUMBERS = 64  # of capabilities that the kernel's interface has room for


class Capability(IntEnum):
    """The capabilities that Loom uses, with the kernel's numbers."""

    CHOWN = 0
    KILL = 5
    SETGID = 6
    SETUID = 7


def held() -> set[int]:
    """Return the numbers of the capabilities that are in force in this process."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    mask = int(status["CapEff"], 16)
    return {number for number in range(_NUMBERS) if mask >> number & 1}


def keep_only(kept: Iterable[Capability] = ()) -> None:
    """Give up every other capability, for good, in this thread and in the threads and processes that it starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    mask = sum(1 << capability for capability in kept)
    for number in range(_NUMBERS):
        if not mask >> number & 1:
            # It fails without CAP_SETPCAP: then a container's manager has set the bound.
            libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
    libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_VERSION_3, 0)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    data = (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)  # effective, permitted, inheritable; twice
    if libc.capset(header, data) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def forbid_new_privileges() -> None:
    """Let this process, and what it starts, gain no rights from programs such as ``sudo``."""
    ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
