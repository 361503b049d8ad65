"""A threadlet and a weaver (a fake one, over real sockets): what is told, and how commands apply."""

from __future__ import annotations

import enum
import logging
import os
import signal
import socket
import sys
import threading
import time
import timeit
from collections.abc import Callable
from typing import Any

import pytest

from loom.errors import InvalidAddress, WrongArguments
from loom.threadlet import Deferred, Threadlet, reporting
from loom.threadlet import threadlet as module
from tests.support.logged import messages
from tests.unit.loom.threadlet.fake_weaver import BOUND, KEY, Connection, FakeWeaver, Loop, eventually

Make = Callable[..., Threadlet]

OK = {"ok": True, "reason": None, "changes": {}, "refused": {}}


def come(threadlet: Threadlet, count: int = 1) -> None:
    """Wait until so many commands wait for the next boundary."""
    eventually(lambda: len(threadlet._pending) >= count, f"{count} commands")


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
        "LOOM_ACTORS": "trainers",
        "RANK": "3",
    }.items():
        monkeypatch.setenv(name, value)

    threadlet(None, weaver=None)

    _, hello = weaver.welcome()
    assert [hello[key] for key in ("replica", "group", "session", "procs", "actors", "rank")] == [
        "from_env",
        "group",
        "s1",
        "4",
        "trainers",
        3,
    ]


def test_without_any_name_it_is_host_and_process(weaver: FakeWeaver, threadlet: Make) -> None:
    assert threadlet(None).replica_id == f"{socket.gethostname()}-{os.getpid()}"


def test_a_strange_address_is_refused_at_once() -> None:
    with pytest.raises(InvalidAddress) as raised:
        Threadlet(weaver="tcp://host:1/secret/")

    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("name", ["x" * 201, "train\n0"])
def test_a_strange_name_is_refused_at_once(name: str) -> None:
    with pytest.raises(WrongArguments, match="200 printable characters at most"):
        Threadlet(name)
    with pytest.raises(WrongArguments, match="200 printable characters at most"):
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


# -- status -------------------------------------------------------------------------------------------------


