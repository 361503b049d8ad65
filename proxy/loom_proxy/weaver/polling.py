"""Watching the weaver without a WebSocket, by asking every second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from loom.errors import GatewayUnreachable, NotAGateway, RateLimited, WeaverUnavailable
from loom.weaver.views import CHANGING_FIELDS, Away, Delta, Snapshot, WeaverEvent, WeaverUpdate

EVERY = 1.0
"""Seconds between two requests."""

_TRANSIENT = (WeaverUnavailable, GatewayUnreachable, NotAGateway, RateLimited)


def poll(
    look: Callable[[], Snapshot],
    events: Callable[[int], Iterator[WeaverEvent]],
    timeout: float | None = None,
) -> Iterator[WeaverUpdate]:
    """Yield the present state, and then each change, until there was none for ``timeout`` seconds."""
    before: Snapshot | None = look()
    assert before is not None
    yield before
    last = int(before.status["event"])
    heard = time.monotonic()
    while timeout is None or time.monotonic() - heard < timeout:
        time.sleep(EVERY if timeout is None else min(EVERY, timeout))
        updates: list[WeaverUpdate] = []
        try:
            now = look()
            if before is None:
                updates.append(now)
            else:
                updates += events(last)
                updates += _differences(before, now)
        except _TRANSIENT as error:
            if before is None:
                continue
            now = None
            updates.append(Away(str(error)))
        for update in updates:
            if isinstance(update, WeaverEvent):
                last = update.id
            yield update
        if updates:
            heard = time.monotonic()
        if before is None and now is not None:
            last = int(now.status["event"])
        before = now


def _differences(before: Snapshot, now: Snapshot) -> Iterator[Delta]:
    replicas = {
        id: {name: getattr(one, name) for name in CHANGING_FIELDS}
        for id, one in now.replicas.items()
        if before.replicas.get(id) != one
    }
    devices = {
        uuid: one.status
        for uuid, one in now.devices.items()
        if one.status is not None and (uuid not in before.devices or before.devices[uuid].status != one.status)
    }
    if replicas or devices:
        yield Delta(replicas, devices)
