"""An interrupt at any moment of sending loses nothing: the stream goes on where it was."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from loom.wire.bodies import Call, EndRun
from loom.wire.handshake import Welcome
from loom.wire.length_prefix import LENGTH
from loom.wire.stream import Stream
from loom_proxy.session.connection import Address, Connection
from loom_proxy.session.read_loop import Uninterrupted
from loom_proxy.session.transport_and_handshake import Handshake

WATCHED = ("/loom/wire/", "/loom_proxy/session/c", "/loom_proxy/session/i", "/loom_proxy/session/w")
"""Files in which a signal comes, at each line that runs."""


class Wire:
    """Not a socket: keeps the frames that were sent."""

    is_tls = False

    def fileno(self) -> int:
        return -1

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    @staticmethod
    def encode(frame: bytes) -> bytes:
        return frame[LENGTH.size :]

    def try_send(self, data: Any) -> int:
        self.frames.append(bytes(data))
        return len(data)

    send_all = try_send

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def _python_handles_interrupts() -> Iterator[None]:
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


class SignalAt:
    """A trace function that sends this process a SIGINT before the n-th line of the watched files."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if not any(part in frame.f_code.co_filename for part in WATCHED):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)
        return self


def connection_over(wire: Wire) -> Connection:
    welcome = Welcome(session="s", workers=["a"], versions={}, next_id=1)
    return Connection(Handshake(wire, welcome, []), Address("ws://host/ws/v1", None), Stream())  # type: ignore[arg-type]


def test_an_interrupt_at_any_line_loses_no_message_and_no_frame() -> None:
    wire = Wire()
    connection = connection_over(wire)
    calls = connection.calls
    sent, interrupted, line = [], 0, 0
    while True:
        line += 1
        trace = SignalAt(line)
        sys.settrace(trace)
        try:
            sent.append(calls.send(EndRun(line, "forget")))
            calls.ask(Call(line, "add"))
            calls.flush()
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(None)
        if trace.left > 0:
            break  # the whole of it ran through
        calls.flush()
    calls.send(EndRun(0, "the last"))
    assert connection._sender.drain(10)

    peer = Stream()
    arrived = [message for frame in wire.frames for message in peer.receive(frame)]  # in order, or it raises

    idents = [message.id for message in arrived]
    assert len(idents) == len(set(idents))
    assert set(sent) <= set(idents)
    assert tuple(arrived[-1].body) == (0, "the last")
    assert interrupted == line - 1 > 30
    connection.leave("the test is over")


def test_an_interrupt_during_the_block_comes_at_its_end() -> None:
    steps = []

    def block() -> None:
        with Uninterrupted():
            signal.raise_signal(signal.SIGINT)
            steps.append("inside")
        steps.append("after")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert steps == ["inside"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)  # the handler is back


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_whatever_handled_interrupts_before_does_so_afterwards(handler: Any) -> None:
    signal.signal(signal.SIGINT, handler)
    with Uninterrupted():
        pass
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_error_in_the_block_puts_the_handler_back() -> None:
    with pytest.raises(ValueError, match="x"):
        with Uninterrupted():
            raise ValueError("x")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_in_another_thread_it_does_nothing() -> None:
    seen = []

    def block() -> None:
        with Uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=block)
    thread.start()
    thread.join(10)
    assert seen == [signal.default_int_handler]
