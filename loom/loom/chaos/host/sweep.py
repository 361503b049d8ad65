"""The sweep: it repairs what faults have left on this host whose agents were killed.

Each start of a worker or of an agent sweeps, and so does a training process whose fault's agent was killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import signal
from pathlib import Path

from loom.chaos.host.disks import restore
from loom.chaos.host.network_commands import run
from loom.chaos.host.processes import ProcessId, state_of
from loom.chaos.host.records import (
    Corrupted,
    Damage,
    Filler,
    HostFaultRecord,
    LinkDown,
    Qdisc,
    Stopped,
    Table,
    network_namespace,
    records,
)
from loom.errors import FaultRefused

_log = logging.getLogger("loom")

_OWNED_TABLE = re.compile(r"loom_(?:partition|loss)_(\d+)_(\d+)_[0-9a-f]+")
_DELAY_TABLE = re.compile(r"loom_delay_(\d+)")


def sweep() -> list[str]:
    """Repair all damage whose agent is gone; return the repairs. Log the rest."""
    repaired = []
    for path in records():
        with contextlib.suppress(FileNotFoundError):  # its agent has just removed it
            try:
                record = HostFaultRecord.read(path)
            except ValueError:
                path.unlink()
                continue
            if not ProcessId(*record.agent).alive():
                repaired += repair(record)
    return repaired + _sweep_tables()


def repair(record: HostFaultRecord) -> list[str]:
    """Repair the damage in a record, and remove the record if all is repaired; return the repairs."""
    repaired, left = [], False
    for damage in record.damage:
        try:
            try:
                text = _repair(damage)
            except FaultRefused:
                text = _repair(damage)  # the shell that undoes it may have done so meanwhile
        except (FaultRefused, OSError) as error:
            left = True
            _log.warning("what a fault has left cannot be repaired (%s): %s", damage, error)
        else:
            repaired += [text] if text else []
    if not left:
        record.path.unlink(missing_ok=True)
    return repaired


def _repair(damage: Damage) -> str:
    """Repair one damage if it is there; return the repair."""
    match damage:
        case Stopped():
            return _continue(damage)
        case Filler():
            if not Path(damage.path).exists():
                return ""
            Path(damage.path).unlink()
            return f"removed {damage.path}"
        case Corrupted():
            return f"restored {damage.path}" if restore(damage) else ""
    if damage.namespace != network_namespace():
        raise FaultRefused("it is in another network namespace")
    match damage:
        case Table():
            if (damage.family, damage.name) not in _tables():
                return ""
            run("nft", "delete", "table", damage.family, damage.name)
            return f"removed the nftables table {damage.name}"
        case Qdisc():
            listed = json.loads(run("tc", "-j", "qdisc", "show", "dev", damage.device) or "[]")
            if not any(one["kind"] == damage.kind and one.get("root") for one in listed):
                return ""
            run("tc", "qdisc", "del", "dev", damage.device, "root")
            return f"removed {damage.kind} from {damage.device}"
        case LinkDown():
            run("ip", "link", "set", "dev", damage.device, "up")
            for route in damage.routes:
                run("ip", "route", "replace", *route, "dev", damage.device)
            return f"{damage.device} is up"


def _continue(damage: Stopped) -> str:
    if not ProcessId(damage.pid, damage.started).alive() or state_of(damage.pid) != "T":
        return ""
    os.kill(damage.pid, signal.SIGCONT)
    return f"process {damage.pid} goes on"


def _tables() -> list[tuple[str, str]]:
    listed = json.loads(run("nft", "-j", "list", "tables"))["nftables"]
    return [(one["table"]["family"], one["table"]["name"]) for one in listed if "table" in one]


def _sweep_tables() -> list[str]:
    """Remove the tables of agents that are gone with their records, as after the restart of a container."""
    if shutil.which("nft") is None:
        return []
    repaired = []
    with contextlib.suppress(FaultRefused):  # a user without the right to list tables has made none
        for family, name in _tables():
            if owned := _OWNED_TABLE.fullmatch(name):
                orphaned = not ProcessId(int(owned[1]), owned[2]).alive()
            elif delay := _DELAY_TABLE.fullmatch(name):
                devices = Path("/proc/thread-self/net/dev").read_text()
                orphaned = f"loomd{delay[1]}:" not in devices  # the device ends with its process
            else:
                continue
            if orphaned:
                run("nft", "delete", "table", family, name)
                repaired.append(f"removed the nftables table {name}")
    return repaired
