"""The driver-local API: the session, for a function that runs in a session's driver.

::

    def watch_over(name):
        session = loom.driver_api.session()
        procs = session.spawn_procs(name, host=0, per_host={"gpus": 1}, gone=lambda rank: print("lost", rank))
        procs.mesh.spawn("trainers", Trainer)

    job.run(watch_over, "trainers", detach=True)

Processes that a function spawns in this way belong to the session: they end with it, their threadlets find the
weaver, and the driver notices at once when one is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, Protocol

__all__ = ["DriverSession", "Session", "SpawnedProcs", "enter", "in_driver", "session"]


class SpawnedProcs(Protocol):
    """A proc mesh of a session."""

    name: str
    mesh: Any
    """The Monarch proc mesh."""

    def stop(self, reason: str) -> None:
        """Stop the mesh's processes; return at once."""


class Session(Protocol):
    """The session of this driver. Any thread but the driver's event loop may call its methods."""

    name: str

    def hosts(self) -> list[int]:
        """Return the numbers of the existing worker hosts."""

    def spawn_procs(
        self,
        name: str,
        host: int,
        per_host: Mapping[str, int],
        gone: Callable[[int], object],
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> SpawnedProcs:
        """Start processes on a host.

        Args:
            name: of the proc mesh.
            host: number of the host.
            per_host: dimensions on the host.
            gone: called, on the driver's event loop, with the rank of each process that is gone: killed, stopped,
                or with its host.
            environment: further environment variables of the processes.

        Raises:
            SupervisionError: the host is gone.
        """

    def weaver_address(self) -> str:
        """Return the weaver's address, for `loom.Threadlet`; empty without a weaver."""

    def ask_weaver(self, operation: str, arguments: Mapping[str, Any], timeout: float = 2.0) -> Any:
        """Ask the weaver to do an operation; see `loom.weaver.server.handlers`.

        Raises:
            WeaverUnavailable: the weaver is away, or does not answer in ``timeout`` seconds.
            LoomError: the error that the weaver answers with.
        """

    def begin(self, operation: str, arguments: Mapping[str, Any], timeout: float) -> Future[Any]:
        """Begin one of `loom.control.operations.OPERATIONS`; return its result to come.

        The future fails as `ask_weaver` does. Commands wait for as long as their argument ``wait`` says.
        """


class DriverSession(Session, Protocol):
    """The session, with what only a driver has of it."""

    def host_mesh(self) -> Any:
        """Return the Monarch host mesh of all worker hosts."""

    def meshes(self) -> dict[str, object]:
        """Return the Monarch proc and actor meshes of the session's client by name; of two with one, the newer."""

    def show(self, record: str) -> None:
        """Add a record of `loom.notebook.displays` to the output of the run that calls this, if a run does."""


_here: DriverSession | None = None
_left: Exception | None = None


def in_driver() -> bool:
    """Return whether this process is a session's driver."""
    return _here is not None


def session() -> DriverSession:
    """Return the session whose driver this process is.

    Raises:
        RuntimeError: this process is no driver: only functions that `Job.run` runs have a session.
        InForkedChild: this process is a forked child of a driver.
    """
    if _left is not None:
        raise _left
    if _here is None:
        raise RuntimeError("this process is no session's driver: call this in a function given to job.run(…)")
    return _here


def leave(error: Exception) -> None:
    """Have no session in this process, a forked copy of a driver: `session` raises ``error``."""
    global _here, _left
    _here, _left = None, error


def enter(here: DriverSession) -> None:
    """Set the session of this process. For the driver."""
    global _here
    _here = here
