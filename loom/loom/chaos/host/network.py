"""The faults of a host's network, which the kernel makes.

nftables drops packets, ``tc`` delays them, a device goes down. The faults affect the network namespace of this
process. They need root (``CAP_NET_ADMIN``) and the programs ``ip``, ``tc`` and ``nft``.

If the kernel has no netem, this process delays the frames that leave a device. An nftables table hands each to a
TAP device of this process. The process keeps the frame for the delay, and then sends it out of the device by a
packet socket, whose mark the table lets pass. Frames are Ethernet's, with any content: IPv4, IPv6, ARP. They pass
in the kernel's form, large ones not yet segmented and without a checksum (a ``struct virtio_net_hdr`` before each
describes it).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import json
import math
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from loom.chaos.host.network_commands import run, run_at_end
from loom.chaos.host.processes import ProcessId
from loom.chaos.host.records import LinkDown, Qdisc, Table, network_namespace, note
from loom.chaos.injected import Evidence, Injected
from loom.control.fault_kinds import MAX_DELAY
from loom.errors import FaultRefused

EMPTIED_WITHIN = 5.0  # seconds in which the delayed frames are sent at the end

ROOM = 64 << 20
"""Bytes that are kept at most; further frames are dropped. At 10 Gbit/s this is 51 ms."""

TUN = "/dev/net/tun"

_OVERHEAD = 128  # bytes that a frame takes in addition to its content
_BATCH = 64  # frames that are taken before the queue is checked for due ones
_QUEUE = 4096  # frames that the TAP device keeps until they are taken

_MTU = 1000
"""Below the minimum of IPv6 (1280), so that the TAP device gets no IPv6 address. It limits no forwarded frame."""

_FRAME = (1 << 16) + 256  # bytes of the largest frame: an unsegmented IP packet, and the headers around it

# From linux/if_tun.h, linux/sockios.h, linux/if_packet.h and linux/if_arp.h, for x86 and ARM.
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4, _TUN_F_TSO6, _TUN_F_TSO_ECN = 0x01, 0x02, 0x04, 0x08
_SIOCSIFFLAGS, _SIOCSIFMTU, _SIOCGIFHWADDR, _SIOCSIFTXQLEN = 0x8914, 0x8922, 0x8927, 0x8943
_IFF_UP = 0x1
_SOL_PACKET, _PACKET_VNET_HDR = 263, 15
_ARPHRD_ETHER = 1


def delay_without_netem(milliseconds: float, device: str) -> Injected:
    """Delay the frames that leave an Ethernet device, in order; the removal of the fault sends them at once."""
    forwarder = TapForwarder(device, DelayQueue(milliseconds / 1000))
    carrying = threading.Thread(target=forwarder.carry, name="loom-delay", daemon=True)
    carrying.start()

    def undo() -> Evidence:
        forwarder.end()
        carrying.join()
        devices = [name for _, name in socket.if_nameindex()]
        tables = run("nft", "list", "tables").splitlines()
        return {"device": device, "devices": devices, "tables": tables, **forwarder.counted}

    made = {"tap": forwarder.tap_name, "table": forwarder.table}
    return Injected("delay", {"device": device, "milliseconds": milliseconds, **made}, undo)


class DelayQueue:
    """A queue of ``room`` bytes in which each frame waits for the same time. The caller passes the time."""

    def __init__(self, seconds: float, room: int = ROOM) -> None:
        self.dropped = 0  # frames, for want of room
        self._seconds = seconds
        self._room = room
        self._frames: deque[tuple[float, bytes]] = deque()

    def put(self, frame: bytes, now: float) -> None:
        """Add a frame, or drop it if there is no room."""
        size = len(frame) + _OVERHEAD
        if size > self._room:
            self.dropped += 1
            return
        self._room -= size
        self._frames.append((now + self._seconds, frame))

    def arrived(self, now: float) -> bytes | None:
        """Return the first frame, if it has waited for its time."""
        return self._frames[0][1] if self._frames and self._frames[0][0] <= now else None

    def pop(self) -> None:
        """Remove the first frame."""
        self._room += len(self._frames.popleft()[1]) + _OVERHEAD

    def wait(self, now: float) -> float | None:
        """Return the seconds until the first frame is due; None without frames."""
        return max(0.0, self._frames[0][0] - now) if self._frames else None


class TapForwarder:
    """A TAP device, and the table that hands it the frames that leave another device."""

    def __init__(self, device: str, queue: DelayQueue) -> None:
        self._queue = queue
        self._taken = self._lost = 0
        try:
            index = socket.if_nametoindex(device)
        except OSError as error:
            raise FaultRefused(f"there is no network device {device!r:.80} here") from error
        self.tap_name = f"loomd{index}"  # a device's name has 15 bytes at most
        self.table = f"loom_delay_{index}"
        mark = 1 + secrets.randbelow(0x7FFFFFFF)
        with contextlib.ExitStack() as opened:
            try:
                self._out = opened.enter_context(_open_packet_socket(device, mark))
                self._tap = _open_tap(self.tap_name, device)
            except PermissionError as error:
                raise FaultRefused(
                    f"{device} cannot be delayed: {error}: it needs root, or CAP_NET_ADMIN and CAP_NET_RAW in this "
                    f"network namespace, and in a container the device {TUN}"
                ) from error
            opened.callback(os.close, self._tap)
            note(Table("netdev", self.table, network_namespace()))
            try:
                run("nft", "-f", "-", given=_marking_rules(self.table, device, self.tap_name, mark))
            except FaultRefused as error:
                raise FaultRefused(
                    f"{device} cannot be delayed: {error}; it needs Linux 5.16 with CONFIG_NETFILTER_EGRESS"
                ) from error
            self._remove_table = run_at_end(["nft", "delete", "table", "netdev", self.table])
            self._ending, self._end = os.pipe()
            opened.callback(os.close, self._ending)
            self._opened = opened.pop_all()

    def end(self) -> None:
        os.close(self._end)

    def carry(self) -> None:
        """Take frames and send each after the delay, until `end`; then restore the device."""
        with self._opened:
            blocked = False
            while True:
                wait = None if blocked else self._queue.wait(time.monotonic())
                waits = [self._out] if blocked else []
                readable, _, _ = select.select([self._tap, self._ending], waits, [], wait)
                if self._ending in readable:
                    break
                if self._tap in readable:
                    self._take(_BATCH)
                blocked = not self._send(time.monotonic())
            until = time.monotonic() + EMPTIED_WITHIN
            self._take(_QUEUE)
            self._send_all(until)  # before the table is removed: later frames would overtake these
            self._remove_table()
            self._take(_QUEUE)
            self._send_all(until)
            dropped = self._queue.dropped + _dropped_by_device(self.tap_name)
        self.counted = {"delayed": self._taken - self._queue.dropped, "dropped": dropped, "lost": self._lost}
        """Numbers of frames: delayed, dropped because there were too many, and lost by the device."""

    def _take(self, most: int) -> None:
        with contextlib.suppress(BlockingIOError):
            for _ in range(most):
                frame = os.read(self._tap, _FRAME)
                self._taken += 1
                self._queue.put(frame, time.monotonic())

    def _send(self, now: float) -> bool:
        """Send the frames that are due; return whether the device took them all."""
        while (frame := self._queue.arrived(now)) is not None:
            try:
                self._out.send(frame)
            except BlockingIOError:
                return False
            except OSError:  # the device is down or its queue full: without the delay it would lose the frame too
                self._lost += 1
            self._queue.pop()
        return True

    def _send_all(self, until: float) -> None:
        while not self._send(math.inf):
            if not select.select([], [self._out], [], max(0.0, until - time.monotonic()))[1]:
                return


def _open_packet_socket(device: str, mark: int) -> socket.socket:
    out = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, 0)
    found = fcntl.ioctl(out, _SIOCGIFHWADDR, struct.pack("16s24x", device.encode()))
    if struct.unpack_from("H", found, 16)[0] != _ARPHRD_ETHER:
        raise FaultRefused(f"{device} is no Ethernet device, and only one can be delayed on a kernel without netem")
    out.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, mark)
    out.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    out.bind((device, 0))
    return out


def _open_tap(name: str, device: str) -> int:
    """Create a TAP device, which lives until its descriptor is closed."""
    try:
        tap = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except PermissionError:
        raise
    except OSError as error:
        raise FaultRefused(
            f"{device} cannot be delayed: {error}, and this kernel has no netem: give the container the device "
            f"(docker run --device {TUN}), or make it (mkdir -p /dev/net; mknod {TUN} c 10 200)"
        ) from error
    flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
    try:
        fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    except OSError as error:
        os.close(tap)
        if error.errno != errno.EBUSY:
            raise
        raise FaultRefused(
            f"{device} is delayed already: the network device {name} is there; remove that fault first"
        ) from error
    fcntl.ioctl(tap, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4 | _TUN_F_TSO6 | _TUN_F_TSO_ECN)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for request, kind, value in (
            (_SIOCSIFMTU, "i", _MTU),
            (_SIOCSIFTXQLEN, "i", _QUEUE),
            (_SIOCSIFFLAGS, "h", _IFF_UP),
        ):
            fcntl.ioctl(any_socket, request, struct.pack(f"16s{kind}20x", name.encode(), value).ljust(40, b"\0"))
    return tap


def _marking_rules(table: str, device: str, tap: str, mark: int) -> str:
    marked = f"meta mark != {mark}"
    return f"""
        add table netdev {table}
        add chain netdev {table} out {{ type filter hook egress device "{device}" priority 0; }}
        add rule netdev {table} out {marked} meta mark set {mark} counter fwd to "{tap}"
        # The host's own frames on the TAP device, such as those of a DHCP client, must not come out.
        add chain netdev {table} tap {{ type filter hook egress device "{tap}" priority 0; }}
        add rule netdev {table} tap {marked} counter drop
    """


def _dropped_by_device(name: str) -> int:
    """Return the frames that a device of this thread's network namespace dropped before they were taken."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        found, _, numbers = line.partition(":")
        if found.strip() == name:
            return int(numbers.split()[11])
    return 0


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
    """Delay outgoing packets: with ``tc netem``, or by this process if the kernel has none."""
    if not 0 < milliseconds <= MAX_DELAY:
        raise FaultRefused(f"a delay is more than 0 and at most {MAX_DELAY:g} milliseconds, not {milliseconds:g}")
    device = device or _device()
    if _root_qdisc(device) in (*_DEFAULT_QDISCS, "netem"):
        with contextlib.suppress(_NoQdisc):
            options = ["netem", "limit", str(NETEM_LIMIT), "delay", f"{milliseconds:g}ms"]
            return _qdisc("delay", device, options)
    return delay_without_netem(milliseconds, device)


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
