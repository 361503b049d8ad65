"""Receivers of Monarch ports in two steps, of the installed version of Monarch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from monarch.actor import Actor, Port, endpoint, send, this_proc

from loom.wire.arrays import passing_on
from loom_gateway.driver.monarch.receiver import Receiver, open_for_messages, open_for_replies
from loom_gateway.workers.monarch_env import monarch_version

BOUND = 30.0


class Echo(Actor):
    @endpoint
    def same(self, value: Any) -> Any:
        return value

    @endpoint
    def fail(self, text: str) -> None:
        raise LookupError(text)

    @endpoint
    def put(self, port: Port[Any], values: list[Any]) -> None:
        for value in values:
            port.send(value)


class Unpickled:
    """Is unpickled as the id of the thread that does it."""

    def __reduce__(self) -> Any:
        return threading.get_ident, ()


class Broken:
    """Cannot be unpickled."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


@pytest.fixture(scope="module")
def echo() -> Iterator[Any]:
    """An actor in this very process."""
    actors = this_proc().spawn("echo", Echo)
    yield actors
    actors.stop().get(timeout=BOUND)


def openings() -> list[Any]:
    opened: list[tuple[str, Callable[[], Receiver]]] = [
        ("replies", open_for_replies),
        ("messages", lambda: open_for_messages(once=False)),
    ]
    return [pytest.param(function, id=name) for name, function in opened]


def on_a_thread(work: Callable[[], Any]) -> Any:
    """Return what a function returns on a thread of its own, as receivers are read."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    thread.join(BOUND)
    return results[0]


def read(receiver: Receiver) -> Any:
    return on_a_thread(lambda: receiver.unpickle(receiver.wait()))


def failure(receiver: Receiver, message: Any) -> BaseException:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - of any class
        receiver.unpickle(message)
    return raised.value


@pytest.mark.parametrize("opened", openings())
def test_messages_arrive_whole_and_in_order(echo: Any, opened: Callable[[], Receiver]) -> None:
    receiver = opened()
    for number in range(500):
        receiver.port.send(number)
    assert on_a_thread(lambda: [receiver.unpickle(receiver.wait()) for _ in range(500)]) == list(range(500))


@pytest.mark.parametrize("opened", openings())
def test_a_receiver_that_waits_gets_what_comes_later(echo: Any, opened: Callable[[], Receiver]) -> None:
    receiver = opened()
    got: list[Any] = []
    reader = threading.Thread(target=lambda: got.extend(receiver.wait() for _ in range(3)), daemon=True)
    reader.start()
    for number in range(3):
        receiver.port.send(number)
    reader.join(BOUND)
    assert [receiver.unpickle(message) for message in got] == [0, 1, 2]


@pytest.mark.parametrize("opened", openings())
def test_the_event_loop_can_wait_too(echo: Any, opened: Callable[[], Receiver]) -> None:
    receiver = opened()

    async def wait() -> list[Any]:
        first = asyncio.create_task(receiver.wait_on_loop())
        await asyncio.sleep(0)  # so that it waits
        for number in range(20):
            receiver.port.send(number)
        return [await first, *[await receiver.wait_on_loop() for _ in range(19)]]

    messages = asyncio.run(asyncio.wait_for(wait(), BOUND))
    assert [receiver.unpickle(message) for message in messages] == list(range(20))


@pytest.mark.parametrize("opened", openings())
def test_an_exception_that_was_sent_is_raised_by_unpickle_only(echo: Any, opened: Callable[[], Receiver]) -> None:
    receiver = opened()
    receiver.port.exception(LookupError("there is none"))
    receiver.port.send("after it")
    message = on_a_thread(receiver.wait)
    assert repr(failure(receiver, message)) == "LookupError('there is none')"
    assert read(receiver) == "after it"


@pytest.mark.parametrize("opened", openings())
def test_a_message_that_cannot_be_unpickled_leaves_the_next_one(echo: Any, opened: Callable[[], Receiver]) -> None:
    receiver = opened()
    receiver.port.send(Broken())
    receiver.port.send("after it")
    message = on_a_thread(receiver.wait)
    assert "no number" in str(failure(receiver, message))
    assert read(receiver) == "after it"


def test_replies_are_unpickled_by_the_thread_that_waits(echo: Any) -> None:
    receiver = open_for_replies()
    receiver.port.send(Unpickled())

    def thread_of_reader() -> tuple[int, int]:
        with passing_on():  # holds for this thread alone
            return receiver.unpickle(receiver.wait()), threading.get_ident()

    by, here = on_a_thread(thread_of_reader)
    assert by == here


def test_a_reply_to_send_has_the_rank_of_its_actor(echo: Any) -> None:
    receiver = open_for_messages(once=False)
    send(echo.same, ("a value",), {}, receiver.port, "all")
    message = on_a_thread(receiver.wait)
    assert (receiver.rank(message), receiver.unpickle(message)) == (0, "a value")


def test_a_failure_has_the_rank_of_its_actor_too(echo: Any) -> None:
    receiver = open_for_messages(once=False)
    send(echo.fail, ("not this one",), {}, receiver.port, "all")
    message = on_a_thread(receiver.wait)
    assert receiver.rank(message) == 0
    assert "not this one" in str(failure(receiver, message))


def test_messages_with_and_without_a_rank_keep_their_order(echo: Any) -> None:
    receiver = open_for_messages(once=False)
    echo.put.call_one(receiver.port, ["first", "second"]).get(timeout=BOUND)
    send(echo.same, ("third",), {}, receiver.port, "all")
    messages = on_a_thread(lambda: [receiver.wait() for _ in range(3)])
    assert [receiver.rank(message) for message in messages] == [None, None, 0]
    assert [receiver.unpickle(message) for message in messages] == ["first", "second", "third"]


def test_a_port_with_once_takes_one_message(echo: Any) -> None:
    receiver = open_for_messages(once=True)
    receiver.port.send("the only one")
    message = on_a_thread(receiver.wait)
    assert receiver.unpickle(message) == "the only one"
    assert receiver.rank(message) is None


def test_the_rank_of_a_port_with_once_is_known_up_to_monarch_0_7(echo: Any) -> None:
    receiver = open_for_messages(once=True)
    send(echo.same, ("a value",), {}, receiver.port, "all")
    message = on_a_thread(receiver.wait)
    assert receiver.rank(message) == (0 if monarch_version() < (0, 8) else None)
    assert receiver.unpickle(message) == "a value"
