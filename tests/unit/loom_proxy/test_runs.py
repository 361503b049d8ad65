"""The output of a function of `job.run`, printed or not; see also `tests/integration/session/test_runs.py`."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from loom.errors import LoomError, ProtocolMismatch
from loom.weaver.run_views import TrainingName
from loom.wire.bodies import AT_EACH, ListRuns, ReadRunOutput, RunChanged
from loom_proxy.runs import KnownRuns


class Answer:
    """Stands in for a future that is done."""

    _error = None

    def __init__(self, value: Any) -> None:
        self._value = value

    def get(self, timeout: float | None = None) -> Any:
        return self._value

    def exception(self, timeout: float | None = None) -> None:
        return None


class StandIn:
    """Stands in for a session in which each function prints two lines and returns 5."""

    knows_traces = False
    knows_trainings = False
    knows_restarts = False
    error: LoomError | None = None

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

    def flush(self) -> None:
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


class Trains(StandIn):
    """A session with a function that trains, and one that does not; its driver is of this version, or older."""

    def ask(self, operation: object, *_: object, **__: object) -> Answer:
        assert isinstance(operation, ListRuns)
        train, other = (3, "train", "running", 1.0, None), (4, "other", "done", 1.0, 2.0)
        return Answer([(*train, [("3f2a9c", "sft")]), (*other, [])] if operation.trainings else [train, other])


def test_a_function_that_trains_names_the_run_if_the_driver_knows_it() -> None:
    session: Any = Trains()
    runs = KnownRuns(session)

    assert [run.trains for run in runs.listed().values()] == [(), ()]
    session.knows_trainings = True
    listed = runs.listed()

    assert listed["train"].trains == (TrainingName("3f2a9c", "sft"),)
    assert repr(listed) == (
        "{'train': <RunHandle 'train' running, trains sft 3f2a9c>, 'other': <RunHandle 'other' done>}"
    )
    assert "trains sft 3f2a9c" in listed["train"]._repr_html_()


def test_an_older_cluster_is_asked_for_no_restarts() -> None:
    session: Any = StandIn()

    with pytest.raises(ProtocolMismatch, match="is older, and starts no function again"):
        KnownRuns(session).start(print, (), {}, None, 1)
    assert KnownRuns(session).start(print, (), {}, None, AT_EACH).name == "print-7"


@pytest.mark.parametrize("restarts", [-1, 1.5, True, "3", 10**9])
def test_a_number_of_restarts_that_makes_no_sense_is_refused(restarts: Any) -> None:
    session: Any = StandIn()
    with pytest.raises(ValueError, match="restarts is a number from 0 to"):
        KnownRuns(session).start(print, (), {}, None, restarts)
