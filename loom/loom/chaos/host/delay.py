"""``python -m loom.chaos.host.delay``: a process that has what goes out of a network device go out later.

For kernels without netem. An nftables table hands each frame that is about to leave the device to a TAP device of
the process, which keeps it for as long as it was told to, and then sends it out of the device by a packet socket,
whose mark the table lets pass. Frames are Ethernet's, of whatever is in them: IPv4, IPv6, ARP. They go by as the
kernel has them, large ones uncut and without a checksum yet (``struct virtio_net_hdr`` before each says how).

Table and TAP device are the process's own: the kernel removes both when it ends, by SIGKILL too, and the network is
what it was. It ends when its standard input does, and so with whoever has started it. It prints a line of JSON with
what it made, or with why it cannot; and at its end another, with what came by.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import json
import math
import os
import secrets
import select
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from loom.chaos.host.nftables import Nftables
from loom.chaos.injected import Evidence, Injected
from loom.errors import FaultRefused

__all__ = ["DelayQueue", "delay"]

STARTED_WITHIN = 30.0
"""Seconds that the process may take to start."""

ENDED_WITHIN = 10.0
"""Seconds that it may take to end."""

EMPTIED_WITHIN = 5.0
"""Seconds, of those, in which it sends what it still has."""

ROOM = 64 << 20
"""Bytes that are kept at most; what comes then is dropped. That is 51 ms of ten billion bits a second."""

TUN = "/dev/net/tun"

_OVERHEAD = 128
"""Bytes that a frame takes besides its own."""

_BATCH = 64
"""Frames that are taken before it is looked whether others are due."""

_QUEUE = 4096
"""Frames that the TAP device keeps until they are taken."""

_MTU = 1000
"""Of the TAP device: too small for IPv6 (1280), which would have an address and talk there. What is handed to the
device is not measured by it."""

_FRAME = (1 << 16) + 256
"""Bytes of a frame at most: an uncut one of IP, and the headers around it."""

# From linux/if_tun.h, linux/sockios.h, linux/if_packet.h and linux/if_arp.h, for x86 and ARM.
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4, _TUN_F_TSO6, _TUN_F_TSO_ECN = 0x01, 0x02, 0x04, 0x08
_SIOCSIFFLAGS, _SIOCSIFMTU, _SIOCGIFHWADDR, _SIOCSIFTXQLEN = 0x8914, 0x8922, 0x8927, 0x8943
_IFF_UP = 0x1
_SOL_PACKET, _PACKET_VNET_HDR = 263, 15
_ARPHRD_ETHER = 1


def delay(milliseconds: float, device: str, duration: float | None = None) -> Injected:
    """Send what goes out of an Ethernet device so much later.

    Its frames stay in order. Those that are on their way when it is removed are sent at once.

    Raises:
        FaultRefused: there is no such device, or it is no Ethernet's, or it is delayed already; or this machine has
            no ``/dev/net/tun``, or none for this process, or no nftables that hands on what goes out (Linux 5.16).
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "loom.chaos.host.delay", device, repr(milliseconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], STARTED_WITHIN)[0]:
        process.kill()
    said: Evidence = json.loads(process.stdout.readline() or "{}")
    if "made" not in said:
        ended = _end(process)["forwarder"]
        raise FaultRefused(said.get("refused") or f"{device} is not delayed: the process that was to do it {ended}")

    def undo() -> Evidence:
        counted = _end(process)
        devices = [name for _, name in socket.if_nameindex()]
        nftables = Nftables()
        tables = nftables.run("list tables").splitlines()
        nftables.close()
        return {"device": device, "devices": devices, "tables": tables, **counted}

    evidence = {"device": device, "milliseconds": milliseconds, "pid": process.pid, **said["made"]}
    return Injected("delay", evidence, undo, duration)


def _end(process: subprocess.Popen[bytes]) -> Evidence:
    """Have a process end that delays; what it counted, or how it ended if it has not."""
    try:
        printed, failed = process.communicate(timeout=ENDED_WITHIN)
    except subprocess.TimeoutExpired:
        process.kill()
        printed, failed = process.communicate()
    if printed:
        counted: Evidence = json.loads(printed)
        return counted
    last = failed.decode(errors="replace").strip().rpartition("\n")[2]
    return {"forwarder": f"ended with code {process.returncode}" + (f": {last}" if last else "")}


class DelayQueue:
    """Frames that are on their way, each for the same time. Does nothing itself, and knows the time as it is told.

    Args:
        seconds: for which each is.
        room: bytes that are on their way at most.
    """

    def __init__(self, seconds: float, room: int = ROOM) -> None:
        self.dropped = 0
        """Frames for which there was no room."""
        self._seconds = seconds
        self._room = room
        self._frames: deque[tuple[float, bytes]] = deque()

    def put(self, frame: bytes, now: float) -> None:
        """Send a frame on its way, or drop it where there is no room."""
        size = len(frame) + _OVERHEAD
        if size > self._room:
            self.dropped += 1
            return
        self._room -= size
        self._frames.append((now + self._seconds, frame))

    def arrived(self, now: float) -> bytes | None:
        """The first, if it has been on its way for its time."""
        return self._frames[0][1] if self._frames and self._frames[0][0] <= now else None

    def take(self) -> None:
        """Take the first away."""
        self._room += len(self._frames.popleft()[1]) + _OVERHEAD

    def wait(self, now: float) -> float | None:
        """Seconds until the first arrives; None where there is none."""
        return max(0.0, self._frames[0][0] - now) if self._frames else None


