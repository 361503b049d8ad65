"""Processes that functions in the driver start with Monarch's own ``spawn_procs``.

They have a lifeline, as a session's other processes have: the driver learns at once that one has ended, and each
ends when the driver is gone. What they print goes the way of Monarch's.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import Any

from monarch.actor import HostMesh

from loom_gateway.driver.lifeline.line import LifelineAddress
from loom_gateway.driver.lifeline.server import LifelineServer
from loom_gateway.driver.monarch import native_calls
from loom_gateway.driver.monarch.liveness import bare_bootstrap_on, tied_procs, ties

FIRST_ID = 1 << 41  # of proc meshes that functions start, above the ids of `loom_gateway.driver.session.local_api`


class NativeProcs:
    """Ties the processes that functions in this process start.

    Args:
        loop: the driver's event loop.
        session: where the session's other processes tie themselves. Host and patience are the same here.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, session: LifelineAddress) -> None:
        self._loop = loop
        self._session = session
        self._ids = itertools.count(FIRST_ID)
        self._starting = threading.Lock()
        self._lifeline: LifelineServer | None = None

    def tie_each(self) -> None:
        """Have ``spawn_procs`` of every host mesh tie what it starts, unless that is tied already."""
        plain = HostMesh.spawn_procs

        def spawn_procs(
            hosts: HostMesh,
            per_host: Any = None,
            bootstrap: Any = None,
            name: str | None = None,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            ident = tied_procs(bootstrap)
            if ident is None and not ties(bootstrap):
                ident = next(self._ids)
                bootstrap = bare_bootstrap_on(self._address(), ident, bootstrap)
            procs = None if ident is None else native_calls.track(ident, name or "anon")
            mesh = plain(hosts, per_host, bootstrap, name, *args, **kwargs)
            if procs is not None:
                native_calls.belong(mesh, procs)
            return mesh

        spawn_procs.__doc__ = plain.__doc__
        HostMesh.spawn_procs = spawn_procs

    def _address(self) -> LifelineAddress:
        with self._starting:
            if self._lifeline is None:
                lifeline = LifelineServer(self._session.host, self._session.patience)
                asyncio.run_coroutine_threadsafe(lifeline.start(native_calls.process_gone), self._loop).result()
                self._lifeline = lifeline
            return self._lifeline.address
