"""The sockets on which processes listen, and the table of SECURITY.md that names them."""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import psutil

from tests.support.paths import ROOT

__all__ = ["Listener", "listeners", "unnamed"]

EVERY_ADDRESS = ("0.0.0.0", "::")


class Listener(NamedTuple):
    """A socket on which a process listens."""

    pid: int
    process: str
    """The module that it runs."""
    kind: str
    """``TCP``, ``UDP``, ``unix`` (a file) or ``abstract``."""
    place: str


def listeners(processes: Iterable[psutil.Process]) -> Iterator[Listener]:
    """What processes listen on. One that ends meanwhile listens on nothing."""
    for process in processes:
        try:
            module = _module(process.cmdline())
            sockets = process.net_connections("all")
        except psutil.Error:
            continue
        found = set()
        for sock in sockets:
            if isinstance(sock.laddr, str):
                if sock.laddr:
                    found.add(("abstract" if sock.laddr.startswith("@") else "unix", sock.laddr))
            elif sock.status == psutil.CONN_LISTEN:
                found.add(("TCP", f"{sock.laddr.ip} {sock.laddr.port}"))
            elif sock.status == psutil.CONN_NONE and not sock.raddr:
                found.add(("UDP", f"{sock.laddr.ip} {sock.laddr.port}"))
        for kind, place in sorted(found):
            yield Listener(process.pid, module, kind, place)


def _module(command: list[str]) -> str:
    for before, module in itertools.pairwise(command):
        if before == "-m" or before.endswith("/process/start.py"):
            return module
    return " ".join(command[:3])


def unnamed(found: Iterable[Listener]) -> list[str]:
    """What SECURITY.md does not name, or names in smaller number, and TCP sockets that listen on every address."""
    text = (ROOT / "SECURITY.md").read_text()
    rows = re.findall(r"^\| `([\w.]+)` \| (\w+) \| (\d+) \|", text, re.MULTILINE)
    most = {(process, kind): int(number) for process, kind, number in rows}
    assert most
    of_process: defaultdict[int, Counter[tuple[str, str]]] = defaultdict(Counter)
    wrong = []
    for one in found:
        of_process[one.pid][one.process, one.kind] += 1
        if of_process[one.pid][one.process, one.kind] > most.get((one.process, one.kind), 0):
            wrong.append(f"{one.process} listens on {one.kind} {one.place}, which SECURITY.md does not name")
        if one.place.split(" ")[0] in EVERY_ADDRESS:
            wrong.append(f"{one.process} listens on every address: {one.place}")
    return wrong
