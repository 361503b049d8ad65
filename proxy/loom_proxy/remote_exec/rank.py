"""`RankProcess`: the process of one rank, as the driver is asked about it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from loom.errors import NoSuchRank, WrongArguments
from loom.wire.bodies import AskRank
from loom_proxy.futures.future import FutureProxy
from loom_proxy.mesh.base import MeshProxy
from loom_proxy.session.calls import Calls

AWAY = 300.0
"""Seconds without a sign of life of this program after which what it runs on a rank is ended."""


class RankProcess:
    """The process of one rank of a mesh.

    Args:
        rank: the rank in the mesh that the caller has named.
        process: the rank of the process in its whole proc mesh.
    """

    def __init__(self, calls: Calls, mesh: int, name: str, rank: int, process: int) -> None:
        self.calls = calls
        self.rank = rank
        self.name = f"rank {rank} of {name!r}"
        self._mesh = mesh
        self._process = process
        self._key = calls.next_id()  # so that no operation here overtakes another

    def ask(self, operation: str, *arguments: Any) -> FutureProxy[Any]:
        parts = self.calls.encoder.dumps(arguments, f"an argument of {operation!r}")
        return self.calls.ask(AskRank(operation, self._mesh, self._process), parts, key=self._key)

    def wait_for(self, operation: str, *arguments: Any) -> Any:
        """Ask for an operation and wait for its result, on a thread of Loom's own: no progress is displayed."""
        answered = threading.Event()
        answer = self.ask(operation, *arguments)
        answer.add_done_callback(lambda _: answered.set())
        answered.wait()
        return answer.get()

    def write(self, handle: str, data: bytes | None) -> None:
        """Write input to a command or a connection, when there is room; None closes the input."""
        while not self.wait_for("write", handle, data):
            pass


def rank_process(mesh: MeshProxy, rank: int) -> RankProcess:
    """Return the process of a rank of a mesh. Raise `NoSuchRank` if the mesh has fewer."""
    processes = _processes(mesh)
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise WrongArguments(f"a rank is a number, not {rank!r:.80}")
    if not 0 <= rank < len(processes):
        raise NoSuchRank(f"{mesh!r} has no rank {rank}: its ranks are 0 to {len(processes) - 1}")
    whole = mesh._whole
    whole.caller.check_open()
    return RankProcess(whole.caller, whole.ident, whole.name, rank, processes[rank])


def rank_processes(mesh: MeshProxy, rank: int | None) -> list[RankProcess]:
    """Return the process of a rank, or of every rank."""
    return [rank_process(mesh, each) for each in (range(len(_processes(mesh))) if rank is None else [rank])]


def _processes(mesh: MeshProxy) -> Sequence[int]:
    return mesh._shape.ranks()
