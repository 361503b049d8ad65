"""The faults of a host's network, which the kernel makes.

nftables drops packets, ``tc`` delays them, a device goes down. If the kernel has no netem, a process of Loom delays
packets (`loom.chaos.host.delay`).

The faults affect the network namespace of this process. They need root (``CAP_NET_ADMIN``) and the programs ``ip``,
``tc`` and ``nft``.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import secrets
from collections.abc import Mapping, Sequence

from loom.chaos.host import delay as delaying
from loom.chaos.host.commands import run, run_at_end
from loom.chaos.host.processes import ProcessId
from loom.chaos.host.records import LinkDown, Qdisc, Table, network_namespace, note
from loom.chaos.injected import Evidence, Injected
from loom.control.fault_kinds import MAX_DELAY
from loom.errors import FaultRefused

NETEM_LIMIT = 100_000
"""Packets that netem keeps at most. Its default of 1,000 would be 12 ms at 1 Gbit/s."""

_DEFAULT_QDISCS = ("noqueue", "fq_codel", "pfifo_fast", "mq", "fq", "pfifo")


def try_partition(peers: Sequence[str] = ()) -> Evidence:
    """Check that `partition` works here; return the peers that it would cut off."""
    run("nft", "--check", "-f", "-", given=_table("loom_trial", _partition_rules(peers)))
    return {"peers": list(peers) or "all others"}


def partition(peers: Sequence[str] = ()) -> Injected:
    """Drop all packets to and from the peers' addresses or networks; if there are none, all other hosts'."""
    return _rules("partition", _partition_rules(peers), {"peers": list(peers) or "all others"})


def lose(percent: int, peers: Sequence[str] = ()) -> Injected:
    """Drop this percentage of the packets that come from other hosts, each by chance."""
    drop = f"numgen random mod 100 < {percent} counter drop"
    rules = [f"add rule inet {{table}} in {match} {drop}" for match in _matches("saddr", "in", peers)]
    return _rules("loss", rules, {"percent": percent, "peers": list(peers) or "all others"})


def try_link_down(device: str = "") -> Evidence:
    """Check that there is a device to take down; return its name and flags."""
    device = device or _device()
    run("ip", "link", "set", "dev", device, "up")  # changes nothing, but fails without the permission
    return {"device": device, "flags": _flags(device)}


def link_down(device: str = "") -> Injected:
    """Take a device down; the removal of the fault restores it with its routes."""
    device = device or _device()
    routes = [line for line in run("ip", "route", "show", "dev", device).splitlines() if "proto kernel" not in line]
    words = [[word for word in route.split() if word != "linkdown"] for route in routes]
    note(LinkDown(device, words, network_namespace()))
    run("ip", "link", "set", "dev", device, "down")
    put_up = run_at_end(
        ["ip", "link", "set", "dev", device, "up"],
        *(["ip", "route", "replace", *route, "dev", device] for route in words),
    )

    def undo() -> Evidence:
        put_up()
        return {"device": device, "flags": _flags(device)}

    return Injected("link_down", {"device": device, "flags": _flags(device)}, undo)


def narrow(megabits: float, device: str = "") -> Injected:
    """Limit a device's outgoing traffic to this many million bits a second, with ``tc tbf``."""
    bits = round(megabits * 1e6)
    burst = max(1600, bits // 8 // 100)  # 10 ms of traffic, and at least a packet
    return _qdisc("bandwidth", device, ["tbf", "rate", f"{bits}bit", "burst", str(burst), "latency", "50ms"])


def delay(milliseconds: float, device: str = "") -> Injected:
    """Delay outgoing packets: with ``tc netem``, or without netem with `loom.chaos.host.delay`."""
    if not 0 < milliseconds <= MAX_DELAY:
        raise FaultRefused(f"a delay is more than 0 and at most {MAX_DELAY:g} milliseconds, not {milliseconds:g}")
    device = device or _device()
    if _root_qdisc(device) in (*_DEFAULT_QDISCS, "netem"):
        with contextlib.suppress(_NoQdisc):
            options = ["netem", "limit", str(NETEM_LIMIT), "delay", f"{milliseconds:g}ms"]
            return _qdisc("delay", device, options)
    return delaying.delay(milliseconds, device)


def _matches(side: str, chain: str, peers: Sequence[str]) -> list[str]:
    """Return nftables matches for packets of the peers, or of all other hosts if there are no peers."""
    if not peers:
        return ['iifname != "lo"' if chain == "in" else 'oifname != "lo"']
    matches = []
    for peer in peers:
        try:
            network = ipaddress.ip_network(peer, strict=False)
        except ValueError:
            raise FaultRefused(f"{peer!r:.80} is no address of a host, such as 10.0.0.5 or 10.0.1.0/24") from None
        matches.append(f"{'ip' if network.version == 4 else 'ip6'} {side} {network}")
    return matches


def _rules(kind: str, rules: list[str], evidence: Mapping[str, object]) -> Injected:
    owner = ProcessId.find(os.getpid())  # by which a sweep knows whether the table is still wanted
    table = f"loom_{kind}_{owner.pid}_{owner.started}_{secrets.token_hex(4)}"
    note(Table("inet", table, network_namespace()))
    run("nft", "-f", "-", given=_table(table, rules))
    delete = run_at_end(["nft", "delete", "table", "inet", table])

    def undo() -> Evidence:
        dropped = _dropped(table)
        delete()
        return {"table": table, "tables": run("nft", "list", "tables").split("\n")[:-1], "dropped": dropped}

    return Injected(kind, {"table": table, "rules": rules, **evidence}, undo)


def _partition_rules(peers: Sequence[str]) -> list[str]:
    rules = []
    for chain, side in (("in", "saddr"), ("out", "daddr")):
        rules += [f"add rule inet {{table}} {chain} {match} counter drop" for match in _matches(side, chain, peers)]
    return rules


def _table(name: str, rules: Sequence[str]) -> str:
    lines = [
        f"add table inet {name}",
        f"add chain inet {name} in {{ type filter hook input priority 0; }}",
        f"add chain inet {name} out {{ type filter hook output priority 0; }}",
        *(rule.replace("{table}", name) for rule in rules),
    ]
    return "\n".join(lines) + "\n"


def _dropped(table: str) -> int:
    """Return the number of packets that the rules of a table have dropped."""
    listed = json.loads(run("nft", "-j", "list", "table", "inet", table))["nftables"]
    expressions = [one for rule in listed for one in rule.get("rule", {}).get("expr", ())]
    return sum(one["counter"]["packets"] for one in expressions if "counter" in one)


class _NoQdisc(FaultRefused):
    """The kernel cannot attach the requested qdisc to a device."""


def _qdisc(kind: str, device: str, options: list[str]) -> Injected:
    device = device or _device()
    before = _root_qdisc(device)
    if before not in _DEFAULT_QDISCS:
        raise FaultRefused(
            f"{device} has the qdisc {before} already, which {options[0]} would replace: remove it first"
        )
    note(Qdisc(device, options[0], network_namespace()))
    try:
        run("tc", "qdisc", "add", "dev", device, "root", *options)
    except FaultRefused as error:
        raise _NoQdisc(str(error)) from error
    delete = run_at_end(["tc", "qdisc", "del", "dev", device, "root"])

    def undo() -> Evidence:
        delete()
        return {"device": device, "qdisc": _root_qdisc(device)}

    return Injected(kind, {"device": device, "qdisc": _root_qdisc(device), "options": options}, undo)


def _root_qdisc(device: str) -> str:
    listed = json.loads(run("tc", "-j", "qdisc", "show", "dev", device) or "[]")
    return next((str(one["kind"]) for one in listed if one.get("root") or "parent" not in one), "noqueue")


def _flags(device: str) -> list[str]:
    (found,) = json.loads(run("ip", "-j", "link", "show", "dev", device))
    return list(found["flags"])


def _device() -> str:
    """Return the device over which this host reaches others."""
    routes = json.loads(run("ip", "-j", "route", "show") or "[]")
    routes.sort(key=lambda route: route.get("dst") != "default")
    if not routes:
        raise FaultRefused("this host has no route to others: name the device")
    return str(routes[0]["dev"])
