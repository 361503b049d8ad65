"""Secrets of a process, hidden from the other processes of the machine, those of its own user id included.

Linux shows every process of a user id the memory, the descriptors and the first environment of its other processes
(``/proc/PID/mem``, ``fd``, ``environ``), and the arguments (``cmdline``) to every user of the machine. Removing a
variable from `os.environ` changes nothing in ``environ``: the kernel reads it from the memory in which the process
was given it. The same goes for arguments.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import sys
from pathlib import Path

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


SECRET_OPTIONS = ("--token", "--nats-password", "--nats-token")
"""Options of Loom's commands whose values are secrets. Each has a variable in its place."""

_PASSWORD = re.compile(rb"(?<=://)[^/@\0]*:([^/@\0]+)(?=@)")


def hide_arguments() -> list[str]:
    """Overwrite secrets where the kernel shows this process's arguments to all; return the options that had one.

    They are seen until then, from the start of the program. `sys.argv` keeps them.
    """
    if sys.platform != "linux":
        return []
    try:
        start, end = (int(field) for field in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
        given = Path("/proc/self/cmdline").read_bytes()
    except (OSError, ValueError):
        return []
    if not 0 < start < end or len(given) != end - start:  # the process has given itself another title
        return []
    found, position, option = [], 0, ""
    for argument in given.split(b"\0"):
        name, equals, value = argument.partition(b"=")
        secrets = [(0, len(argument))] if option else []
        if equals and name.decode(errors="replace") in SECRET_OPTIONS:
            secrets, option = [(len(name) + 1, len(value))], name.decode()
        secrets += [(match.start(1), len(match[1])) for match in _PASSWORD.finditer(argument)]
        for offset, length in secrets:
            ctypes.memset(start + position + offset, ord("x"), length)
        if secrets:
            found.append(option or "a password in an address")
        option = argument.decode(errors="replace") if argument.decode(errors="replace") in SECRET_OPTIONS else ""
        position += len(argument) + 1
    return found


class _WithoutSecrets(logging.Filter):
    """A filter that leaves the values of headers with secrets out of the lines that websockets logs of requests."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple) and len(record.args) == 2:
            name = str(record.args[0])
            if name.lower() in _SECRET_HEADERS:
                record.args = name, "…"
        return True


_SECRET_HEADERS = ("authorization", "proxy-authorization", "cookie", "sec-websocket-protocol")


def hide_headers(logger: str) -> None:
    """Let a logger, given by name, show no header by which somebody shows a token."""
    logging.getLogger(logger).addFilter(_WithoutSecrets())


def ancestors_that_show(name: str, value: str) -> list[int]:
    """Return the ids of this process's ancestors of its user id that were started with a variable of a value."""
    shown, entry = [], f"{name}={value}".encode()
    process = Path(f"/proc/{os.getppid()}")
    with contextlib.suppress(OSError, ValueError):  # of another user, gone, or another system than Linux
        while process.stat().st_uid == os.geteuid():
            if entry in (process / "environ").read_bytes().split(b"\0"):
                shown.append(int(process.name))
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            process = process.with_name(parent)
    return shown


def keep_memory_private() -> None:
    """Let no process without CAP_SYS_PTRACE read this one's memory, and the kernel write it to no core file."""
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE)")
