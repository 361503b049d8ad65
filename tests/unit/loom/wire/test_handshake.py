"""The handshake: both sides read each other, whatever the other's minor version is, or refuse in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from loom import errors
from loom.errors import LoomError, ProtocolMismatch, SessionLost
from loom.wire.frames import decode_frame
from loom.wire.handshake import (
    CAPABILITIES,
    PROTOCOL,
    Hello,
    Welcome,
    check_protocol,
    error_from_refusal,
    python_mismatch,
    python_version,
    refusal,
)
from loom.wire.messages import Kind, Message
from loom.wire.stream import unnumbered_frame


def over_the_wire(message: Message) -> Message:
    (arrived,) = decode_frame(b"".join(unnumbered_frame(message))).messages
    return arrived


def test_a_hello_is_read_back() -> None:
    hello = Hello(client="test 1.0", session="train", received=3)

    message = over_the_wire(hello.message())

    assert message.kind == Kind.HELLO
    assert Hello.from_body(message.body) == hello
    assert hello.protocol == PROTOCOL
    assert hello.capabilities == CAPABILITIES
    assert hello.python == python_version()


def test_a_welcome_is_read_back() -> None:
    workers = ("tcp://10.0.0.1:26600", "tcp://10.0.0.2:26600")
    welcome = Welcome("train", workers, versions={"loom": "0.1"}, next_id=9)

    message = over_the_wire(welcome.message())

    assert message.kind == Kind.WELCOME
    assert Welcome.from_body(message.body) == welcome


def test_a_minor_version_that_says_less_is_understood() -> None:
    assert Hello.from_body([{"protocol": (1, 0)}]) == Hello()


def test_what_a_newer_minor_version_adds_is_ignored() -> None:
    body = [{**Hello(session="train").to_body()[0], "compression": "zstd", "priority": {"lane": 1}}]

    assert Hello.from_body(body) == Hello(session="train")


@pytest.mark.parametrize(
    "body",
    [
        (),
        (None,),
        ("hello",),
        ([("session", "train")],),
        ({}, {}),
        (7,),
    ],
)
@pytest.mark.parametrize("kind", [Hello, Welcome])
def test_a_body_of_another_shape_is_refused(kind: type[Hello] | type[Welcome], body: Sequence[Any]) -> None:
    with pytest.raises(ProtocolMismatch, match="not a handshake of Loom's protocol"):
        kind.from_body(body)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("protocol", 1),
        ("protocol", "1.0"),
        ("protocol", (1, "0")),
        ("capabilities", "stream"),
        ("capabilities", (1,)),
        ("python", None),
        ("client", 1),
        ("session", 1),
        ("session", ("a",)),
        ("session", {}),
        ("received", "1"),
        ("received", -1),
        ("received", True),
    ],
)
def test_a_hello_with_a_field_of_another_type_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ProtocolMismatch, match=field):
        Hello.from_body([{field: value}])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("session", None),
        ("workers", None),
        ("workers", "tcp://h:1"),
        ("versions", ()),
        ("versions", {"loom": 1}),
        ("next_id", 1.5),
    ],
)
def test_a_welcome_with_a_field_of_another_type_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ProtocolMismatch, match=field):
        Welcome.from_body([{"session": "train", "workers": (), field: value}])


def test_a_welcome_without_a_session_is_refused() -> None:
    with pytest.raises(ProtocolMismatch, match="session"):
        Welcome.from_body([{"workers": ()}])


@pytest.mark.parametrize("protocol", [PROTOCOL, (PROTOCOL[0], PROTOCOL[1] + 1), [PROTOCOL[0], 99]])
def test_another_minor_version_is_accepted(protocol: Sequence[int]) -> None:
    check_protocol(protocol, ours="driver", theirs="client")


def test_another_major_version_is_refused_with_both_versions() -> None:
    with pytest.raises(ProtocolMismatch) as caught:
        check_protocol((2, 3), ours="gateway", theirs="client")

    text = str(caught.value)
    assert "the client speaks version 2.3" in text
    assert f"the gateway speaks {PROTOCOL[0]}.{PROTOCOL[1]}" in text
    assert "install the same major version of monarch-loom" in text


@pytest.mark.parametrize("protocol", [(), (1,), (1, 0, 0), ("1", "0"), (True, 0), (1.0, 0)])
def test_what_is_no_version_is_refused(protocol: Any) -> None:
    with pytest.raises(ProtocolMismatch):
        check_protocol(protocol, ours="gateway", theirs="client")


@pytest.mark.parametrize(
    "error",
    [
        errors.AuthenticationError("the token is wrong"),
        errors.UnknownSession("no session 'a'; living sessions: b"),
        errors.SessionInUse("another client is connected"),
        errors.ProtocolMismatch("the client speaks version 2.0"),
        errors.WorkerUnreachable("nobody answers at tcp://h:1"),
        LoomError("something else"),
    ],
)
def test_a_refusal_is_read_back(error: LoomError) -> None:
    message = over_the_wire(refusal(error))
    read = error_from_refusal(message)

    assert message.kind == Kind.REFUSE
    assert type(read) is type(error)
    assert str(read) == str(error)


def test_a_lost_session_keeps_its_exit_code_and_output() -> None:
    lost = SessionLost("the driver was killed", -9, "last words\n")

    read = error_from_refusal(over_the_wire(refusal(lost)))

    assert isinstance(read, SessionLost)
    assert (str(read), read.exit_code, read.output) == ("the driver was killed", -9, "last words\n")


def test_a_refusal_of_a_newer_peer_keeps_its_code() -> None:
    read = error_from_refusal(Message(Kind.REFUSE, 0, ("on_strike", "not today", {"until": "noon"})))

    assert type(read) is LoomError
    assert str(read) == "not today [on_strike]"


@pytest.mark.parametrize(
    "body",
    [(), ("authentication",), ("a", "b", {}, "c"), ("session_lost", "gone", None), ("session_lost", "gone", ())],
)
def test_a_refusal_of_another_shape_is_refused(body: Sequence[Any]) -> None:
    with pytest.raises(ProtocolMismatch, match="not a message REFUSE of Loom's protocol"):
        error_from_refusal(Message(Kind.REFUSE, 0, body))


def test_the_text_about_python_versions_names_both_and_what_still_works() -> None:
    text = str(python_mismatch("__main__.Counter", (3, 10), (3, 12)))

    assert "__main__.Counter" in text
    assert "this is Python 3.10" in text
    assert "the cluster runs Python 3.12" in text
    assert "What still works" in text
