"""Syncing a folder to every host. From client to driver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from loom.wire.bodies.base import Body, Id
from loom.wire.messages import Kind

__all__ = ["BeginSync", "CommitSync", "SendPieces"]


@dataclass(frozen=True, slots=True)
class BeginSync(Body):
    """Begin to sync a folder. Result: the digests that are lacking.

    Payload: a packed `loom.manifest.Manifest`. A sync that had begun and was not committed is given up.
    """

    KIND: ClassVar[Kind] = Kind.SYNC

    sync: Id
    """An id for the messages that follow."""


@dataclass(frozen=True, slots=True)
class SendPieces(Body):
    """Pieces of contents. Payload: a part for each piece. Result: None."""

    KIND: ClassVar[Kind] = Kind.SYNC_PIECES

    sync: Id
    pieces: Sequence[Any]
    """``[digest, offset, length, compressed]`` of each."""


@dataclass(frozen=True, slots=True)
class CommitSync(Body):
    """Give the folder to every host, and then to what is spawned.

    Result: ``missing``, digests that are lacking after all, and ``warnings``.
    """

    KIND: ClassVar[Kind] = Kind.SYNC_COMMIT

    sync: Id
