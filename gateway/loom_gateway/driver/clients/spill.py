"""Large answers that wait on the disk because their client does not take them now.

Answers pile up while their client is away or slow, and would fill the driver's memory. Beyond a limit they are
written to a file and read from there when they are sent.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
from collections.abc import Sequence
from typing import IO

from loom.wire.messages import Buffer, Message
from loom.wire.mux import Pieces

logger = logging.getLogger(__name__)

SPILLED_FROM = 256 << 10  # smallest answer, in bytes, that is worth a file


DURABLE = "/var/tmp"  # folder of the files unless ``TMPDIR`` is set: /tmp may be memory


def spilled(message: Message) -> Message:
    """Return the message with its payload in a nameless file, which disappears with the message."""
    folder = os.environ.get("TMPDIR") or (DURABLE if os.path.isdir(DURABLE) else None)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return message._replace(parts=_written(message.parts, file))
    except OSError as error:
        logger.warning("an answer of %d bytes stays in memory: %s", message.size, error)
        return message


def _written(parts: Sequence[Buffer], file: IO[bytes]) -> list[Buffer]:
    places = []
    for part in parts:
        pieces = part if isinstance(part, Pieces) else (part,)
        read_only = part.read_only if isinstance(part, Pieces) else memoryview(part).readonly
        # mmap takes only offsets that are multiples of the granularity.
        file.seek(-(-file.tell() // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY)
        places.append((file.tell(), len(part), read_only))
        for piece in pieces:
            file.write(piece)
    file.flush()
    return [_mapped(file, *place) for place in places]


def _mapped(file: IO[bytes], start: int, length: int, read_only: bool) -> Buffer:
    if not length:
        return b""
    # A writable part stays writable: a copy-on-write map takes its changes, and the file keeps the original.
    access = mmap.ACCESS_READ if read_only else mmap.ACCESS_COPY
    return memoryview(mmap.mmap(file.fileno(), length, access=access, offset=start))
