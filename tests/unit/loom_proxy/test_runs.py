"""The output of a function of `job.run`, printed or not; see also `tests/integration/session/test_runs.py`."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from loom.wire.bodies import ReadRunOutput, RunChanged
from loom_proxy.runs import KnownRuns


class Answer:
    """Stands in for a future that is done."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def get(self, timeout: float | None = None) -> Any:
        return self._value

    def exception(self, timeout: float | None = None) -> None:
        return None


class StandIn:
    """Stands in for a session in which each function prints two lines and returns 5."""

    knows_traces = False

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.encoder = self

    def dumps(self, value: object, what: str) -> list[bytes]:
        return []

    def check_open(self) -> None:
        """It is open."""

    def next_id(self) -> int:
        return 7

    def ask(self, operation: object, *_: object, **__: object) -> Answer:
        printed = [(1, "to the output\n"), (2, "to the errors\n")]
        return Answer((2, True, printed) if isinstance(operation, ReadRunOutput) else 5)

    def send(self, *_: object, **__: object) -> None:
        """Nobody receives it."""


@pytest.mark.parametrize("printing", [True, False])
def test_what_a_function_prints_is_printed_while_printing_is_on(
    capsys: pytest.CaptureFixture[str], printing: bool
) -> None:
    session: Any = StandIn()

    assert KnownRuns(session, lambda: printing).call(print, (), {}, None) == 5

    shown = capsys.readouterr()
    assert (shown.out, shown.err) == (("to the output\n", "to the errors\n") if printing else ("", ""))


class EndsMeanwhile(StandIn):
    """A session in which a run ends after the driver has listed it, and before the program makes its handle."""

    known: KnownRuns

    def ask(self, operation: object, *_: object, **__: object) -> Answer:
        self.known.receive(RunChanged("done", 1.0, 2.0).message(3))
        return Answer([(3, "waiter", "running", 1.0, None)])


def test_a_run_that_ends_while_it_is_listed_has_ended() -> None:
    session: Any = EndsMeanwhile()
    session.known = KnownRuns(session)

    run = session.known.listed()["waiter"]

    assert (run.status, run.started, run.finished) == ("done", 1.0, 2.0)
    assert not session.known._missed
