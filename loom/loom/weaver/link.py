"""The link between threadlets and the weaver: frames on a plain TCP connection.

A frame is a length (4 bytes, big endian) and a msgpack list ``[kind, …]``. The same framing carries what the
gateway asks of the weaver over a unix socket.

Why not Monarch's messages, which carry everything else in a mesh: Monarch (0.7) numbers the messages of each sender
to each address. A weaver that is killed and started again begins at one, so that processes which knew the one
before never hear it again, nor it them, while training that goes on until the weaver is back is what this is for. A
script that ``torchrun`` started has no Monarch at all.

Frames from a threadlet::

    ["hello", {protocol, key, replica, instance, group, pid, host, procs, rank, actors, session, devices, handlers,
               config, state, applied, step, injectable, removed}]
    ["status", [[seq, time, step|None, epoch|None, max_step|None, {metric: float}, {config}|None], …]]
    ["devices", time, {uuid: {"utilization", "memory_used", "temperature", "power"}}]
    ["beat", time, step|None, phase]             phase is one of `PHASES`
    ["spent", account]                           see `loom.weaver.accounts`; only where the welcome asks for it
    ["handlers", {key: type name}]
    ["ack", command id, step|None, {"ok", "reason", "changes", "refused", "evidence"}]
    ["fault", injection id, {evidence}]          a fault that was injected is gone
    ["stack", request id, text]
    ["bye", reason, "finished"|"stopped"|"failed"]

Frames to a threadlet::

    ["welcome", {protocol, beat, weaver, seq, spent}]
                                                 seq: the last status report of this instance that is stored
    ["refuse", code, text]                       then the weaver closes
    ["stored", seq]                              status reports up to seq are committed
    ["command", command id, kind, params]        kind is one of `COMMANDS`
    ["stack", request id]

Status reports are sent again after a reconnect until they are stored, and commands until they are acknowledged;
each side drops what it has had before.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack

from loom.errors import InvalidAddress, ProtocolMismatch, TooLarge

__all__ = [
    "ADDRESS_VARIABLE",
    "COMMANDS",
    "ENDINGS",
    "MAX_APPLIED",
    "MAX_FRAME",
    "MAX_HELLO",
    "MAX_KEPT_REPORTS",
    "PHASES",
    "PROTOCOL",
    "Splitter",
    "WeaverAddress",
    "pack",
    "parse_weaver_address",
]

PROTOCOL = 1
"""The version that both sides name in their first frame."""

ADDRESS_VARIABLE = "LOOM_WEAVER"
"""The environment variable in which a threadlet finds the weaver's address."""

MAX_FRAME = 16 << 20
"""Bytes of the largest frame, without its length."""

MAX_HELLO = 1 << 20
"""Bytes of the largest frame from a peer that has not shown its key."""

MAX_KEPT_REPORTS = 8192
"""Status reports that a threadlet keeps for a weaver that has not stored them; the oldest go first."""

MAX_APPLIED = 1024
"""Commands applied that a threadlet remembers, and names in its hello."""

COMMANDS = (
    "update_config",
    "pause",
    "resume",
    "stop",
    "drain",
    "device_failed",
    "deactivate_device",
    "reactivate",
    "inject",
    "remove_fault",
)
"""What a threadlet can be told to do."""

PHASES = ("step", "between", "paused")
"""Where a training loop is, as a heartbeat says: in a step, between two, or waiting while paused."""

ENDINGS = ("finished", "stopped", "failed")
"""How a threadlet that says goodbye has ended."""

_LENGTH = struct.Struct(">I")
_ADDRESS = re.compile(
    r"tcp://(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>\d{1,5})/(?P<key>[A-Za-z0-9_-]{1,256})"
)


class WeaverAddress(NamedTuple):
    """Where the weaver listens for threadlets, and the secret that lets them in."""

    host: str
    port: int
    key: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}/{self.key}"


def parse_weaver_address(text: str) -> WeaverAddress:
    """Read ``tcp://HOST:PORT/KEY``.

    Raises:
        InvalidAddress: the text has another form, or the port is not in 1 to 65535. It does not show the key.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match["port"]) < 65536:
        shown = re.sub(r"^([^/]*//[^/]*/).+", r"\1…", text, flags=re.DOTALL)
        raise InvalidAddress(
            f"{shown!r} is not the address of a weaver: {ADDRESS_VARIABLE} has the form tcp://HOST:PORT/KEY"
        )
    return WeaverAddress(match["host"].strip("[]"), int(match["port"]), match["key"])


def pack(frame: Sequence[Any]) -> bytes:
    """Lay out a frame. Text that is no Unicode, such as some file names, loses what is not.

    Raises:
        TooLarge: it has more than `MAX_FRAME` bytes.
        TypeError: something in it is no text, number, bytes, None, list or dict.
        OverflowError: a number in it has more than 64 bits.
    """
    body: bytes = msgpack.packb(frame, unicode_errors="replace")
    if len(body) > MAX_FRAME:
        raise TooLarge(f"a {frame[0]!r:.40} frame has {len(body)} bytes; the limit is {MAX_FRAME}")
    return _LENGTH.pack(len(body)) + body


class Splitter:
    """Finds the frames in a stream of bytes, however it is cut.

    Args:
        limit: bytes of the largest frame to accept; ``limit`` may be set again at any time.
    """

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self.limit = limit
        self._begun = bytearray()
        self._needed = 0

    def feed(self, data: bytes) -> list[list[Any]]:
        """Take bytes; return the frames that they complete, in order.

        Raises:
            ProtocolMismatch: the bytes are no frames, or one is too large. Nothing after it can be understood.
        """
        whole = data
        if self._begun:
            self._begun += data
            if len(self._begun) < self._needed:
                return []
            whole = bytes(self._begun)
            self._begun = bytearray()
        frames = []
        position, end = 0, len(whole)
        while end - position >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(whole, position)
            if length > self.limit:
                raise ProtocolMismatch(f"a frame on the link claims {length} bytes; the limit is {self.limit}")
            after = position + _LENGTH.size + length
            if after > end:
                self._needed = after - position
                break
            frames.append(_unpack(whole[position + _LENGTH.size : after]))
            position = after
        else:
            self._needed = _LENGTH.size
        if position < end:
            self._begun += memoryview(whole)[position:]
        return frames


def _unpack(body: bytes) -> list[Any]:
    try:
        frame = msgpack.unpackb(body, ext_hook=_refuse_extension)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolMismatch(f"not a frame of the weaver's link: {error}") from error
    if type(frame) is not list or not frame or type(frame[0]) is not str:
        raise ProtocolMismatch(f"not a frame of the weaver's link: {frame!r:.80}")
    return frame


def _refuse_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"it holds an extension of type {code}")
