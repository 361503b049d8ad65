"""Which runs a driver remembers."""

from __future__ import annotations

import asyncio

from loom.wire.bodies import RECORD
from loom.wire.messages import Kind, Message
from loom_gateway.driver.handlers.runs import KEPT_BYTES, FunctionRun, Runs
from loom_gateway.driver.runs.output import KEPT_RECORDS, RecordedOutput


def finished_run(ident: int, size: int, shown: int = 0) -> FunctionRun:
    run = FunctionRun(ident, f"run {ident}", True)
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
    runs._runs[9] = FunctionRun(9, "going", True)
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