class Forwarder:
    """A TAP device, and the table that hands it what goes out of another one.

    Raises:
        FaultRefused: as `delay`.
    """

    def __init__(self, device: str, line: DelayQueue) -> None:
        self._line = line
        self._taken = self._lost = 0
        try:
            index = socket.if_nametoindex(device)
        except OSError as error:
            raise FaultRefused(f"there is no network device {device!r:.80} here") from error
        self._tap_name = f"loomd{index}"  # 15 bytes at most, as a name may have
        self._table = f"loom_delay_{index}"
        mark = 1 + secrets.randbelow(0x7FFFFFFF)
        try:
            self._out = _open_packet_socket(device, mark)
            self._tap = _open_tap(self._tap_name, device)
        except PermissionError as error:
            raise FaultRefused(
                f"{device} cannot be delayed: {error}: it needs root, or CAP_NET_ADMIN and CAP_NET_RAW in this "
                f"network namespace, and in a container the device {TUN}"
            ) from error
        self._nftables = Nftables()
        try:
            self._nftables.run(*_rules(self._table, device, self._tap_name, mark))
        except FaultRefused as error:
            raise FaultRefused(
                f"{device} cannot be delayed: {error}; it needs Linux 5.16 with CONFIG_NETFILTER_EGRESS"
            ) from error

    @property
    def made(self) -> Evidence:
        """What is there now."""
        return {"tap": self._tap_name, "table": self._table}

    @property
    def counted(self) -> Evidence:
        """Frames that were delayed; that were dropped because there were too many; and that the device lost."""
        too_many = self._line.dropped + _dropped_by_device(self._tap_name)
        return {"delayed": self._taken - self._line.dropped, "dropped": too_many, "lost": self._lost}

    def carry(self, end: int) -> None:
        """Take frames and send each after its time, until a descriptor is at its end; then give the device back."""
        blocked = False
        while True:
            wait = None if blocked else self._line.wait(time.monotonic())
            readable, _, _ = select.select([self._tap, end], [self._out] if blocked else [], [], wait)
            if end in readable:
                break
            if self._tap in readable:
                self._take(_BATCH)
            blocked = not self._send(time.monotonic())
        until = time.monotonic() + EMPTIED_WITHIN
        self._take(_QUEUE)
        self._send_all(until)  # before the table goes: what goes out then would overtake it
        self._nftables.close()
        self._take(_QUEUE)
        self._send_all(until)

    def _take(self, most: int) -> None:
        with contextlib.suppress(BlockingIOError):
            for _ in range(most):
                frame = os.read(self._tap, _FRAME)
                self._taken += 1
                self._line.put(frame, time.monotonic())

    def _send(self, now: float) -> bool:
        """Send what has arrived by then; whether the device took it all."""
        while (frame := self._line.arrived(now)) is not None:
            try:
                self._out.send(frame)
            except BlockingIOError:
                return False
            except OSError:  # the device is down, or its queue is full: as it would be without us
                self._lost += 1
            self._line.take()
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
    """Make a TAP device, which is gone when the descriptor is closed."""
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


def _rules(table: str, device: str, tap: str, mark: int) -> list[str]:
    marked = f"meta mark != {mark}"
    return [
        f"add table netdev {table} {{ flags owner; }}",
        f'add chain netdev {table} out {{ type filter hook egress device "{device}" priority 0; }}',
        f'add rule netdev {table} out {marked} meta mark set {mark} counter fwd to "{tap}"',
        # What this host would say on the TAP device of its own accord, such as a DHCP client's, is not to come out.
        f'add chain netdev {table} tap {{ type filter hook egress device "{tap}" priority 0; }}',
        f"add rule netdev {table} tap {marked} counter drop",
    ]


def _dropped_by_device(name: str) -> int:
    """Frames that a device of this process's network namespace could not keep until they were taken."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        found, _, numbers = line.partition(":")
        if found.strip() == name:
            return int(numbers.split()[11])
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loom.chaos.host.delay", description="Delay what goes out of a network device."
    )
    parser.add_argument("device")
    parser.add_argument("milliseconds", type=float)
    options = parser.parse_args()
    try:
        forwarder = Forwarder(options.device, DelayQueue(options.milliseconds / 1000))
    except FaultRefused as error:
        _say(refused=str(error))
        return 1
    _say(made=forwarder.made)
    forwarder.carry(sys.stdin.fileno())
    _say(**forwarder.counted)
    return 0


def _say(**line: Any) -> None:
    with contextlib.suppress(OSError):  # who started it may be gone
        print(json.dumps(line), flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
