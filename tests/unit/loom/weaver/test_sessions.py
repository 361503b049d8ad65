"""What sessions report of themselves, by clocks that the tests set."""

from __future__ import annotations

import pytest

from loom.control.latencies import BOUNDS
from loom.control.operations import ReportCalls
from loom.errors import WrongArguments
from loom.weaver.server import handlers
from loom.weaver.server.handlers import LIVES_FOR, MOST_USED, USES_FOR, Sessions


def report(
    session: str, in_flight: int = 0, kept: int = 0, workers: list[str] | None = None, **more: object
) -> ReportCalls:
    counts = [0] * (len(BOUNDS) + 1)
    said = {"session": session, "counts": counts, "sum": 0.0, "in_flight": in_flight, "kept": kept}
    return ReportCalls.read({**said, "workers": workers or [], **more})


@pytest.mark.guarantees(
    "users", "Operations in flight, and bytes of results that are kept, count in all sessions of a user"
)
def test_what_a_session_used_counts_until_its_report_is_old() -> None:
    sessions = Sessions()
    sessions.take(report("a", in_flight=7, kept=100), now=0.0)

    before = sessions.take(report("b"), now=USES_FOR - 0.01)
    after = sessions.take(report("b"), now=USES_FOR)

    assert (before, after) == ({"in_flight": 7, "kept": 100}, {"in_flight": 0, "kept": 0})


def test_a_newer_report_takes_the_place_of_an_older_one() -> None:
    sessions = Sessions()
    sessions.take(report("a", in_flight=7), now=0.0)
    sessions.take(report("a", in_flight=2), now=USES_FOR - 1)

    assert sessions.take(report("b"), now=USES_FOR + 1) == {"in_flight": 2, "kept": 0}


def test_what_all_use_fits_into_a_number_of_json() -> None:
    sessions = Sessions()
    sessions.take(report("a", kept=MOST_USED - 1), now=0.0)
    sessions.take(report("b", kept=MOST_USED - 1), now=0.0)

    assert sessions.take(report("c"), now=0.0) == {"in_flight": 0, "kept": MOST_USED}


def test_a_worker_is_in_use_while_a_session_with_it_lives() -> None:
    sessions = Sessions()
    sessions.take(report("a", workers=["tcp://one"]), now=0.0)

    assert sessions.workers("a") == {"tcp://one"}
    assert sessions.use({"tcp://one", "tcp://two"}, now=LIVES_FOR - 0.01)
    assert not sessions.use({"tcp://two"}, now=0.0)
    assert not sessions.use({"tcp://one"}, now=LIVES_FOR)


def test_the_session_that_reported_longest_ago_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "_MAX_SESSIONS", 2)
    sessions = Sessions()
    for name in ("a", "b", "a", "c"):
        sessions.take(report(name), now=0.0)

    assert list(sessions.latencies) == ["a", "c"]


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"counts": [0]}, "counts are"),
        ({"workers": "tcp://one"}, "workers are at most"),
        ({"workers": [1]}, "workers are at most"),
        ({"in_flight": -1}, "in_flight"),
        ({"kept": "much"}, "kept"),
    ],
)
def test_a_report_that_makes_no_sense_is_refused(wrong: dict[str, object], match: str) -> None:
    with pytest.raises(WrongArguments, match=match):
        report("a", **wrong)  # type: ignore[arg-type]
