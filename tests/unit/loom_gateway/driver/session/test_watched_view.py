"""The description of watched tensors. Stand-ins for meshes of Monarch answer, or do not."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from array import array
from collections.abc import Iterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from loom.errors import SupervisionError
from loom.tensors.watched import Distribution, History, Summary, Wanted
from loom.tensors.worker.actor import TensorWorker
from loom_gateway.driver.monarch.mesh_table import MeshEntry, MeshTable
from loom_gateway.watched_tensors import BARS, MOST_TENSORS, WatchedView

BOUND = 20.0


def distribution(norm: float, bins: int = 4) -> Distribution:
    return Distribution(norm, 0.0, 1.0, -1.0, 1.0, 0.25, array("Q", range(bins)))


def history(*norms: float, trouble: str = "") -> History:
    summaries = [
        Summary(step, 100.0 + step, distribution(norm), distribution(norm / 3))
        for step, norm in enumerate(norms, 1)
    ]
    return History(len(norms), summaries, trouble)


class Workers:
    """A mesh of workers, of which the first is asked."""

    sizes: ClassVar = {"hosts": 2, "gpus": 4}

    def __init__(self, found: dict[str, History], left_out: int = 0) -> None:
        self.answer: Any = found, left_out
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.wanted: list[Wanted] = []
        self.watched = self

    def slice(self, **place: int) -> Workers:
        assert place == {"hosts": 0, "gpus": 0}
        return self

    def call_one(self, wanted: Wanted) -> Workers:
        self.wanted.append(wanted)
        return self

    async def as_asyncio(self) -> Any:
        await self.may_answer.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Known:
    """A driver with meshes of workers."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.meshes = MeshTable()
        self.view = WatchedView(SimpleNamespace(meshes=self.meshes, loop=loop))  # type: ignore[arg-type]

    def add(self, ident: int, mesh: Any, cls: type = TensorWorker) -> None:
        self.meshes.add(ident, MeshEntry("actors", f"mesh {ident}", mesh, ident, cls=cls))


@pytest.fixture
def known() -> Iterator[Known]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield Known(loop)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(BOUND)
    loop.close()


def test_a_session_without_tensors_has_none(known: Known) -> None:
    known.add(1, object(), cls=Known)
    assert (known.view.describe().tensors, known.view.describe().left_out) == ([], 0)


def test_tensors_have_lines_and_the_newest_histogram(known: Known) -> None:
    workers = Workers({"w": history(3.0, 1.00000001)})
    known.add(1, workers)
    (shown,) = known.view.describe().tensors
    assert (shown.mesh, shown.name, shown.gradients, shown.trouble, shown.time) == ("mesh 1", "w", 2, "", 102.0)
    assert (shown.steps, shown.weight_norms, shown.grad_norms) == ([1, 2], [3.0, 1.0], [1.0, 0.333333])
    assert shown.weight is not None
    assert (shown.weight.nonfinite, shown.weight.histogram) == (0.25, [0, 1, 2, 3])
    assert not workers.wanted[0].wait, "the worker does not wait for its device"


def test_what_has_no_summary_is_told_with_its_trouble(known: Known) -> None:
    known.add(1, Workers({"w": history(trouble="why " * 1000)}))
    (shown,) = known.view.describe().tensors
    assert (shown.weight, shown.grad, shown.time, shown.steps) == (None, None, None, [])
    assert len(shown.trouble) == 500


def test_what_json_has_no_word_for_is_none_and_fine_histograms_are_coarser(known: Known) -> None:
    nothing = distribution(1.0, bins=1000)._replace(norm=math.nan, max=math.inf)
    known.add(1, Workers({"w": History(1, [Summary(1, 1.0, nothing, nothing)], "")}))
    found = known.view.describe()
    (shown,) = found.tensors
    assert shown.grad is not None
    assert (shown.grad.norm, shown.grad.max, shown.weight_norms) == (None, None, [None])
    assert len(shown.grad.histogram) <= BARS
    assert sum(shown.grad.histogram) == sum(range(1000))
    json.dumps(asdict(found), allow_nan=False)


def test_a_mesh_that_does_not_answer_holds_up_no_one_and_is_asked_once(known: Known) -> None:
    slow, quick = Workers({"slow": history(1.0)}), Workers({"quick": history(1.0)})
    known.add(1, slow)
    known.add(2, quick)
    known.view.describe()
    slow.answer = {"later": history(1.0)}, 0
    slow.may_answer.clear()
    for _ in range(2):
        assert [one.name for one in known.view.describe().tensors] == ["slow", "quick"]
    assert len(slow.wanted) == 2
    known.loop.call_soon_threadsafe(slow.may_answer.set)
    known.view.describe()
    assert [one.name for one in known.view.describe().tensors] == ["later", "quick"]


def test_workers_that_died_or_are_of_an_older_loom_spoil_nothing(known: Known) -> None:
    dead = Workers({})
    dead.answer = SupervisionError("gone")
    known.add(1, dead)
    known.add(2, SimpleNamespace(sizes={}, slice=lambda: object()))
    known.add(3, Workers({"w": history(1.0)}))
    assert [one.mesh for one in known.view.describe().tensors] == ["mesh 3"]


def test_a_mesh_that_was_stopped_has_no_tensors(known: Known) -> None:
    known.add(1, Workers({"w": history(1.0)}))
    assert known.view.describe().tensors
    known.meshes.entry(1).stopped = True
    assert not known.view.describe().tensors


def test_tensors_over_the_limit_are_counted(known: Known) -> None:
    many = {f"w{number}": history(1.0) for number in range(MOST_TENSORS - 1)}
    known.add(1, Workers(many, left_out=5))
    known.add(2, Workers({"a": history(1.0), "b": history(1.0)}))
    found = known.view.describe()
    assert (len(found.tensors), found.left_out) == (MOST_TENSORS, 6)
