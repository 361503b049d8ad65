"""`process_home`: where a run starts its processes: in the session whose driver this is, or else on this host.

A module of its own, because it stands in for the driver's session, and has its methods.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from loom import driver_api
from loom.actor import monarch_actor, this_host
from loom.control.address import weaver_address
from loom.errors import WeaverUnavailable
from loom.process.late_environment import add_to_environment

_log = logging.getLogger("loom")


def process_home() -> driver_api.Session:
    """Return the session whose driver this process is; in an actor or a program of its own, its host."""
    return driver_api.session() if driver_api.in_driver() else OwnHost()


@dataclass
class _OwnProcs:
    name: str
    mesh: Any

    def stop(self, reason: str) -> None:
        stopping = self.mesh.stop(reason)
        from loom.rl.generation.interruptible_calls import begin

        begin(stopping.get)


class OwnHost:
    """The host of this process, in the role of a session. A lost process is noticed by its calls, which fail."""

    name = ""

    def __init__(self) -> None:
        # Monarch's own hook ends this process when another one is lost.
        monarch_actor().unhandled_fault_hook = lambda failure: _log.info("lost: %s", failure)

    def hosts(self) -> list[int]:
        """Return the number of the only host."""
        return [0]

    def spawn_procs(
        self,
        name: str,
        host: int,
        per_host: Mapping[str, int],
        gone: Callable[[int], object],
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> _OwnProcs:
        """Start processes; ``gone`` is never called."""
        bootstrap = functools.partial(add_to_environment, dict(environment))
        return _OwnProcs(name, this_host().spawn_procs(per_host=dict(per_host), bootstrap=bootstrap, name=name))

    def weaver_address(self) -> str:
        """Return the address of the weaver that this process was told; empty without one."""
        return weaver_address()

    def ask_weaver(self, operation: str, arguments: Mapping[str, Any], timeout: float = 2.0) -> Any:
        """Raise `WeaverUnavailable`: only a session asks the weaver."""
        raise WeaverUnavailable("this process is no session's driver, and asks no weaver")

    def begin(self, operation: str, arguments: Mapping[str, Any], timeout: float) -> Future[Any]:
        """Return a future that fails as `ask_weaver` does."""
        answer: Future[Any] = Future()
        answer.set_exception(WeaverUnavailable("this process is no session's driver, and asks no weaver"))
        return answer
