"""`LighthouseActor`: torchft's lighthouse, at which replica groups find each other, as an actor."""

from __future__ import annotations

import asyncio
import importlib.machinery
import importlib.util
import os
from typing import Any

from loom.actor import Actor, endpoint
from loom.control.address import own_address
from loom.errors import MissingDependency
from loom.process.listen import bracketed
from loom.threadlet import evictions
from loom.train.settings import Timeouts

QUORUM_TICK_MS = 20


class LighthouseActor(Actor):
    """An actor that runs a lighthouse in its process, which leaves groups out after ``timeouts``."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._server: Any = None
        evictions.add(self)

    def evict(self) -> None:
        """Go on: the groups whose host is about to end too need the lighthouse for their last step."""

    @endpoint
    async def open(self, port: int = 0) -> str:
        """Listen on a port, or on a free one if it is 0; return the URL for managers."""
        return await asyncio.to_thread(self._open, port)

    @endpoint
    async def pid(self) -> int:
        """Return the process id."""
        return os.getpid()

    def _open(self, port: int) -> str:
        address = own_address()
        self._server = _torchft().LighthouseServer(
            bind=f"{bracketed(address)}:{port}",
            min_replicas=1,
            join_timeout_ms=round(1000 * self._timeouts.join),
            quorum_tick_ms=QUORUM_TICK_MS,
            heartbeat_timeout_ms=round(1000 * self._timeouts.heartbeat),
        )
        listens = int(self._server.address().rpartition(":")[2])
        return f"http://{bracketed(address)}:{listens}"


def _torchft() -> Any:
    """Return torchft's native part without the rest, which imports torch and takes seconds."""
    package = importlib.util.find_spec("torchft")
    if package is None or not package.submodule_search_locations:
        raise MissingDependency("a job needs torchft: pip install 'monarch-loom[train]'")
    os.environ.setdefault("RUST_LOG", "warn")  # by default it logs several lines in each step
    spec = importlib.machinery.PathFinder.find_spec("_torchft", package.submodule_search_locations)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
