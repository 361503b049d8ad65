"""Faults of Loom's own components: this gateway, its weaver and its drivers, killed on purpose."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

from loom.errors import Denied, WeaverUnavailable
from loom.token_file import ADMIN
from loom_gateway.access.control import AccessControl
from loom_gateway.access.sessions import Principal
from loom_gateway.sessions.driver_process import DriverProcess
from loom_gateway.weaver_process import WeaverSupervisor

BEFORE_THE_END = 0.1  # seconds that the gateway has to send its answer before it is killed


class Components:
    """The components that a fault may kill, if the gateway is injectable."""

    def __init__(self, access: AccessControl, supervisor: WeaverSupervisor, injectable: bool) -> None:
        self._access = access
        self._supervisor = supervisor
        self._injectable = injectable

    async def kill(self, kind: str, target: str, by: Principal) -> dict[str, Any]:
        """Kill a component; for ``dead_driver``, that of the session ``target``. Return evidence of its end.

        Raises:
            ScopeError: the gateway or the weaver, which all users share, is to be killed by anyone but an admin.
            UnknownSession: the session is not the principal's.
        """
        if not self._injectable:
            raise Denied(
                "this gateway is not marked as injectable: start it with --injectable or with LOOM_INJECTABLE=1",
                code="not_injectable",
            )
        if kind == "dead_driver":
            return await _kill(self._access.find_own_session(by, target, "to kill its driver").driver)
        self._access.require(by, ADMIN, f"to inject {kind}, which strikes all users,")
        if kind == "dead_gateway":
            asyncio.get_running_loop().call_later(BEFORE_THE_END, os.kill, os.getpid(), signal.SIGKILL)
            return {"pid": os.getpid(), "state": f"killed in {BEFORE_THE_END:g} s"}
        process = self._supervisor.process
        if process is None:
            raise WeaverUnavailable("the weaver is away already")
        return await _kill(process)


async def _kill(process: DriverProcess) -> dict[str, Any]:
    began = time.monotonic()
    process.signal(signal.SIGKILL)
    await process.exited.wait()
    return {"pid": process.pid, "state": "gone", "how": process.how_it_ended, "seconds": time.monotonic() - began}
