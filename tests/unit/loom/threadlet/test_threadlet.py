"""A threadlet and a weaver (a fake one, over real sockets): how they meet, and the end."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from typing import Any

import pytest

from loom.errors import InvalidAddress, WrongArguments
from loom.threadlet import Threadlet
from loom.threadlet import threadlet as module
from tests.support.logged import messages
from tests.unit.loom.threadlet.fake_weaver import (
    BOUND,
    KEY,
    Connection,
    FakeWeaver,
    Make,
    come,
    eventually,
)

# -- hello --------------------------------------------------------------------------------------------------


def test_hello_says_who_and_where(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet("train_0", group="train", config={"lr": 0.1})

    _, hello = weaver.welcome()

    assert hello == {
        "protocol": 1,
        "key": KEY,
        "replica": "train_0",
        "instance": made.instance,
        "group": "train",
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "procs": None,
        "mesh": None,
        "announced": True,
        "asks": False,
        "rank": None,
        "actors": None,
        "session": None,
        "devices": [{"uuid": "GPU-a", "kind": "cpu", "server": "host", "type": "Model", "memory": 1 << 30}],
        "handlers": {},
        "config": {"lr": 0.1},
        "state": "running",
        "applied": [],
        "step": None,
        "injectable": False,
        "removed": {},
        "respawns": False,
        "cohort": None,
        "hears": True,
        "patient": True,
        "restarted": 0,
        "offers": [{}, True],
        "start": None,
    }
    assert len(made.instance) == 32


def test_the_environment_names_what_is_not_given(
    weaver: FakeWeaver, threadlet: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "LOOM_WEAVER": weaver.address,
        "LOOM_REPLICA": "from_env",
        "LOOM_GROUP": "group",
        "LOOM_SESSION": "s1",
        "LOOM_PROCS": "4",
        "LOOM_MESH": "workers",
        "LOOM_ACTORS": "trainers",
        "RANK": "3",
    }.items():
        monkeypatch.setenv(name, value)

    threadlet(None, weaver=None)

    _, hello = weaver.welcome()
    assert [hello[key] for key in ("replica", "group", "session", "procs", "mesh", "actors", "rank")] == [
        "from_env",
        "group",
        "s1",
        "4",
        "workers",
        "trainers",
        3,
    ]


def test_without_any_name_it_is_host_and_process(weaver: FakeWeaver, threadlet: Make) -> None:
    assert threadlet(None).replica_id == f"{socket.gethostname()}-{os.getpid()}"


def test_a_strange_address_is_refused_at_once() -> None:
    with pytest.raises(InvalidAddress) as raised:
        Threadlet(weaver="tcp://host:1/secret/")

    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("name", ["x" * 201, "train\n0", 7, 0, b"train", ["train"], object()])
def test_a_strange_name_is_refused_at_once(name: Any) -> None:
    with pytest.raises(WrongArguments, match=r"^replica_id: "):
        Threadlet(name)
    with pytest.raises(WrongArguments, match=r"^group: "):
        Threadlet("train_0", group=name)


def test_handlers_are_told_when_they_are_added(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    eventually(lambda: made.connected)

    @made.handler("learning_rate")
    def handle(value: float) -> None: ...

    assert connection.expect("handlers")[1] == {"learning_rate": "float"}


# -- without a weaver ---------------------------------------------------------------------------------------


def test_without_a_weaver_everything_works_and_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "loom"), Threadlet("alone") as made:

        @made.handler("learning_rate")
        def handle(value: float) -> None: ...

        for number in range(3):
            with made.step(number, max_step=3) as step:
                step.metrics["loss"] = 0.5
        made.publish_status(step=4, metrics={"loss": object()}, config={"a": 1})
        assert not made.check_and_apply_updates()
        assert made.get_config_update() is None
        made.wait_while_paused()
        states = (made.should_stop, made.paused, made.draining, made.connected)
        assert states == (False, False, False, False)

    assert messages(caplog) == ["no weaver (LOOM_WEAVER is not set): the status of alone is not sent"]


# -- the end ------------------------------------------------------------------------------------------------


def ended(connection: Connection) -> list[Any]:
    """What a threadlet says at last, having stored what it reports."""
    while (frame := connection.receive()) is not None:
        if frame[0] == "status":
            connection.send("stored", frame[1][-1][0])
        if frame[0] == "bye":
            connection.close()
            return frame
    raise AssertionError("no goodbye")


def closing(made: Threadlet, error: BaseException | None = None) -> threading.Thread:
    thread = threading.Thread(target=made.close, args=(error,), daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (None, ["it came to its end", "finished"]),
        (ValueError("no data"), ["ValueError: no data", "failed"]),
        (KeyboardInterrupt(), ["KeyboardInterrupt", "failed"]),
        (SystemExit(3), ["exit code 3", "failed"]),
        (SystemExit(0), ["it came to its end", "finished"]),
        (SystemExit(), ["it came to its end", "finished"]),
    ],
)
def test_goodbye_says_how_it_ended(
    weaver: FakeWeaver, threadlet: Make, error: BaseException | None, expected: list[str]
) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    made.publish_status(step=9)
    thread = closing(made, error)

    assert ended(connection)[1:] == expected
    thread.join(BOUND)
    assert len(made._kept) == 0
    made.close()


def test_one_that_was_stopped_says_so(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    weaver.command(connection, "stop")
    come(made)
    made.check_and_apply_updates()
    closing(made)

    assert ended(connection)[2] == "stopped"


def test_the_last_reports_are_sent_before_goodbye(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    for number in range(2000):
        made.publish_status(step=number)
    thread = closing(made)

    rows = connection.rows(2000)
    connection.send("stored", rows[-1][0])
    assert connection.expect("bye")
    connection.close()
    thread.join(BOUND)
    assert [row[2] for row in rows] == list(range(2000))


def test_the_end_waits_only_so_long_for_a_weaver_that_stores_nothing(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    made.publish_status(step=1)
    connection.rows(1)
    began = time.monotonic()

    made.close()

    assert time.monotonic() - began < 2 * module.CLOSE_TIMEOUT
    assert connection.expect("bye")


def test_the_end_does_not_wait_for_a_weaver_that_is_not_there(weaver: FakeWeaver, threadlet: Make) -> None:
    weaver.stop()
    made = threadlet()
    made.publish_status(step=1)
    began = time.monotonic()

    made.close()

    assert time.monotonic() - began < module.CLOSE_TIMEOUT


def test_a_block_closes_with_its_exception(weaver: FakeWeaver) -> None:
    ends: list[list[Any]] = []

    def serve() -> None:
        ends.append(ended(weaver.welcome()[0]))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with pytest.raises(ValueError, match="no data"), Threadlet("r", weaver=weaver.address):
        raise ValueError("no data")
    thread.join(BOUND)

    assert ends[0][1:] == ["ValueError: no data", "failed"]
