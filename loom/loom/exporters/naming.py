"""Names and addresses in trackers: of runs, of metrics, and of the events of marks.

They are apart from `loom.exporters.tracker`, so that each tracker imports its interface and the few names it needs.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from loom.weaver.views import ReplicaInfo


def run_id(replica: ReplicaInfo) -> str:
    """Return the id of a replica's run: always the same, so that a run is found again."""
    return hashlib.sha256(f"{replica.user}\n{replica.id}".encode()).hexdigest()[:24]


def local_address(path: Path) -> str:
    """Return the address of files on this machine, which says which one this is."""
    return f"file://{socket.gethostname()}{quote(str(path.absolute()))}"


def set_apart(name: str, prefix: str, is_reserved: Callable[[str], bool]) -> str:
    """Return a metric's name, with a prefix if the tracker reserves it. Different names stay different."""
    rest = name
    while rest.startswith(prefix):
        rest = rest.removeprefix(prefix)
    return prefix + name if is_reserved(rest) else name


def escaped(name: str, allowed: Callable[[str], bool]) -> str:
    """Return a name in which each character that a tracker refuses is the number of it, in hexadecimal digits."""
    return "".join(one if allowed(one) else f"_{ord(one):x}_" for one in name)


def event_of(line: str) -> int:
    """Return the id of the event of a mark's line; 0 if it is none."""
    first = line.partition(" ")[0].removeprefix("#")
    return int(first) if first.isdecimal() else 0
