"""Syncing a folder to every host. From client to driver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loom.wire.bodies.base import Body, Id
from loom.wire.messages import Kind

__all__ = ["BeginSync", "CommitSync", "SendPieces"]


@dataclass(frozen=True, slots=True)
class BeginSync(Body, kind=Kind.SYNC):
    """Begin to sync a folder. Result: the digests that the cluster lacks.

    Payload: a packed `loom.manifest.Manifest`. An earlier sync that was not committed is given up.
    """

    sync: Id
    """Id of the sync, for the messages that follow."""


@dataclass(frozen=True, slots=True)
class SendPieces(Body, kind=Kind.SYNC_PIECES):
    """Send pieces of contents. Payload: a part for each piece. Result: None."""

    sync: Id
    pieces: Sequence[Any]
    """``[digest, offset, length, compressed]`` of each piece."""


@dataclass(frozen=True, slots=True)
class CommitSync(Body, kind=Kind.SYNC_COMMIT):
    """Give the folder to every host, and to meshes that are spawned later.

    Result: ``missing``, digests that the cluster lacks after all, and ``warnings``.
    """

    sync: Id
