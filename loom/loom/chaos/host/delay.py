"""The delay of the frames that leave a network device, on a kernel without netem.

An nftables table hands each frame that is about to leave the device to a TAP device of this process. The process
keeps the frame for the delay, and then sends it out of the device by a packet socket, whose mark the table lets
pass. Frames are Ethernet's, with any content: IPv4, IPv6, ARP. They pass in the kernel's form, large ones not yet
segmented and without a checksum (a ``struct virtio_net_hdr`` before each describes it).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections import deque
from pathlib import Path

from loom.chaos.host.commands import run, run_at_end
from loom.chaos.host.records import Table, network_namespace, note
from loom.chaos.injected import Evidence, Injected
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


def delay(milliseconds: float, device: str) -> Injected:
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
                run("nft", "-f", "-", given=_rules(self.table, device, self.tap_name, mark))
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


def _rules(table: str, device: str, tap: str, mark: int) -> str:
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
