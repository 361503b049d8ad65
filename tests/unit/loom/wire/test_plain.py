"""Whatever a user passes where a name, a number or a configuration has to be: it is sent plainly, or refused."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import pytest

from loom.errors import LoomError, TooLarge, WrongArguments
from loom.wire.bodies import AskWeaver, SpawnProcs
from loom.wire.body import BODIES
from loom.wire.frames import MAX_HEADER
from loom.wire.length_prefix import LENGTH
from loom.wire.messages import Kind, Message
from loom.wire.plain import plain
from loom.wire.stream import Stream
from tests.support.odd_values import LARGE, LONE, ODD, PLAIN, REFUSED

BODY_KINDS = sorted(kind for kind in BODIES if kind not in (Kind.HELLO, Kind.WELCOME, Kind.CHUNK))


def ended(value: Any) -> Any:
    """Return a value without NaN, which equals nothing."""
    return "nan" if isinstance(value, float) and math.isnan(value) else value


@pytest.mark.parametrize("name", PLAIN)
def test_a_value_with_an_obvious_plain_form_gets_it(name: str) -> None:
    value, expected = PLAIN[name]

    found = plain(value, "config")

    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_without_one_is_refused_soon_by_its_path(name: str) -> None:
    began = time.process_time()

    with pytest.raises(WrongArguments, match=r"^config\.lr"):
        plain({"lr": REFUSED[name]}, "config")

    assert time.process_time() - began < 10


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"lr": {"schedule": [1, 2, b"3"]}}, "config.lr.schedule[2]: "),
        ({"a b": {"c": object()}}, "config['a b'].c: "),
        ([[{"x": 1j}]], "config[0][0].x: "),
    ],
)
def test_the_path_leads_to_the_value(value: Any, path: str) -> None:
    with pytest.raises(WrongArguments) as raised:
        plain(value, "config")

    assert str(raised.value).startswith(path)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_json_takes_finite_numbers_only(value: float) -> None:
    assert ended(plain([value], "a")[0]) == ended(value)
    with pytest.raises(WrongArguments, match=r"^a\[0\]: .* JSON"):
        plain([value], "a", finite=True)


def test_a_later_change_of_a_value_does_not_reach_the_message() -> None:
    config: dict[str, Any] = {"schedule": [1, 2]}
    ours, theirs = Stream(), Stream()
    ours.put(AskWeaver("command", config, 1.0).message(1))
    config["schedule"].append(object())

    assert received(ours, theirs)[0].body[1] == {"schedule": (1, 2)}


def messages_with(value: Any) -> Iterator[Message | None]:
    """Yield a message of each kind with a value in each of its fields; None for one that is refused as a body."""
    for kind in BODY_KINDS:
        names = BODIES[kind].__match_args__
        for place in range(len(names)):
            fields = [value if at == place else 1 for at in range(len(names))]
            yield Message(kind, 7, fields)
            try:
                yield BODIES[kind](*fields).message(7)
            except (LoomError, TypeError):
                yield None


def received(ours: Stream, theirs: Stream) -> list[Message]:
    found: list[Message] = []
    while (frame := ours.next_frame()) is not None:
        found += theirs.receive(frame[LENGTH.size :])
    return found


@pytest.mark.parametrize("lanes", [True, False])
@pytest.mark.parametrize(
    "large", [0, pytest.param(1 << 20, marks=pytest.mark.slow)], ids=["small", "with a large payload"]
)
@pytest.mark.parametrize("name", [name for name in ODD if name not in ("wide", "many", "endless")])
def test_no_value_in_any_field_of_any_message_ends_the_stream(name: str, large: int, lanes: bool) -> None:
    ours, theirs = Stream(lanes=lanes), Stream(lanes=lanes)
    sent = 0
    tried = [message for message in messages_with(ODD[name]) if message is not None]
    for message in tried if lanes and not large else tried[::9]:
        try:
            ours.put(message._replace(parts=[bytes(large)] if large else ()))
            sent += 1
        except (WrongArguments, TooLarge):
            pass
    ours.put(Message(Kind.RESULT, 8, [1.0], [b"the last"]))

    found = received(ours, theirs)

    assert len(found) == sent + 1
    assert bytes(next(one for one in found if one.id == 8).parts[0]) == b"the last"


def test_the_error_for_a_field_names_it_and_what_it_takes() -> None:
    with pytest.raises(WrongArguments, match=r"^name: the text .* lone surrogate"):
        Stream().put(SpawnProcs(0, LONE, {"gpus": 2}).message())
    with pytest.raises(WrongArguments, match=r"^per_host: .*keys are texts"):
        SpawnProcs(0, "a", {1: 2}).message()  # type: ignore[dict-item]
    with pytest.raises(WrongArguments, match=r"^timeout: -1 is not a number of 0 or more"):
        AskWeaver("status", {}, -1).message()


@pytest.mark.parametrize("name", LARGE)
def test_a_value_that_no_header_holds_is_refused_with_the_bound(name: str) -> None:
    stream = Stream()

    with pytest.raises(TooLarge, match=r"arguments has 2,097,\d+ bytes; 1,044,480 are the most"):
        stream.put(AskWeaver("command", {"value": LARGE[name]}, 1.0).message(1))
    assert not stream.ready


def test_an_object_of_too_many_buffers_is_refused() -> None:
    stream = Stream()

    with pytest.raises(TooLarge, match="an object of 200,000 large buffers"):
        stream.put(Message(Kind.RUN, 1, ["name", True], [b"x"] * 200_000))


@pytest.mark.parametrize("size", [4_000, 100_000, 500_000, 1_000_000])
def test_messages_with_large_heads_share_frames_as_far_as_a_header_holds_them(size: int) -> None:
    ours, theirs = Stream(), Stream()
    for number in range(300 if size < 500_000 else 7):
        ours.put(AskWeaver("command", {"value": "x" * size}, 1.0).message(number))
    found: list[Message] = []

    while (frame := ours.next_frame()) is not None:
        assert int.from_bytes(frame[LENGTH.size : LENGTH.size + 4], "big") <= MAX_HEADER
        found += theirs.receive(frame[LENGTH.size :])
        ours._acknowledge(theirs.received)

    assert [message.id for message in found] == list(range(len(found)))
    assert len(found) == (300 if size < 500_000 else 7)
    assert ours.outbox.pending_bytes == 0