def test_status_is_reported_in_batches_until_it_is_stored(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    before = time.time()
    for number in range(100):
        made.publish_status(step=number, epoch=1, max_step=100, metrics={"loss": number / 2})

    rows = connection.rows(100)

    assert [row[0] for row in rows] == list(range(1, 101))
    assert [row[2:] for row in rows] == [[n, 1, 100, {"loss": n / 2}, None] for n in range(100)]
    assert all(before - 1 <= row[1] <= time.time() for row in rows)
    assert len(made._kept) == 100
    connection.send("stored", 100)
    eventually(lambda: len(made._kept) == 0, "forgetting what is stored")


def test_reports_wait_for_the_next_look_but_those_after_a_silence(
    weaver: FakeWeaver, threadlet: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody looks while nothing is published, and between two looks is as long as was set."""
    monkeypatch.setattr(reporting, "REPORT_INTERVAL", 1000 * BOUND)
    made = threadlet()
    connection, _ = weaver.welcome()

    made.publish_status(step=1)
    assert [row[2] for row in connection.rows(1)] == [1]

    made.publish_status(step=2)
    with made.step(3):
        pass
    for _ in range(3):
        connection.expect("beat")
    assert not any(frame[0] == "status" for frame in connection.skipped)
    assert len(made._given) == 2

    closing = threading.Thread(target=made.close)
    closing.start()
    assert [row[2] for row in connection.rows(2)] == [2, 3]
    connection.send("stored", 3)
    connection.expect("bye")
    connection.close()
    closing.join(BOUND)


@pytest.mark.parametrize("way", ["calls", "block"])
def test_every_report_after_a_silence_wakes_who_looks(
    weaver: FakeWeaver, threadlet: Make, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(reporting, "REPORT_INTERVAL", 0.0)
    made = threadlet()
    connection, _ = weaver.welcome()

    for number in range(500):
        if way == "calls":
            made.publish_status(step=number)
        else:
            with made.step(number):
                pass
        assert [row[2] for row in connection.rows(1)] == [number]


def test_a_signal_handler_may_publish_while_the_training_thread_does(
    weaver: FakeWeaver, threadlet: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "REPORT_INTERVAL", 0.0)
    made = threadlet()
    connection, _ = weaver.welcome()
    handled = 0

    def publish(number: int, frame: object) -> None:
        nonlocal handled
        handled += 1
        made.publish_status(step=handled)

    before = signal.signal(signal.SIGALRM, publish)
    published = 0
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        while handled < 300:
            if published < 5000:  # more than are kept would be dropped
                made.publish_status(step=0)
                published += 1
            time.sleep(0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

    rows = connection.rows(handled + published)
    # Not in order: a signal may come in the handler of the one before, when that has counted and not yet published.
    assert sorted(row[2] for row in rows if row[2]) == list(range(1, handled + 1))


def test_metrics_may_be_scalars_of_torch_and_numpy(
    weaver: FakeWeaver, threadlet: Make, caplog: pytest.LogCaptureFixture
) -> None:
    torch, numpy = pytest.importorskip("torch"), pytest.importorskip("numpy")
    made = threadlet()
    connection, _ = weaver.welcome()

    made.publish_status(
        step=numpy.int64(3),
        metrics={"loss": torch.tensor(0.5), "lr": numpy.float32(0.25), "name": "x", "many": torch.zeros(2)},
        config={"betas": (0.9, 0.99), "dtype": torch.float32},
    )

    (row,) = connection.rows(1)
    assert row[2:] == [3, None, None, {"loss": 0.5, "lr": 0.25}, {"betas": [0.9, 0.99], "dtype": "torch.float32"}]
    assert "the metric 'name' is no number" in caplog.text
    assert "the metric 'many' is no number" in caplog.text


def test_what_is_published_may_be_changed_afterwards(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    metrics = {"loss": 1.0}

    made.publish_status(step=1, metrics=metrics)
    metrics["loss"] = 2.0
    made.publish_status(step=2, metrics=metrics)

    assert [row[5]["loss"] for row in connection.rows(2)] == [1.0, 2.0]


def test_threads_may_publish_at_once(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()

    def publish(thread: int) -> None:
        for number in range(200):
            made.publish_status(step=number, metrics={"thread": thread})

    threads = [threading.Thread(target=publish, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND)

    rows = connection.rows(800)
    assert [row[0] for row in rows] == list(range(1, 801))
    for thread in range(4):
        assert [row[2] for row in rows if row[5]["thread"] == thread] == list(range(200))
    assert made.dropped == 0


def test_a_report_without_a_step_says_nothing_of_where_the_loop_is(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()

    made.publish_status(metrics={"loss": 0.5})

    assert connection.rows(1)[0][2:] == [None, None, None, {"loss": 0.5}, None]
    connection.expect("beat")
    assert connection.expect("beat")[2:] == [None, "between"]


# -- heartbeats ---------------------------------------------------------------------------------------------


def test_heartbeats_go_on_while_the_training_is_stuck(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    with made.step(7):
        beats = [connection.expect("beat") for _ in range(4)]

    assert beats[-1][2:] == [7, "step"]
    assert beats[0][1] <= beats[-1][1]


def test_heartbeats_go_on_while_a_metric_waits_for_its_gpu(weaver: FakeWeaver, threadlet: Make) -> None:
    asked, release = threading.Event(), threading.Event()

    class Hanging:
        def item(self) -> float:
            asked.set()
            release.wait(BOUND)
            return 0.5

    made = threadlet()
    connection, _ = weaver.welcome()
    made.publish_status(step=1, metrics={"loss": Hanging()})
    assert asked.wait(BOUND)

    for _ in range(3):
        connection.expect("beat")

    release.set()
    assert connection.rows(1)[0][5] == {"loss": 0.5}


def test_the_phase_tells_where_the_loop_is(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()

    def phase() -> list[Any]:
        while connection.receive() and connection._came:
            pass
        connection.expect("beat")
        return connection.expect("beat")[2:]

    assert phase() == [None, "between"]
    with made.step(1):
        assert phase() == [1, "step"]
    assert phase() == [1, "between"]


def test_a_loop_that_only_publishes_is_always_in_a_step(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    made.publish_status(step=1)
    connection.rows(1)

    connection.expect("beat")
    assert connection.expect("beat")[2:] == [1, "step"]


def test_where_every_thread_is_can_be_asked(weaver: FakeWeaver, threadlet: Make) -> None:
    threadlet()
    connection, _ = weaver.welcome()

    connection.send("stack", "s1")

    frame = connection.expect("stack")
    assert frame[1] == "s1"
    assert "Thread MainThread" in frame[2]
    assert "test_where_every_thread_is_can_be_asked" in frame[2]
    assert "loom-threadlet" in frame[2]


# -- updates ------------------------------------------------------------------------------------------------


class Schedule(enum.Enum):
    COSINE = "cos"


def test_an_update_applies_at_the_boundary_and_is_answered(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet(config={"learning_rate": 0.1})
    got: list[float] = []

    @made.handler("learning_rate")
    def handle(value: float) -> None:
        got.append(value)

    connection, _ = weaver.welcome()
    made.publish_status(step=3)
    ident = weaver.command(connection, "update_config", learning_rate="0.002")
    come(made)
    assert got == []

    assert made.check_and_apply_updates()

    assert got == [0.002]
    assert connection.ack(ident) == [
        3,
        {"ok": True, "reason": None, "changes": {"learning_rate": {"old": 0.1, "new": 0.002}}, "refused": {}},
    ]
    assert not made.check_and_apply_updates()


def test_many_updates_apply_in_order_each_answered(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    got: list[int] = []
    made.handler("n")(lambda value: got.append(value))
    connection, _ = weaver.welcome()
    idents = [weaver.command(connection, "update_config", n=number) for number in range(50)]
    come(made, 50)

    made.check_and_apply_updates()

    assert got == list(range(50))
    answers = [connection.ack(ident)[1]["changes"]["n"] for ident in idents]
    assert answers == [{"old": number - 1 if number else None, "new": number} for number in range(50)]


def test_of_an_update_each_key_is_applied_or_refused(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()

    @made.handler("schedule")
    def schedule(value: Schedule) -> None: ...

    @made.handler("batch_size")
    def batch_size(value: int) -> None:
        raise ValueError("it does not divide 64")

    @made.handler("dropout")
    def dropout(value: float) -> None: ...

    connection, _ = weaver.welcome()
    ident = weaver.command(connection, "update_config", schedule="cos", batch_size=48, dropout="x", lr=1)
    come(made)
    made.check_and_apply_updates()

    step, answer = connection.ack(ident)
    assert step is None
    assert not answer["ok"]
    assert answer["changes"] == {"schedule": {"old": None, "new": "COSINE"}}
    assert answer["refused"] == {
        "batch_size": "batch_size: the handler raised ValueError: it does not divide 64",
        "dropout": "dropout: 'x' is not of type float",
        "lr": "lr: no handler for it in this replica; it has handlers for: batch_size, dropout, schedule",
    }
    assert all(text in answer["reason"] for text in answer["refused"].values())


class Deferring:
    """Handlers that accept values and apply them later."""

    def __init__(self, threadlet: Threadlet, *keys: str) -> None:
        self.accepted: dict[str, Deferred] = {}
        for key in keys:
            threadlet.handler(key)(lambda value, key=key: self.accept(key))

    def accept(self, key: str) -> Deferred:
        self.accepted[key] = Deferred()
        return self.accepted[key]


def test_a_deferred_value_is_answered_when_it_applies_with_that_step(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet(config={"lr": 0.1})
    later = Deferring(made, "lr")
    connection, _ = weaver.welcome()
    made.publish_status(step=3)
    deferred = weaver.command(connection, "update_config", lr=0.2)
    after = weaver.command(connection, "pause")
    come(made, 2)
    made.check_and_apply_updates()
    assert connection.expect("ack")[1] == after  # and not the one before, which nobody has applied

    later.accepted["lr"].applied(5)
    later.accepted["lr"].refuse("the first verdict counts")

    changes = {"lr": {"old": 0.1, "new": 0.2}}
    assert connection.ack(deferred) == [5, {"ok": True, "reason": None, "changes": changes, "refused": {}}]


def test_an_update_is_answered_when_all_its_deferred_values_are_decided(
    weaver: FakeWeaver, threadlet: Make
) -> None:
    made = threadlet()
    later = Deferring(made, "lr", "clip")
    made.handler("batch")(lambda value: None)
    connection, _ = weaver.welcome()
    ident = weaver.command(connection, "update_config", lr=0.2, clip=1.0, batch=8)
    come(made)
    made.check_and_apply_updates()

    later.accepted["clip"].refuse("another one was taken")
    later.accepted["lr"].applied(7)

    step, answer = connection.ack(ident)
    assert step == 7
    assert answer == {
        "ok": False,
        "reason": "clip: another one was taken",
        "changes": {"batch": {"old": None, "new": 8}, "lr": {"old": None, "new": 0.2}},
        "refused": {"clip": "clip: another one was taken"},
    }


def test_a_deferred_value_may_be_decided_before_the_handler_returns(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()

    @made.handler("lr")
    def handle(value: float) -> Deferred:
        known = Deferred()
        known.applied(2)
        return known

    connection, _ = weaver.welcome()
    made.publish_status(step=9)
    ident = weaver.command(connection, "update_config", lr=0.2)
    come(made)
    made.check_and_apply_updates()

    assert connection.ack(ident)[0] == 2


def test_a_value_that_is_never_applied_is_refused_at_the_end(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    Deferring(made, "lr")
    connection, _ = weaver.welcome()
    made.publish_status(step=3)
    ident = weaver.command(connection, "update_config", lr=0.2)
    come(made)
    made.check_and_apply_updates()

    closing = threading.Thread(target=made.close)
    closing.start()

    step, answer = connection.ack(ident)
    assert step == 3
    assert not answer["ok"]
    assert answer["refused"] == {"lr": "lr: the training ended before it was applied"}
    closing.join()


def test_the_old_value_is_the_one_published_last(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet(config={"lr": 0.1})
    made.handler("lr")(lambda value: None)
    connection, _ = weaver.welcome()
    made.publish_status(step=1, config={"lr": 0.05})
    ident = weaver.command(connection, "update_config", lr=0.2)
    come(made)
    made.check_and_apply_updates()

    assert connection.ack(ident)[1]["changes"] == {"lr": {"old": 0.05, "new": 0.2}}


def told(kind: str, **params: Any) -> dict[str, Any]:
    """A command as `get_config_update` returns it."""
    return {"command_type": kind, "params": params, "_is_weaver_command": True}


def test_commands_can_be_taken_as_dicts(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet(config={"lr": 0.1})
    connection, _ = weaver.welcome()
    first = weaver.command(connection, "update_config", lr="0.2")
    pause = weaver.command(connection, "pause")
    second = weaver.command(connection, "update_config", lr=0.3, n=1)
    come(made, 3)

    assert made.get_config_update() == told("update_config", lr="0.2")
    assert not made.paused
    assert made.get_config_update() == told("pause")
    assert made.paused
    assert made.get_config_update() == told("update_config", lr=0.3, n=1)
    assert made.get_config_update() is None

    assert connection.ack(first)[1]["changes"] == {"lr": {"old": 0.1, "new": "0.2"}}
    assert connection.ack(pause) == [None, OK]
    assert connection.ack(second)[1] == {
        "ok": True,
        "reason": None,
        "changes": {"lr": {"old": "0.2", "new": 0.3}, "n": {"old": None, "new": 1}},
        "refused": {},
    }


def test_a_handler_may_look_for_updates_itself(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    got: list[int] = []

    @made.handler("n")
    def handle(value: int) -> None:
        got.append(value)
        made.check_and_apply_updates()

    connection, _ = weaver.welcome()
    idents = [weaver.command(connection, "update_config", n=number) for number in range(3)]
    come(made, 3)
    made.check_and_apply_updates()

    assert got == [0, 1, 2]
    assert {connection.expect("ack")[1] for _ in idents} == set(idents)


def test_an_interrupt_in_a_handler_ends_the_training_and_is_answered(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()

    @made.handler("n")
    def handle(value: int) -> None:
        raise KeyboardInterrupt("by hand")

    connection, _ = weaver.welcome()
    ident = weaver.command(connection, "update_config", n=1)
    come(made)

    with pytest.raises(KeyboardInterrupt):
        made.check_and_apply_updates()
    assert connection.ack(ident)[1]["reason"] == "the training was interrupted: KeyboardInterrupt: by hand"


def test_a_handler_that_cannot_be_one_is_refused_where_it_is_made() -> None:
    made = Threadlet()
    with pytest.raises(WrongArguments):

        @made.handler("n")
        def handle(value: bytes) -> None: ...


def test_an_unknown_command_is_answered(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    ident = weaver.command(connection, "dance")

    assert not made._pending
    assert connection.ack(ident)[1] == OK | {"ok": False, "reason": "this replica knows no command 'dance'"}


def test_a_loop_that_only_asks_whether_it_is_paused_has_updates_applied(
    weaver: FakeWeaver, threadlet: Make
) -> None:
    made = threadlet()
    got: list[int] = []
    made.handler("n")(lambda value: got.append(value))
    connection, _ = weaver.welcome()
    ident = weaver.command(connection, "update_config", n=1)
    come(made)

    made.wait_while_paused()

    assert got == [1]
    assert connection.ack(ident)[1]["ok"]


# -- pause, stop, drain -------------------------------------------------------------------------------------


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


# -- a status as one mapping --------------------------------------------------------------------------------


def test_a_status_can_be_one_mapping(weaver: FakeWeaver, threadlet: Make, caplog: pytest.LogCaptureFixture) -> None:
    made = threadlet("train_0@session")
    connection, _ = weaver.welcome()

    made.publish_status(
        {
            "replica_id": "train_0",
            "status_type": "batch_update",
            "current_step": 150,
            "epoch": 2,
            "max_step": 200,
            "metrics": {"loss": 0.25, "learning_rate": 0.001},
            "config": {"batch": 8},
        }
    )
    made.publish_status({"replica_id": "train_0@session", "current_step": 151, "metrics": None}, epoch=3)

    first, second = connection.rows(2)
    assert first[2:] == [150, 2, 200, {"loss": 0.25, "learning_rate": 0.001}, {"batch": 8}]
    assert second[2:] == [151, 3, None, {}, None]
    assert messages(caplog) == []


def test_what_makes_no_sense_in_a_status_is_named_once_and_not_sent(
    weaver: FakeWeaver, threadlet: Make, caplog: pytest.LogCaptureFixture
) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()

    for number in (1, 2):
        made.publish_status({"replica_id": "train_1", "current_step": 100 + number})
        made.publish_status({"current_step": number, "metrics": 0.5, "learning_rate": 0.1})
    made.publish_status({"current_step": {}, "epoch": 4})

    rows = connection.rows(3)
    assert [row[2:] for row in rows] == [
        [1, None, None, {}, None],
        [2, None, None, {}, None],
        [None, 4, None, {}, None],
    ]
    assert messages(caplog) == [
        "a status of 'train_1' is not sent: this threadlet is 'train_0'",
        "metrics is names and values, not 0.5; it is not sent",
        "a status has no key 'learning_rate'; it is not sent. "
        "Keys are replica_id, status_type, current_step, epoch, max_step, metrics, config",
        "current_step is a count, not {}",
    ]


# -- devices that fail and change ---------------------------------------------------------------------------


def test_a_failed_device_is_told_at_the_boundary(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    told: list[tuple[str, str]] = []

    @made.on_device_failure
    def fail(device: str, reason: str) -> None:
        told.append((device, reason))

    connection, _ = weaver.welcome()
    ident = weaver.command(connection, "device_failed", device="GPU-a", reason="ECC errors")
    come(made)
    assert told == []
    made.check_and_apply_updates()

    assert told == [("GPU-a", "ECC errors")]
    assert connection.ack(ident)[1] == OK


def test_a_failure_that_nobody_listens_to_is_answered_too(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    ident = weaver.command(connection, "device_failed", device="GPU-a", reason="ECC errors")
    come(made)
    made.check_and_apply_updates()

    assert connection.ack(ident)[1] == OK


def test_a_device_is_taken_out_of_use_and_back(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    first = weaver.command(connection, "deactivate_device", device="GPU-a")
    come(made)
    made.check_and_apply_updates()
    assert "no function for deactivate_device" in connection.ack(first)[1]["reason"]

    told: list[tuple[str, bool]] = []
    made.on_device_change(lambda device, active: told.append((device, active)))
    idents = [weaver.command(connection, kind, device="GPU-a") for kind in ("deactivate_device", "reactivate")]
    come(made, 2)
    made.check_and_apply_updates()

    assert told == [("GPU-a", False), ("GPU-a", True)]
    assert [connection.ack(ident)[1] for ident in idents] == [OK, OK]


def test_of_the_devices_of_a_group_a_replica_hears_of_its_own(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    told: list[tuple[str, bool]] = []
    made.on_device_change(lambda device, active: told.append((device, active)))
    connection, _ = weaver.welcome()
    ident = weaver.command(connection, "deactivate_device", group="train", devices=["GPU-a", "GPU-b"])
    come(made)
    made.check_and_apply_updates()

    assert connection.ack(ident)[1] == OK
    assert told == [("GPU-a", False)]


def test_what_a_callback_raises_is_answered_and_the_others_are_called(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    told: list[str] = []

    @made.on_device_failure
    def first(device: str, reason: str) -> None:
        raise RuntimeError("no spare")

    made.on_device_failure(lambda device, reason: told.append(device))
    connection, _ = weaver.welcome()
    ident = weaver.command(connection, "device_failed", device="GPU-a", reason="ECC errors")
    come(made)
    made.check_and_apply_updates()

    assert told == ["GPU-a"]
    assert connection.ack(ident)[1] == OK | {"ok": False, "reason": "first raised RuntimeError: no spare"}


# -- step ---------------------------------------------------------------------------------------------------


def test_a_step_publishes_what_its_block_measured(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    with made.step(3, epoch=1, max_step=10, metrics={"lr": 0.1}, config={"a": 1}) as step:
        step.metrics["loss"] = 0.5

    assert connection.rows(1)[0][2:] == [3, 1, 10, {"lr": 0.1, "loss": 0.5}, {"a": 1}]


def test_a_step_that_raises_is_not_published(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    with pytest.raises(ZeroDivisionError), made.step(3):
        1 / 0
    made.publish_status(step=4)

    assert connection.rows(1)[0][2] == 4


def test_updates_apply_before_a_step_and_after_it(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    got: list[int] = []
    made.handler("n")(lambda value: got.append(value))
    connection, _ = weaver.welcome()
    before = weaver.command(connection, "update_config", n=1)
    come(made)
    with made.step(5):
        assert got == [1]
        after = weaver.command(connection, "update_config", n=2)
        come(made)
        assert got == [1]
    assert got == [1, 2]
    assert [connection.ack(ident)[0] for ident in (before, after)] == [5, 5]


# -- what it costs ------------------------------------------------------------------------------------------


unless_traced = pytest.mark.skipif(sys.gettrace() is not None, reason="what is traced takes longer")


def median_microseconds(function: Callable[[], Any]) -> float:
    times = sorted(timeit.repeat(function, number=100, repeat=51))
    return times[25] / 100 * 1e6


@unless_traced
def test_the_training_thread_pays_microseconds(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    weaver.welcome()
    metrics = {"loss": 0.5, "lr": 0.1}

    published = median_microseconds(lambda: made.publish_status(step=1, max_step=9, metrics=metrics))
    checked = median_microseconds(made.check_and_apply_updates)

    assert published <= 5
    assert checked <= 1


@unless_traced
def test_the_training_is_not_held_up_by_a_weaver_that_does_not_read(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    metrics = {f"metric number {place}": 0.5 for place in range(100)}

    slowest = 0.0
    for number in range(20_000):
        began = time.thread_time()
        made.publish_status(step=number, metrics=metrics)
        made.check_and_apply_updates()
        slowest = max(slowest, time.thread_time() - began)
        if number % 1000 == 0:
            eventually(lambda: len(made._given) < 4000, "conversion")
    # When the last are taken, they have not been kept yet.
    eventually(lambda: made.dropped == 20_000 - 8192, "dropping")

    assert slowest < 0.05
    assert len(made._kept) == 8192
    # What it had sent before it was full, and then the newest.
    rows: list[list[Any]] = []
    while not rows or rows[-1][2] != 19_999:
        rows += connection.rows(1)
    assert [row[0] for row in rows] == sorted({row[0] for row in rows})


def test_what_the_conversion_cannot_keep_up_with_is_dropped_and_counted(
    weaver: FakeWeaver, threadlet: Make, caplog: pytest.LogCaptureFixture
) -> None:
    asked, release = threading.Event(), threading.Event()

    class Hanging:
        def item(self) -> float:
            asked.set()
            release.wait(BOUND)
            return 0.5

    made = threadlet()
    connection, _ = weaver.welcome()
    made.publish_status(step=0, metrics={"loss": Hanging()})
    assert asked.wait(BOUND)
    for number in range(1, 10_001):
        made.publish_status(step=number)
    release.set()

    rows: list[list[Any]] = []
    while not rows or rows[-1][2] != 10_000:
        rows += connection.rows(1)
        connection.send("stored", rows[-1][0])
    # The first, which was held up, is one too many for those that are kept unless it is stored before.
    assert made.dropped in (10_000 - 8192, 10_000 - 8192 + 1)
    eventually(lambda: "status reports are dropped" in caplog.text, "a warning")


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
        (KeyboardInterrupt(), ["KeyboardInterrupt: ", "failed"]),
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
