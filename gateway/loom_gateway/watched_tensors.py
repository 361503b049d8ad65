"""The description of a session's watched tensors, for the driver: the wing of `loom.tensors` in the gateway."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
import threading
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from loom.tensors.watched import Distribution, History, Wanted, coarser
from loom.tensors.worker.actor import TensorWorker
from loom_gateway.driver.monarch.mesh_table import MeshEntry
from loom_gateway.driver.session.context import SessionContext
from loom_gateway.sessions.descriptions import SessionTensors, WatchedTensor, WatchedValues

MOST_TENSORS = 60  # watched tensors that are described
POINTS = 60  # norms of each, evenly from the first one that is kept to the newest
BARS = 64  # bins of a histogram; of more, neighbours are added up
PATIENCE = 0.3  # seconds that workers have to answer; a later answer is for who asks next

logger = logging.getLogger(__name__)

_Answer: TypeAlias = "tuple[dict[str, History], int]"


class WatchedView:
    """Describes the watched tensors of one session. Safe on any thread.

    A mesh of workers that has not answered yet is not asked again, and its last answer is told.
    """

    def __init__(self, context: SessionContext) -> None:
        self._context = context
        self._turn = threading.Lock()
        self._asked: dict[int, concurrent.futures.Future[_Answer]] = {}
        self._answers: dict[int, _Answer] = {}

    def describe(self) -> SessionTensors:
        """Return the tensors of the meshes that programs outside the cluster have made."""
        meshes = {ident: one for ident, one in self._context.meshes.whole("actors") if _has_tensors(one)}
        with self._turn:
            for ident in [ident for ident in {*self._asked, *self._answers} if ident not in meshes]:
                self._asked.pop(ident, None)
                self._answers.pop(ident, None)
            for ident in [ident for ident in meshes if ident not in self._asked]:
                self._asked[ident] = asyncio.run_coroutine_threadsafe(
                    _watched(meshes[ident].mesh), self._context.loop
                )
            concurrent.futures.wait(self._asked.values(), PATIENCE)
            for ident, asked in [one for one in self._asked.items() if one[1].done()]:
                del self._asked[ident]
                try:
                    self._answers[ident] = asked.result()
                except Exception as error:  # noqa: BLE001 - Monarch's, of many classes; the mesh's state tells it
                    logger.debug("the tensors of mesh %s are not known: %s", meshes[ident].name, error)
            answers = [(meshes[ident].name, answer) for ident, answer in sorted(self._answers.items())]
        found = [_tensor(mesh, name, one) for mesh, (named, _) in answers for name, one in named.items()]
        left_out = sum(more for _, (_, more) in answers)
        return SessionTensors(found[:MOST_TENSORS], left_out + max(0, len(found) - MOST_TENSORS))


def _has_tensors(entry: MeshEntry) -> bool:
    return not entry.stopped and entry.cls is not None and issubclass(entry.cls, TensorWorker)


async def _watched(mesh: Any) -> _Answer:
    """Ask the first worker of a mesh. It does not wait for its device."""
    first = mesh.slice(**dict.fromkeys(mesh.sizes, 0))
    wanted = Wanted(most=POINTS, histograms=1, limit=MOST_TENSORS, wait=False)
    answer: _Answer = await first.watched.call_one(wanted).as_asyncio()
    return answer


def _tensor(mesh: str, name: str, history: History) -> WatchedTensor:
    summaries = history.summaries
    newest = summaries[-1] if summaries else None
    return WatchedTensor(
        mesh,
        name,
        history.gradients,
        history.trouble[:500],
        None if newest is None else newest.time,
        [one.step for one in summaries],
        _told(one.weight.norm for one in summaries),
        _told(one.grad.norm for one in summaries),
        None if newest is None else _values(newest.weight),
        None if newest is None else _values(newest.grad),
    )


def _values(one: Distribution) -> WatchedValues:
    norm, mean, std, low, high = _told((one.norm, one.mean, one.std, one.min, one.max))
    return WatchedValues(norm, mean, std, low, high, one.nonfinite, coarser(one.histogram or (), BARS))


def _told(numbers: Iterable[float]) -> Sequence[float | None]:
    """Return numbers in six digits; None for what JSON has no word for."""
    return [float(f"{one:.6g}") if math.isfinite(one) else None for one in numbers]
