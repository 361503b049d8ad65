"""`Statuses`: the newest status of each of one user's devices that has changed, for pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from loom.wire.exact_json import exact_json


class Statuses:
    """Statuses by the devices' uuids, each with the position at which it changed last."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, Any]] = {}

    def take(self, changes: Mapping[str, Any], at: int) -> None:
        """Take statuses. One that is as it was is no change."""
        for uuid, status in changes.items():
            known = self._known.get(uuid)
            if known is None or known[1] != status:
                self._known[uuid] = at, status

    def forget(self, uuids: Iterator[str]) -> None:
        for uuid in uuids:
            self._known.pop(uuid, None)

    def changed(self, sent: Mapping[str, int | None]) -> Iterator[tuple[str, str]]:
        """Yield the uuid and the JSON of each status that changed after the position beside its uuid; None: any."""
        for uuid, since in sent.items():
            known = self._known.get(uuid)
            if known is not None and (since is None or known[0] > since):
                yield uuid, exact_json(known[1])
