"""The link of a threadlet: connections that break, weavers that die, and what answers that is no weaver."""

from __future__ import annotations

import logging
import math
import random
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from loom.control.handshake import TAKEN_ADVICE, Handlers, ThreadletHello
from loom.control.reports import DeviceReport
from loom.errors import Conflict, GatewayUnreachable
from loom.process.backoff import Backoff
from loom.threadlet import Threadlet
from loom.threadlet import link as module
from loom.threadlet import threadlet as threadlet_module
from loom.threadlet.link import format_stacks
from tests.support.logged import messages
from tests.unit.loom.threadlet.fake_weaver import BOUND, Connection, FakeWeaver, Loop, eventually

Make = Callable[..., Threadlet]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts that follow each other soon, also when the other side does not want us."""
    monkeypatch.setattr(module, "BACKOFF", Backoff(first=0.05, most=0.05))


def test_a_weaver_that_comes_late_is_found(weaver: FakeWeaver, threadlet: Make) -> None:
    weaver.stop()
    made = threadlet()
    for number in range(5):
        made.publish_status(step=number)
    eventually(lambda: len(made._kept) == 5, "conversion")

    weaver.start()
    connection, hello = weaver.welcome()

    assert hello["step"] == 4
    assert [row[0] for row in connection.rows(5)] == [1, 2, 3, 4, 5]


def test_a_threadlet_that_has_no_address_asks_for_one_until_it_gets_it(
    weaver: FakeWeaver, threadlet: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "ASK_EVERY", 0.0)
    answers = iter([GatewayUnreachable("nobody answers"), RuntimeError("no home"), "nonsense"])
    asked = threading.Event()

    def find() -> str:
        if isinstance(answer := next(answers, weaver.address), Exception):
            raise answer
        asked.wait(BOUND)
        return answer

    made = threadlet(weaver=None, find_weaver=find)
    for number in range(5):  # which does not wait for the answer
        made.publish_status(step=number)
    asked.set()
    connection, hello = weaver.welcome()

    assert hello["replica"] == "train_0"
    assert [row[2] for row in connection.rows(5)] == [0, 1, 2, 3, 4]
    assert messages(caplog) == ["no weaver: nobody answers; training goes on, and so do attempts"]


def test_a_weaver_that_comes_back_at_another_address_is_found(
    weaver: FakeWeaver, threadlet: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = FakeWeaver()
    made = threadlet(find_weaver=lambda: other.address)
    weaver.welcome()
    monkeypatch.setattr(module, "ASK_AFTER", 0.0)

    weaver.stop()
    made.publish_status(step=7)
    _, hello = other.welcome()

    assert hello["step"] == 7
    other.stop()


def test_a_known_address_stays_while_nobody_names_another_one(
    weaver: FakeWeaver, threadlet: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    made = threadlet(find_weaver=lambda: asked.append(1))
    weaver.welcome()
    monkeypatch.setattr(module, "ASK_AFTER", 0.0)

    weaver.stop()
    eventually(lambda: asked != [], "a question")
    weaver.start()
    weaver.welcome()

    eventually(lambda: made.connected, "the weaver")
    assert len(asked) == 1  # within `ASK_EVERY`


def test_after_a_break_the_weaver_is_told_all_that_it_has_to_know(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet(config={"lr": 0.1})
    made.handler("lr")(lambda value: None)
    connection, first = weaver.welcome()
    ident = weaver.command(connection, "update_config", lr=0.5)
    loop = Loop(lambda number: made.wait_while_paused())
    made.publish_status(step=3)
    pause = weaver.command(connection, "pause")
    eventually(lambda: len(made._pending) == 2, "commands")
    loop.go()
    connection.ack(ident)
    connection.ack(pause)

    weaver.stop()
    made.publish_status(step=4)
    made.handler("n")(lambda value: None)
    weaver.start()
    _, hello = weaver.welcome()

    assert hello["instance"] == first["instance"]
    assert hello["applied"] == [ident, "c1"]
    assert hello["config"] == {"lr": 0.5}
    assert hello["handlers"] == {"lr": "Any", "n": "Any"}
    assert hello["state"] == "paused"
    assert hello["step"] == 4
    made.evict()
    loop.end()


def test_reports_that_were_not_stored_are_sent_again(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    for number in range(10):
        made.publish_status(step=number)
    connection.rows(10)
    connection.send("stored", 4)
    eventually(lambda: len(made._kept) == 6, "forgetting what is stored")

    weaver.stop()
    weaver.start()
    connection, _ = weaver.welcome(seq=6)

    assert [row[0] for row in connection.rows(4)] == [7, 8, 9, 10]
    assert len(made._kept) == 4


def test_a_line_that_brings_no_answer_is_made_anew_and_what_was_lost_comes(
    weaver: FakeWeaver, threadlet: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SILENCE", 0.3)
    made = threadlet()
    lost, first = weaver.welcome()  # it takes all bytes, and sends none, as a balancer that has failed over
    for number in range(3):
        made.publish_status(step=number)
    lost.rows(3)

    connection, hello = weaver.welcome(seq=1)

    assert hello["instance"] == first["instance"]
    assert [row[0] for row in connection.rows(2)] == [2, 3]
    connection.send("stored", 3)
    eventually(lambda: not len(made._kept), "forgetting what is stored")
    assert weaver.command(connection, "pause")  # and the connection that answers stays


def test_a_weaver_whose_disk_is_full_is_waited_for_longer_and_longer(
    weaver: FakeWeaver, threadlet: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SILENCE", 0.1)
    monkeypatch.setattr(module, "MOST_PATIENCE", 0.5)
    made = threadlet()
    made.publish_status(step=0)
    patiences = []
    for _ in range(4):
        connection, _ = weaver.welcome(seq=0)
        connection.rows(1)
        patiences.append(made._link._patience)

    assert patiences == [0.1, 0.2, 0.4, 0.5]
    connection.send("stored", 1)
    eventually(lambda: made._link._patience == 0.1, "patience as before")


def test_a_weaver_that_dies_while_a_command_applies_does_not_have_it_applied_twice(
    weaver: FakeWeaver, threadlet: Make
) -> None:
    made = threadlet()
    got: list[int] = []
    second: list[Connection] = []

    @made.handler("n")
    def handle(value: int) -> None:
        got.append(value)
        weaver.stop()
        eventually(lambda: not made.connected, "the loss of the connection")
        weaver.start()
        connection, hello = weaver.welcome()
        assert hello["applied"] == []
        eventually(lambda: made.connected)
        connection.send("command", "c0", "update_config", {"n": 1})
        connection.send("stack", "behind")
        connection.expect("stack")
        second.append(connection)

    connection, _ = weaver.welcome()
    weaver.command(connection, "update_config", n=1)
    eventually(lambda: made._pending, "the command")

    assert made.check_and_apply_updates()
    assert not made.check_and_apply_updates()

    assert got == [1]
    assert second[0].ack("c0")[1]["ok"]


def test_a_command_that_waits_is_kept_over_a_break(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    got: list[int] = []
    made.handler("n")(lambda value: got.append(value))
    connection, _ = weaver.welcome()
    weaver.command(connection, "update_config", n=1)
    eventually(lambda: made._pending, "the command")

    weaver.stop()
    weaver.start()
    connection, _ = weaver.welcome()
    connection.send("command", "c0", "update_config", {"n": 1})
    connection.send("stack", "behind")
    connection.expect("stack")
    made.check_and_apply_updates()

    assert got == [1]
    assert connection.ack("c0")[1]["ok"]


def test_an_answer_that_was_lost_is_given_again(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    got: list[int] = []
    made.handler("n")(lambda value: got.append(value))
    connection, _ = weaver.welcome()
    weaver.command(connection, "update_config", n=1)
    eventually(lambda: made._pending, "the command")
    weaver.stop()
    eventually(lambda: not made.connected, "the loss of the connection")
    made.publish_status(step=5)
    made.check_and_apply_updates()
    made.publish_status(step=6)

    weaver.start()
    connection, hello = weaver.welcome()
    assert hello["applied"] == ["c0"]
    connection.send("command", "c0", "update_config", {"n": 1})

    assert connection.ack("c0") == [
        5,
        {"ok": True, "reason": None, "changes": {"n": {"old": None, "new": 1}}, "refused": {}},
    ]
    assert not made.check_and_apply_updates()
    assert got == [1]


def test_training_goes_on_through_many_breaks_and_nothing_is_lost(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    got: list[int] = []
    made.handler("n")(lambda value: got.append(value))
    seen: dict[int, int] = {}
    numbers = random.Random(11)
    stored = published = 0
    for turn in range(8):
        connection, _ = weaver.welcome(seq=stored)
        for number in range(turn + 1):  # all so far: the weaver has read no answer
            connection.send("command", f"c{number}", "update_config", {"n": number})
        for _ in range(numbers.randrange(20)):
            published += 1
            with made.step(published):
                pass
        if numbers.random() < 0.5:
            made.publish_status(step=(published := published + 1))
            for row in connection.rows(1):
                seen[row[0]] = row[2]
            if numbers.random() < 0.5 and list(seen) == list(range(1, len(seen) + 1)):
                stored = max(seen)
        weaver.stop()
        weaver.start()
    connection, _ = weaver.welcome(seq=stored)
    for number in range(8):
        connection.send("command", f"c{number}", "update_config", {"n": number})
    eventually(lambda: made.check_and_apply_updates() or len(got) == 8, "commands")
    rows = connection.rows(published - stored)

    assert {**seen, **{row[0]: row[2] for row in rows}} == {seq: seq for seq in range(1, published + 1)}
    eventually(lambda: made.check_and_apply_updates() or len(got) == 8, "commands")
    assert got == list(range(8))


def test_a_refusal_is_logged_and_tried_again(
    weaver: FakeWeaver, threadlet: Make, caplog: pytest.LogCaptureFixture
) -> None:
    made = threadlet()
    for _ in range(2):
        connection, _hello = weaver.accept()
        connection.send("refuse", "authentication", "the key is not this weaver's")
        connection.close()
    weaver.welcome()
    eventually(lambda: made.connected)

    refusals = [record for record in caplog.records if "refuses" in record.getMessage()]
    assert len(refusals) == 1
    assert "the key is not this weaver's (authentication)" in refusals[0].getMessage()
    assert refusals[0].levelno == logging.ERROR


def test_a_refusal_later_on_ends_the_connection(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    connection.send("refuse", "replaced", "another process has taken the name")
    weaver.welcome()
    eventually(lambda: made.connected)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x00\x00\x00\x02\x91\xa7",
        b"\x00\x00\x00\x01\x90",
        b"\x00\x00\x00\x07\x91\xa5hello",
        b"\x00\x00\x00\x0a\x92\xa7welcome\x80",
    ],
)
def test_what_is_no_weaver_is_logged_and_tried_again(
    weaver: FakeWeaver, threadlet: Make, caplog: pytest.LogCaptureFixture, answer: bytes
) -> None:
    made = threadlet()
    connection, _ = weaver.accept()
    connection.sock.sendall(answer)
    weaver.welcome()
    eventually(lambda: made.connected)

    assert "what answers at the weaver's address is none" in caplog.text


@pytest.mark.parametrize("frame", [["stored"], ["command", "c", 5, {}], ["command", [1], "stop", {}], ["stack"]])
def test_a_frame_that_is_no_such_frame_ends_the_connection(
    weaver: FakeWeaver, threadlet: Make, frame: list[Any]
) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    connection.send(*frame)
    weaver.welcome()
    eventually(lambda: made.connected)


def test_frames_of_a_newer_weaver_are_passed_over(
    weaver: FakeWeaver, threadlet: Make, caplog: pytest.LogCaptureFixture
) -> None:
    threadlet()
    connection, _ = weaver.welcome()
    connection.send("greeting", 1)
    connection.send("stack", "behind")

    assert connection.expect("stack")
    assert "a newer weaver sent 'greeting', ignored" in caplog.text


def test_a_weaver_that_does_not_answer_hello_is_tried_again(
    weaver: FakeWeaver, threadlet: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WELCOME_TIMEOUT", 0.05)
    made = threadlet()
    weaver.accept()
    connection, _ = weaver.welcome()
    made.publish_status(step=1)
    assert connection.rows(1)


def test_a_weaver_that_is_gone_is_said_once(
    weaver: FakeWeaver, threadlet: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Any] = []
    connect = socket.create_connection

    def count(*arguments: Any, **options: Any) -> socket.socket:
        tried.append(arguments)
        return connect(*arguments, **options)

    weaver.stop()
    monkeypatch.setattr(module.socket, "create_connection", count)
    threadlet()
    eventually(lambda: len(tried) > 5, "attempts")

    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "no weaver: [Errno 111] Connection refused; training goes on" in caplog.text


def test_a_fault_in_the_link_is_logged_and_overcome(
    weaver: FakeWeaver, threadlet: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = [1, 1]
    introduce = Threadlet._introduction

    def fail(self: Threadlet, key: str) -> ThreadletHello:
        if faults:
            faults.pop()
            raise RuntimeError("a fault")
        return introduce(self, key)

    monkeypatch.setattr(Threadlet, "_introduction", fail)
    made = threadlet()
    weaver._listener.accept()[0].close()  # type: ignore[union-attr]
    weaver._listener.accept()[0].close()  # type: ignore[union-attr]
    weaver.welcome()
    eventually(lambda: made.connected)

    assert caplog.text.count("the link to the weaver broke of itself") == 1
    assert "RuntimeError: a fault" in caplog.text


def test_the_newest_report_of_the_devices_goes_with_a_status_report(weaver: FakeWeaver, threadlet: Make) -> None:
    weaver.beat = 2 * BOUND
    made = threadlet()
    connection, _ = weaver.welcome()
    connection.expect("beat")
    assert made._link is not None

    made._link.report_devices(DeviceReport(1.0, {}))
    made._link.report_devices(DeviceReport(2.0, {}))
    made.publish_status(step=1)

    assert connection.expect("devices") == ["devices", 2.0, {}]
    assert [frame[0] for frame in connection.skipped] == ["status"]


def test_a_status_report_stands_for_a_heartbeat_unless_the_phase_changes(
    weaver: FakeWeaver, threadlet: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHOWN_BY_REPORT", math.inf)
    made = threadlet()
    connection, _ = weaver.welcome()
    assert connection.expect("beat")[3] == "between"
    made.publish_status(step=1)
    connection.expect("status")
    assert connection.expect("beat")[3] == "step"

    for step in (2, 3, 4):
        time.sleep(2 * weaver.beat)
        made.publish_status(step=step)
        connection.rows(1)
        connection.send("stored", step)

    assert "beat" not in [frame[0] for frame in connection.skipped]


def test_a_status_report_without_a_step_stands_for_no_heartbeat(
    weaver: FakeWeaver, threadlet: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHOWN_BY_REPORT", math.inf)
    made = threadlet()
    connection, _ = weaver.welcome()
    made.publish_status(metrics={"loss": 1.0})
    connection.expect("status")

    connection.expect("beat")


def test_time_is_accounted_for_as_often_as_the_weaver_wants(weaver: FakeWeaver, threadlet: Make) -> None:
    threadlet()
    connection, hello = weaver.welcome(spent=True)
    assert hello["patient"] is True
    connection.expect("spent")
    connection.send("account_pause", 2 * BOUND)
    connection.send("stack", "asked")
    connection.expect("stack")

    connection.skipped.clear()
    for _ in range(5):
        connection.expect("beat")
    assert sum(frame[0] == "spent" for frame in connection.skipped) <= 1


def test_the_end_does_not_wait_for_an_answer_to_hello(
    weaver: FakeWeaver, threadlet: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threadlet_module, "CLOSE_TIMEOUT", 0.05)
    made = threadlet()
    weaver.accept()
    assert made._link is not None
    began = time.monotonic()

    made.close()
    made._link._thread.join(BOUND)

    assert time.monotonic() - began < module.WELCOME_TIMEOUT


def test_what_cannot_be_packed_is_left_out_and_named(
    weaver: FakeWeaver, threadlet: Make, caplog: pytest.LogCaptureFixture
) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    eventually(lambda: made.connected)
    assert made._link is not None

    made._link.send(DeviceReport(1.0, {"GPU-a": object()}))  # type: ignore[dict-item]
    made._link.send(Handlers({}))

    connection.expect("handlers")
    assert "a 'devices' frame for the weaver is left out" in caplog.text


def test_a_weaver_that_reads_again_gets_all(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    metrics = {f"metric number {place}": 0.5 for place in range(100)}
    for number in range(8000):
        made.publish_status(step=number, metrics=metrics)
    eventually(lambda: len(made._kept) == 8000, "conversion")

    rows = connection.rows(8000)

    assert [row[2] for row in rows] == list(range(8000))
    assert made.dropped == 0


def test_reports_too_large_for_one_frame_come_in_several(
    weaver: FakeWeaver, threadlet: Make, caplog: pytest.LogCaptureFixture
) -> None:
    made = threadlet()
    for number, size in enumerate([7 << 20, 7 << 20, 17 << 20, 1]):
        made.publish_status(step=number, config={"text": "x" * size})
    made.publish_status(step=4)
    connection, _ = weaver.welcome()

    rows = connection.rows(5)

    assert [(row[2], len(row[6]["text"]) if row[6] else None) for row in rows] == [
        (0, 7 << 20),
        (1, 7 << 20),
        (2, None),
        (3, 1),
        (4, None),
    ]
    assert "a status report is sent without metrics and configuration" in caplog.text


def test_a_configuration_too_large_for_hello_is_left_out(
    weaver: FakeWeaver, threadlet: Make, caplog: pytest.LogCaptureFixture
) -> None:
    threadlet(config={"text": "x" * (1 << 20)})

    assert weaver.welcome()[1]["config"] == {}
    assert "the configuration is too large to be told" in caplog.text


def test_a_process_that_ends_at_once_has_said_what_it_had_to(weaver: FakeWeaver) -> None:
    loop = Loop(lambda number: weaver.welcome())
    loop.go()
    made = Threadlet("short", weaver=weaver.address)
    made.publish_status(step=1)
    began = time.monotonic()
    made.close()

    loop.done.get(timeout=BOUND)
    assert time.monotonic() - began < 5
    connection = weaver._connections[0]
    assert connection.rows(1)[0][2] == 1
    assert connection.expect("bye")
    loop.end()


def test_the_main_thread_is_the_first_of_the_stacks() -> None:
    loop = Loop(lambda number: None)

    text = format_stacks()

    assert text.startswith("Thread MainThread")
    assert "test_the_main_thread_is_the_first_of_the_stacks" in text.partition("\nThread ")[0]
    loop.end()


def test_a_replica_whose_name_is_taken_asks_again_at_once(
    weaver: FakeWeaver, threadlet: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BACKOFF", Backoff(first=0.05, most=100 * BOUND))
    threadlet()
    refused, first = weaver.accept()

    refused.send("refuse", "replica_taken", "another process is that replica")
    _, second = weaver.welcome()

    assert first["instance"] == second["instance"]


def test_a_claim_is_answered_by_the_welcome(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    refused, _ = weaver.accept()
    refused.send("refuse", "replica_taken", "another process is that replica")
    weaver.welcome()

    assert made.claim(BOUND)


def test_a_claim_of_what_another_process_is_fails_with_the_weavers_words(
    weaver: FakeWeaver, threadlet: Make
) -> None:
    made = threadlet()
    for _ in range(2):
        refused, _ = weaver.accept()
        refused.send("refuse", "replica_taken", "another process is that replica")

    with pytest.raises(Conflict, match=r"^another process is that replica$") as caught:
        made.claim(0.0)

    assert caught.value.code == "replica_taken"


@pytest.mark.parametrize(
    ("run", "advice"),
    [
        ("", TAKEN_ADVICE),
        ("other", TAKEN_ADVICE),  # a threadlet of the program's own, under `loom run`
        ("digits", "choose another name, with `loom run --name` or LOOM_RUN, or stop it"),
    ],
)
def test_who_has_chosen_a_taken_name_is_told_how_to_choose_another(
    weaver: FakeWeaver,
    threadlet: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    run: str,
    advice: str,
) -> None:
    monkeypatch.setenv("LOOM_RUN", run)
    made = threadlet("digits_0")
    refused, _ = weaver.accept()
    words = "another process (pid 12 on here) is the replica 'digits_0'"
    refused.send("refuse", "replica_taken", f"{words}: {TAKEN_ADVICE}")
    eventually(lambda: made._link.taken, "the refusal")

    assert made._link.taken == f"{words}: {advice}"
    assert f"the weaver refuses this process: {words}: {advice} (replica_taken)" in caplog.text


def test_a_claim_that_no_weaver_answers_waits_no_longer_than_it_is_told(
    weaver: FakeWeaver, threadlet: Make, caplog: pytest.LogCaptureFixture
) -> None:
    made = threadlet()
    refused, _ = weaver.accept()
    refused.send("refuse", "replica_taken", "another process is that replica")
    weaver.stop()
    eventually(lambda: "no weaver" in caplog.text, "an attempt without a weaver")
    eventually(lambda: not made._link.taken, "the end of the attempt")

    assert not made.claim(0.0)
    assert not threadlet(weaver="").claim()
