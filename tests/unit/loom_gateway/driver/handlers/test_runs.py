"""Which runs a driver remembers, and which trainings they name."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from loom.errors import WeaverUnavailable
from loom.weaver.run_views import RunsPlace, TrainingName
from loom.wire.bodies import RECORD, OpenSession, StartRun
from loom.wire.messages import Kind, Message
from loom_gateway.driver.handlers.runs import KEPT_BYTES, FunctionRun, Runs
from loom_gateway.driver.runs.output import KEPT_RECORDS, RecordedOutput
from loom_gateway.driver.weaver_link import DriverWeaverLink


def finished_run(ident: int, size: int, shown: int = 0) -> FunctionRun:
    run = FunctionRun(StartRun(f"run {ident}", True).message(ident))
    run.finished = run.finished_order = float(ident)
    run.answer = Message(Kind.RESULT, ident, [0.0], [range(size)])  # type: ignore[list-item]
    loop = asyncio.new_event_loop()
    run.output = RecordedOutput(loop, lambda: None)
    run.output.write(RECORD, "a" * shown)
    assert run.output.end == shown
    loop.close()
    return run


def test_results_are_kept_up_to_a_size_but_the_newest_in_any_case() -> None:
    runs = Runs.__new__(Runs)
    runs._runs = {ident: finished_run(ident, 100 << 20) for ident in range(1, 6)}
    runs._runs[9] = FunctionRun(StartRun("going", True).message(9))
    runs._forget_oldest()
    assert list(runs._runs) == [4, 5, 9]

    runs._runs[6] = finished_run(6, 1 << 30)
    runs._forget_oldest()
    assert list(runs._runs) == [9, 6]


def test_what_cells_have_shown_counts_as_results_do() -> None:
    runs = Runs.__new__(Runs)
    runs._runs = {ident: finished_run(ident, 0, KEPT_RECORDS) for ident in range(1, 20)}
    runs._forget_oldest()
    assert len(runs._runs) == KEPT_BYTES // KEPT_RECORDS


class WeaverStandIn:
    """Stands in for the weaver, which knows where runs have begun, or is away."""

    known: list[RunsPlace] | None = None

    async def ask_for(self, asked: Any) -> list[list[Any]]:
        if self.known is None:
            raise WeaverUnavailable("it is away")
        assert asked.session == "s"
        return [list(one) for one in self.known if one.place in asked.places]


def going(ident: int, started: float, finished: float | None = None, given: tuple[int, ...] = ()) -> FunctionRun:
    run = FunctionRun(StartRun(f"run {ident}", True).message(ident))
    run.output = RecordedOutput(asyncio.new_event_loop(), lambda: None, place=f"{ident}@s")
    run.output._loop.close()
    run.started, run.finished = started, finished
    run.given |= {*given}
    return run


def test_a_function_names_what_began_in_it_and_what_began_on_its_meshes_while_it_went_on() -> None:
    loop = asyncio.new_event_loop()
    link = DriverWeaverLink(None, OpenSession("s", "ann", "key"), loop)
    link._client = weaver = WeaverStandIn()  # type: ignore[assignment]
    runs = Runs.__new__(Runs)
    runs._context = SimpleNamespace(weaver=link, loop=loop)  # type: ignore[assignment]
    spawned = going(5, 0.0, 1.0)
    spawned.output.processes.meshes.append(40)
    runs._runs = {
        1: going(1, 0.0),
        2: going(2, 10.0, 20.0, (9,)),
        3: going(3, 30.0, None, (9,)),
        4: going(4, 0.0, None, (8,)),
        5: spawned,
    }

    def trains() -> list[list[str]]:
        loop.run_until_complete(runs._name_trainings())
        return [[one.id for one in run.trains] for run in runs._runs.values()]

    assert trains() == [[], [], [], [], []]  # the weaver is away
    weaver.known = [
        RunsPlace("1@s", [5.0], "a", "train"),
        RunsPlace("9", [1.0], "before", "train"),
        RunsPlace("9", [12.0, 35.0], "b", "train"),
        RunsPlace("9", [25.0], "between", "train"),
        RunsPlace("9", [36.0], "c", "train"),
        RunsPlace("40", [90.0], "d", "train"),
        RunsPlace("1@other", [5.0], "no", "train"),
    ]
    named = [["a"], ["b"], ["b", "c"], [], ["d"]]
    assert trains() == named
    assert runs._runs[1].trains == (TrainingName("a", "train"),)
    weaver.known = None
    assert trains() == named  # what it said last holds
    weaver.known = []
    assert trains() == [[], [], [], [], []]  # the runs were removed
    loop.close()
