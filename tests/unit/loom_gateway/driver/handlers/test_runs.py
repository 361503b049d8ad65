"""Which runs a driver remembers."""

from __future__ import annotations

from loom.wire.messages import Kind, Message
from loom_gateway.driver.handlers.runs import Run, Runs


def finished_run(ident: int, size: int) -> Run:
    run = Run(ident, f"run {ident}", True)
    run.finished = float(ident)
    run.answer = Message(Kind.RESULT, ident, [0.0], [range(size)])  # type: ignore[list-item]
    return run


def test_results_are_kept_up_to_a_size_but_the_newest_in_any_case() -> None:
    runs = Runs.__new__(Runs)
    runs._runs = {ident: finished_run(ident, 100 << 20) for ident in range(1, 6)}
    runs._runs[9] = Run(9, "going", True)
    runs._forget_oldest()
    assert list(runs._runs) == [4, 5, 9]

    runs._runs[6] = finished_run(6, 1 << 30)
    runs._forget_oldest()
    assert list(runs._runs) == [9, 6]
