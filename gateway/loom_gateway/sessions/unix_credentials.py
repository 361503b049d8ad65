"""The process at the other end of a unix socket, as the kernel knows it."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

_CREDENTIALS = struct.Struct("3i")


class UnixPeer(NamedTuple):
    """Process and user id of a peer: of a listener, those with which it began to listen."""

    pid: int
    uid: int

    @classmethod
    def of(cls, sock: socket.socket) -> UnixPeer:
        """Return the peer of a connected unix socket."""
        pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        return cls(pid, uid)
