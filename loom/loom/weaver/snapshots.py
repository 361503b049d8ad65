"""Large snapshots of the weaver, which a watcher decodes while its event loop does other things too."""

from __future__ import annotations

from typing import Any

import msgpack

from loom.control.frame import refuse_extension
from loom.errors import ProtocolMismatch
from loom.process.turns import Turns

LARGE = 256 << 10
"""Bytes of a frame that takes too long to be decoded at once."""

_LISTS = ("replicas", "devices")
"""The long lists of a snapshot."""


async def unpack_snapshot(body: bytes) -> list[Any]:
    """Return the frame of a snapshot. Raise `ProtocolMismatch` if it is none."""
    unpacker = msgpack.Unpacker(ext_hook=refuse_extension, max_buffer_size=len(body))
    unpacker.feed(body)
    turns = Turns()
    try:
        if unpacker.read_array_header() != 3:
            raise ValueError("it has another length")
        kind, number, snapshot = unpacker.unpack(), unpacker.unpack(), dict[str, Any]()
        for _ in range(unpacker.read_map_header()):
            name = unpacker.unpack()
            if name not in _LISTS:
                snapshot[name] = unpacker.unpack()
                continue
            found = snapshot[name] = []
            for _ in range(unpacker.read_array_header()):
                found.append(unpacker.unpack())
                await turns.rest()
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolMismatch(f"not a snapshot of the weaver: {error}") from error
    return [kind, number, snapshot]
