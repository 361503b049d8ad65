"""What user code tries on files, sockets and processes that are not its user's, in a driver and on a worker."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.support.users import House

REFUSED = {"PermissionError", "FileNotFoundError", "ProcessLookupError"}
"""What may come of an attempt: it is not allowed, or what it was on has ended meanwhile."""


Attempt = tuple[str, Any]
"""What is tried, and on which path or process."""


def outcomes(attempts: Sequence[Attempt]) -> list[str]:
    """What comes of each attempt: the name of an error, or ``done: …``. Runs where the user's code runs."""
    return [outcome(*attempt) for attempt in attempts]


def outcome(action: str, on: Any) -> str:
    actions = {
        "read": lambda path: Path(path).read_bytes(),
        "write": lambda path: Path(path).write_text("mine"),
        "list": os.listdir,
        "connect": _connect,
        "signal": lambda pid: os.kill(pid, 0),
        "kill": lambda pid: os.kill(pid, signal.SIGKILL),
    }
    try:
        found: Any = actions[action](on)
    except OSError as error:
        return type(error).__name__
    return f"done: {found!r:.200}"


def _connect(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)


def attempts_on(house: House, driver: int) -> list[Attempt]:
    """What user code may know to try on the gateway, its weaver and a driver, given the driver's process id."""
    state, own = house.gateway.state, house.gateway.announced["pid"]
    tried: list[Attempt] = [
        *(("read", str(path)) for path in (house.file.path, house.audit_path)),
        *(("write", str(path)) for path in (house.file.path, house.audit_path, state / "mine")),
        *(("list", str(path)) for path in (state, state / "weaver")),
        *(("read", str(state / "weaver" / name)) for name in ("secret", "weaver.sqlite", "link.json")),
    ]
    for pid in (own, driver, *(weaver.pid for weaver in house.gateway.weavers())):
        tried += [("kill", pid), ("read", f"/proc/{pid}/environ"), ("list", f"/proc/{pid}/fd")]
    try:
        words = psutil.Process(driver).cmdline()
    except psutil.NoSuchProcess:
        return tried
    path = Path(words[words.index("--socket") + 1])
    tried += [("connect", str(path)), ("list", str(path.parent))]
    tried += [("read", str(path.parent / "driver.log")), ("write", str(path.parent / "mine"))]
    return [*tried, *(("read", f"{path.parent}.{suffix}") for suffix in ("json", "out"))]
