"""The end of a process whose weaver dies at that moment: its last reports and its goodbye are said to the next."""

from __future__ import annotations

import threading
import time

import pytest

from loom.threadlet import link
from tests.unit.loom.threadlet.fake_weaver import BOUND, Connection, FakeWeaver, Make


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "STORED_WITHIN", BOUND)
    monkeypatch.setattr(link, "COMES_BACK_WITHIN", BOUND)


def stored(connection: Connection) -> None:
    connection.send("goodbye_stored")
    connection.close()


def test_a_goodbye_that_is_not_stored_is_said_again(weaver: FakeWeaver, threadlet: Make) -> None:
    one = threadlet()
    connection, _ = weaver.welcome(goodbyes=True)
    one.publish_status(step=1, metrics={"loss": 1.0})
    closing = threading.Thread(target=one.close)
    closing.start()
    connection.rows(1)
    connection.send("stored", 1)
    connection.expect("bye")
    connection.close()  # it was killed before it had stored that

    again, hello = weaver.welcome(goodbyes=True, seq=1)
    assert hello["instance"] == one.instance
    assert again.expect("bye")[1:] == ["it came to its end", "finished"]
    stored(again)

    closing.join(BOUND)
    assert not closing.is_alive()


def test_reports_that_are_not_stored_are_sent_again_before_the_goodbye(weaver: FakeWeaver, threadlet: Make) -> None:
    one = threadlet()
    connection, _ = weaver.welcome(goodbyes=True)
    one.publish_status(step=1, metrics={"loss": 1.0})
    connection.rows(1)
    weaver.stop()
    one.publish_status(step=2, metrics={"loss": 0.5})
    closing = threading.Thread(target=one.close)
    closing.start()
    weaver.start()

    again, _ = weaver.welcome(goodbyes=True)
    assert [row[2] for row in again.rows(2)] == [1, 2]
    again.expect("bye")
    stored(again)

    closing.join(BOUND)
    assert not closing.is_alive()


def test_a_goodbye_that_is_stored_tells_that_the_reports_before_it_are(weaver: FakeWeaver, threadlet: Make) -> None:
    one = threadlet()
    connection, _ = weaver.welcome(goodbyes=True)
    one.publish_status(step=1, metrics={"loss": 1.0})
    closing = threading.Thread(target=one.close)
    closing.start()
    connection.rows(1)
    connection.expect("bye")
    stored(connection)

    closing.join(BOUND)
    assert not closing.is_alive()


def test_a_goodbye_that_is_stored_is_said_once(weaver: FakeWeaver, threadlet: Make) -> None:
    one = threadlet()
    connection, _ = weaver.welcome(goodbyes=True)
    closing = threading.Thread(target=one.close)
    closing.start()
    connection.expect("bye")
    stored(connection)

    closing.join(BOUND)
    assert not closing.is_alive()
    assert weaver._listener is not None
    weaver._listener.settimeout(0.0)
    with pytest.raises(BlockingIOError):
        weaver._listener.accept()


@pytest.mark.parametrize("known", [{}, {"goodbyes": True}])
def test_a_weaver_that_does_not_come_back_is_waited_for_within_bounds(
    known: dict[str, bool], weaver: FakeWeaver, threadlet: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "COMES_BACK_WITHIN", 0.3)
    one = threadlet()
    weaver.welcome(**known)
    weaver.stop()

    closing = threading.Thread(target=one.close)
    closing.start()
    closing.join(BOUND)

    assert not closing.is_alive()


def test_a_weaver_that_was_lost_long_ago_is_not_waited_for(
    weaver: FakeWeaver, threadlet: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "LOST_LATELY", 0.0)
    monkeypatch.setattr(link, "COMES_BACK_WITHIN", 10 * BOUND)
    one = threadlet()
    assert one._link is not None
    weaver.welcome(goodbyes=True)
    assert one._link.welcomed.wait(BOUND)
    weaver.stop()
    while one._link.connected:
        time.sleep(0.01)

    closing = threading.Thread(target=one.close)
    closing.start()
    closing.join(BOUND)

    assert not closing.is_alive()


def test_one_that_is_refused_at_its_end_gives_up(weaver: FakeWeaver, threadlet: Make) -> None:
    one = threadlet()
    connection, _ = weaver.welcome(goodbyes=True)
    closing = threading.Thread(target=one.close)
    closing.start()
    connection.expect("bye")
    connection.close()
    again, _ = weaver.accept()
    again.send("refuse", "replica_taken", "the replica 'train_0' is another process")
    again.close()

    closing.join(BOUND)
    assert not closing.is_alive()
