"""Snapshots of a user's weaver, packed in turns, because those of many replicas would hold the event loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgpack

from loom.control.frame import pack_value
from loom.process.turns import Turns
from loom.weaver.serving.requests import RequestHandler

T = TypeVar("T")


async def packed_snapshot(requests: RequestHandler, more: dict[str, Any] | None) -> bytes:
    """Return the current state, packed, with a part ``more`` if that is given.

    What changes meanwhile may be in it or not. So each push from the call on has to follow it.
    """
    turns, packer = Turns(), msgpack.Packer()

    async def packed(items: Iterable[T], body: Callable[[T], dict[str, Any] | None]) -> list[bytes]:
        found = []
        for item in items:
            if (of_item := body(item)) is not None:
                found.append(pack_value(of_item))
                await turns.rest()
        return [packer.pack_array_header(len(found)), *found]

    pieces = [packer.pack_map_header(3 if more is None else 4)]
    pieces += [pack_value("status"), pack_value(requests.answer("status", {}))]
    if more is not None:
        pieces += [pack_value("more"), pack_value(more)]
    pieces += [pack_value("replicas"), *await packed(requests.replicas, requests.info_of_known)]
    pieces += [pack_value("devices"), *await packed(requests.devices, requests.device_of_known)]
    return b"".join(pieces)
