"""The weaver, asked through a session; and by REST where that cannot be."""

from __future__ import annotations

from typing import Any

import pytest

import loom
from loom.wire.bodies import AskWeaver
from loom_proxy.weaver.client import SessionWeaver


class Answer:
    """Stands in for a future: its result or its error is there."""

    def __init__(self, caller: Caller, result: Any) -> None:
        self._caller, self._result = caller, result

    def get(self, timeout: float | None = None) -> Any:
        if isinstance(self._result, Exception):
            if isinstance(self._result, loom.SessionLost):
                self._caller.error = self._result
            raise self._result
        return self._result


class Caller:
    """Stands in for a session that answers what a test says."""

    def __init__(self, result: Any) -> None:
        self.error: Exception | None = None
        self.asked: list[AskWeaver] = []
        self._result = result

    def ask(self, operation: AskWeaver, key: int | None) -> Answer:
        assert key is None
        self.asked.append(operation)
        return Answer(self, self._result)


class Rest:
    """Stands in for the gateway's REST interface."""

    def ask(self, operation: str, **arguments: Any) -> Any:
        return "by REST", operation, arguments


def way(result: Any) -> tuple[SessionWeaver, Caller]:
    caller: Any = Caller(result)
    gateway: Any = Rest()
    return SessionWeaver(caller, gateway), caller


def test_a_question_goes_through_the_session() -> None:
    weaver, caller = way({"event": 3})

    assert weaver.ask("events", after=None, limit=5) == {"event": 3}
    assert caller.asked == [AskWeaver("events", {"limit": 5}, 10.0)]


def test_a_command_that_waits_may_take_longer() -> None:
    weaver, caller = way({})

    weaver.ask("command", kind="pause", wait=5.0)

    assert caller.asked == [AskWeaver("command", {"kind": "pause", "wait": 5.0}, 15.0)]


@pytest.mark.parametrize("operation", ["inject", "remove_fault"])
def test_faults_are_injected_by_rest(operation: str) -> None:
    weaver, caller = way({})

    assert weaver.ask(operation, injection="i") == ("by REST", operation, {"injection": "i"})
    assert caller.asked == []


def test_when_the_session_is_over_rest_is_asked() -> None:
    weaver, caller = way({})
    caller.error = loom.SessionLost("it ended")

    assert weaver.ask("status") == ("by REST", "status", {})
    assert caller.asked == []


def test_a_question_that_the_end_of_the_session_cut_off_is_asked_again() -> None:
    weaver, _ = way(loom.SessionLost("it ended"))

    assert weaver.ask("command_state", id="c") == ("by REST", "command_state", {"id": "c"})


def test_a_command_that_the_end_of_the_session_cut_off_is_not_given_again() -> None:
    weaver, _ = way(loom.SessionLost("it ended"))

    with pytest.raises(loom.SessionLost):
        weaver.ask("command", kind="pause")


def test_a_session_that_does_not_answer_in_time_is_unreachable() -> None:
    weaver, _ = way(loom.WaitTimeout("late"))

    with pytest.raises(loom.GatewayUnreachable, match="no answer from the weaver over the session within 10 s"):
        weaver.ask("status")


def test_what_the_weaver_answers_is_raised() -> None:
    weaver, _ = way(loom.UnknownReplica("no replica"))

    with pytest.raises(loom.UnknownReplica):
        weaver.ask("replica", id="x")
