"""What a threadlet tells a weaver of the training, and what that costs."""

from __future__ import annotations

import collections
import contextlib
import signal
import sys
import threading
import time
import timeit
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from loom.threadlet import Threadlet, reporting
from tests.support.logged import messages
from tests.support.odd_values import ODD
from tests.unit.loom.threadlet.fake_weaver import (
    BOUND,
    FakeWeaver,
    Make,
    come,
    eventually,
)

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
    assert all(before - 1 <= row[1] <= time.time() + 1 for row in rows)
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


def places(made: Threadlet, value: Any) -> Iterator[Callable[[], object]]:
    """Yield each way of publishing a value."""
    for name in ("step", "epoch", "max_step", "metrics", "config", "status_type"):
        yield lambda name=name: made.publish_status(**{name: value})  # type: ignore[misc]
    for mapping in ({"m": value}, {"known": 0.5, "m": [value]}):
        yield lambda mapping=mapping: made.publish_status(metrics=mapping)  # type: ignore[misc]
        yield lambda mapping=mapping: made.publish_status(config=mapping)  # type: ignore[misc]
    yield lambda: made.publish_status(metrics={value: 0.5})
    yield lambda: made.publish_status(config={value: 0.5})
    yield lambda: made.publish_status({"current_step": value, "metrics": {"m": value}, "config": value})

    def measure() -> None:
        with made.step(1) as step:
            step.metrics[value] = value

    yield measure


@pytest.mark.parametrize("name", [name for name in ODD if name not in ("endless", "many", "wide", "step")])
def test_no_value_in_a_status_ends_the_reports(weaver: FakeWeaver, threadlet: Make, name: str) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()

    for publish in places(made, ODD[name]):
        with contextlib.suppress(Exception):  # it is refused at its line
            publish()
    made.publish_status(step=777, metrics={"last": 1.0})

    while {"last": 1.0} not in [row[5] for row in connection.rows(1)]:
        pass
    assert made.connected


def test_a_name_that_equals_a_known_one_is_looked_at_as_the_first(
    weaver: FakeWeaver, threadlet: Make, caplog: pytest.LogCaptureFixture
) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()

    names: list[Any] = ["loss", collections.UserString("loss"), type("Name", (str,), {})("loss")]
    for key in names:
        made.publish_status(step=1, metrics={key: 0.5})

    assert [row[5] for row in connection.rows(3)] == [{"loss": 0.5}, {}, {"loss": 0.5}]
    assert "a metric's name is a text of 1 to 200 characters; not sent: 'loss'" in messages(caplog)


def test_the_reports_go_on_when_their_thread_has_died(
    weaver: FakeWeaver, threadlet: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    good, died = made._kept.add, threading.Event()

    def bad(rows: Any) -> None:
        monkeypatch.setattr(made._kept, "add", good)
        died.set()
        raise KeyError("rows")

    monkeypatch.setattr(made._kept, "add", bad)
    made.publish_status(step=1)
    assert died.wait(BOUND)
    made.publish_status(step=2, metrics={"loss": 0.5})

    assert connection.rows(1)[0][2] == 2


def test_a_report_without_a_step_says_nothing_of_where_the_loop_is(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()

    made.publish_status(metrics={"loss": 0.5})

    assert connection.rows(1)[0][2:] == [None, None, None, {"loss": 0.5}, None]
    connection.expect("beat")
    assert connection.expect("beat")[2:] == [None, "between"]


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


# -- heartbeats ---------------------------------------------------------------------------------------------


class Hanging:
    """A metric on a GPU that is behind: it has no value until it is released."""

    def __init__(self) -> None:
        self.asked, self.release = threading.Event(), threading.Event()

    def item(self) -> float:
        self.asked.set()
        self.release.wait(BOUND)
        return 0.5


def test_heartbeats_go_on_while_the_training_is_stuck(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    with made.step(7):
        beats = [connection.expect("beat") for _ in range(4)]

    assert beats[-1][2:] == [7, "step"]
    assert beats[0][1] <= beats[-1][1]


def test_heartbeats_go_on_while_a_metric_waits_for_its_gpu(weaver: FakeWeaver, threadlet: Make) -> None:
    loss = Hanging()
    made = threadlet()
    connection, _ = weaver.welcome()
    made.publish_status(step=1, metrics={"loss": loss})
    assert loss.asked.wait(BOUND)

    for _ in range(3):
        connection.expect("beat")

    loss.release.set()
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
    loss = Hanging()
    made = threadlet()
    connection, _ = weaver.welcome()
    made.publish_status(step=0, metrics={"loss": loss})
    assert loss.asked.wait(BOUND)
    for number in range(1, 10_001):
        made.publish_status(step=number)
    loss.release.set()

    rows: list[list[Any]] = []
    while not rows or rows[-1][2] != 10_000:
        rows += connection.rows(1)
        connection.send("stored", rows[-1][0])
    # The first, which was held up, is one too many for those that are kept unless it is stored before.
    assert made.dropped in (10_000 - 8192, 10_000 - 8192 + 1)
    eventually(lambda: "status reports are dropped" in caplog.text, "a warning")
