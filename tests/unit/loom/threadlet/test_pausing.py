"""Pause, stop and drain, at the boundary between two steps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.logged import messages
from tests.unit.loom.threadlet.fake_weaver import (
    BOUND,
    OK,
    FakeWeaver,
    Loop,
    Make,
    come,
    eventually,
    told,
)


def test_a_paused_loop_waits_at_the_boundary(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    got: list[float] = []
    made.handler("lr")(lambda value: got.append(value))
    connection, _ = weaver.welcome()

    def body(number: int) -> None:
        with made.step(number):
            pass

    loop = Loop(body)
    assert loop.step() == 0
    pause = weaver.command(connection, "pause")
    come(made)
    loop.go()

    assert connection.ack(pause) == [1, OK]
    while (beat := connection.expect("beat"))[3] != "paused":
        pass
    assert beat[2] == 1
    assert made.paused
    update = weaver.command(connection, "update_config", lr=0.5)
    assert connection.ack(update)[1]["ok"]
    assert got == [0.5]
    assert loop.done.empty()

    resume = weaver.command(connection, "resume")
    assert connection.ack(resume) == [1, OK]
    assert loop.done.get(timeout=BOUND) == 1
    assert not made.paused
    while connection.expect("beat")[3] == "paused":
        pass
    loop.end()


def test_a_paused_loop_without_handlers_leaves_updates_for_the_loop(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    taken: list[Any] = []

    def body(number: int) -> None:
        made.publish_status(step=number)
        made.wait_while_paused()
        taken.append(made.get_config_update())

    loop = Loop(body)
    pause = weaver.command(connection, "pause")
    come(made)
    loop.go()
    connection.ack(pause)
    weaver.command(connection, "update_config", lr=0.5)
    connection.ack(weaver.command(connection, "resume"))

    assert loop.done.get(timeout=BOUND) == 0
    assert taken == [told("update_config", lr=0.5)]
    loop.end()


def test_pause_and_resume_between_two_steps_pass_by(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    idents = [weaver.command(connection, kind) for kind in ("pause", "resume")]
    come(made, 2)

    with made.step(4):
        assert not made.paused
    assert [connection.ack(ident) for ident in idents] == [[4, OK], [4, OK]]


@pytest.mark.parametrize("kind", ["stop", "drain"])
def test_stop_and_drain_end_a_pause(weaver: FakeWeaver, threadlet: Make, kind: str) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()

    def body(number: int) -> None:
        with made.step(number):
            pass
        stopped.append(made.should_stop)

    stopped: list[bool] = []
    loop = Loop(body)
    pause = weaver.command(connection, "pause")
    come(made)
    loop.go()
    connection.ack(pause)
    connection.ack(weaver.command(connection, kind))

    assert loop.done.get(timeout=BOUND) == 0
    assert made.should_stop
    loop.end()


def test_closing_ends_a_pause(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    loop = Loop(lambda number: made.wait_while_paused())
    pause = weaver.command(connection, "pause")
    come(made)
    loop.go()
    connection.ack(pause)

    weaver.stop()
    made.close()

    assert loop.done.get(timeout=BOUND) == 0
    loop.end()


def test_a_stop_applies_at_the_boundary(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    steps = []
    for number in range(10):
        with made.step(number):
            steps.append(number)
            if number == 4:
                stop = weaver.command(connection, "stop")
                come(made)
                assert not made.should_stop
        if made.should_stop:
            break

    assert steps == [0, 1, 2, 3, 4]
    assert connection.ack(stop) == [4, OK]


def test_a_drain_gives_one_more_step(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    saved = []
    for number in range(10):
        with made.step(number):
            if number == 4:
                drain = weaver.command(connection, "drain")
                come(made)
            if made.draining:
                saved.append(number)
        if made.should_stop:
            break

    assert saved == [5]
    assert number == 5
    assert connection.ack(drain) == [4, OK]


def test_a_drain_is_seen_by_a_loop_that_takes_updates_itself(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    weaver.command(connection, "drain")
    come(made)
    made.publish_status(step=1)

    assert made.get_config_update() == told("drain")
    assert made.get_config_update() is None
    assert made.draining
    assert not made.should_stop

    made.publish_status(step=2)
    assert made.get_config_update() is None
    assert made.should_stop


def test_a_process_drains_by_its_own_choice(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome_new()
    eventually(lambda: made.connected)
    for number in range(10):
        with made.step(number):
            if number == 4:
                made.drain("the data has ended")
                made.drain("again")
                assert made.draining
                assert not made.should_stop
        if made.should_stop:
            break

    assert number == 4
    made.close()
    assert connection.expect("draining") == ["draining", "the data has ended"]
    connection.skipped.clear()
    connection.expect("bye")
    assert "draining" not in [frame[0] for frame in connection.skipped]


def test_a_drain_between_two_steps_ends_a_pause_and_lets_one_more_be_made(
    weaver: FakeWeaver, threadlet: Make
) -> None:
    made = threadlet()
    connection, _ = weaver.welcome_new()
    steps = []

    def body(number: int) -> None:
        if not made.should_stop:
            with made.step(number):
                steps.append(number)

    loop = Loop(body)
    assert loop.step() == 0
    pause = weaver.command(connection, "pause")
    come(made)
    loop.go()
    connection.ack(pause)
    made.drain()

    assert loop.done.get(timeout=BOUND) == 1
    assert loop.step() == 2
    assert steps == [0, 1]
    loop.end()


def test_an_older_weaver_hears_of_a_drain_in_the_next_hello(
    weaver: FakeWeaver, threadlet: Make, caplog: pytest.LogCaptureFixture
) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    eventually(lambda: made.connected)
    made.drain()
    eventually(lambda: messages(caplog), "the warning")
    connection.close()

    _, hello = weaver.welcome()

    assert hello["state"] == "draining"
    assert "draining" not in [frame[0] for frame in connection.skipped]
    assert "the weaver is older than this process" in "".join(messages(caplog))
