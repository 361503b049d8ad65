"""What a client is told of the end of its session."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from loom.errors import ConnectionLost, LoomError, SessionClosed, UnknownSession
from loom.wire.handshake import refusal
from loom.wire.stream import unnumbered_frame
from tests.unit.loom_proxy.session.test_interrupts import Wire, connection_over

BOUND = 10.0


class Ended(Wire):
    """A gateway that says, once it was asked for anything, that the session has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()
        self._answers = [[b"".join(unnumbered_frame(refusal(UnknownSession("session 's' has ended: why"))))]]

    def try_send(self, data: Any) -> int:
        self.asked.set()
        return super().try_send(data)

    def receive(self, wait: bool) -> list[bytes] | None:
        assert self.asked.wait(BOUND)
        return self._answers.pop() if self._answers else None


@pytest.mark.parametrize(
    ("asked", "error", "text"),
    [(True, SessionClosed, "session 's' was closed here"), (False, UnknownSession, "session 's' has ended: why")],
)
def test_a_session_that_a_client_ended_is_closed_whatever_the_gateway_still_knows_of_it(
    asked: bool, error: type[LoomError], text: str
) -> None:
    wire = Ended()
    connection = connection_over(wire)
    closing = threading.Thread(target=connection.end_session, args=[BOUND])
    if asked:
        closing.start()
    else:
        wire.asked.set()

    while connection.read(True):
        pass

    if asked:
        closing.join(BOUND)
    with pytest.raises(error, match=text):
        connection.calls.check_open()


class Broken(Wire):
    """A wire whose next read meets an error that nobody has thought of."""

    def receive(self, wait: bool) -> list[bytes] | None:
        raise ZeroDivisionError("of Loom's own")


def test_an_error_of_the_laptops_own_ends_its_session_with_what_it_was() -> None:
    connection = connection_over(Broken())

    with pytest.raises(ZeroDivisionError):
        connection.read(True)

    with pytest.raises(ConnectionLost, match="ZeroDivisionError: of Loom's own"):
        connection.calls.check_open()


def test_an_error_of_the_laptops_own_while_it_reconnects_ends_its_session_with_what_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connection = connection_over(Wire())

    def fail(lost: float) -> Any:
        raise ZeroDivisionError("of Loom's own")

    monkeypatch.setattr(connection, "_connect_again", fail)
    with pytest.raises(ZeroDivisionError):
        connection.reconnect()

    with pytest.raises(ConnectionLost, match="ZeroDivisionError: of Loom's own"):
        connection.calls.check_open()
