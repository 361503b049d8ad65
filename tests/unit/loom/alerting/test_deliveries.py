"""Deliveries of a user: which is tried when, what is sent, and dead receivers that hold up nothing."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Callable
from email import message_from_bytes
from email.policy import SMTP
from pathlib import Path
from typing import Any

import pytest

from loom.alerting import alerts as bounds
from loom.alerting import deliveries as module
from loom.alerting.attempts import AttemptOutcome
from loom.alerting.deliveries import AT_ONCE, BURST, PER_SECOND, Deliveries, mail_of, slack_of
from loom.alerting.operator import AlertOperator
from loom.control import operations
from loom.errors import WrongArguments
from loom.weaver.alert_views import DeliveryState
from tests.unit.loom.alerting.test_alerts import die, do, log, messages, rule
from tests.unit.loom.weaver.bench import Bench, Threadlet

OK = AttemptOutcome(200)


class Post:
    """Makes the deliveries of a bench's user: attempts end at once, or when a test says."""

    def __init__(self, bench: Bench, folder: Path | None, operator: Path | None = None) -> None:
        self.bench = bench
        self.made: list[tuple[str, dict[str, Any]]] = []
        self.outcomes: dict[str, AttemptOutcome] = {}
        self.held: dict[str, threading.Event] = {}
        self.calls: list[Callable[[], object]] = []
        self.came = threading.Condition()
        self.under_way = 0
        self.deliveries = Deliveries(
            bench.weaver.known.alerts, folder, operator, lambda: bench.now, self._later, self._attempt
        )

    def _attempt(self, path: Path, job: bytes) -> AttemptOutcome:
        told = json.loads(job)
        to = told.get("url", "e-mail")
        with self.came:
            self.made.append((path.name, told))
        if to in self.held:
            self.held[to].wait(20)
        return self.outcomes.get(to, OK)

    def _later(self, call: Callable[..., object], *arguments: Any) -> None:
        with self.came:
            self.calls.append(lambda: call(*arguments))
            self.came.notify_all()

    def tick(self, ended: int = 0) -> None:
        """Begin what is due, and wait until so many attempts, and looks at disks, have ended."""
        self.deliveries.tick(self.bench.now)
        for _ in range(ended):
            with self.came:
                assert self.came.wait_for(lambda: self.calls, 20)
                call = self.calls.pop(0)
            call()
        self.bench.commit()


def crash(bench: Bench, name: str) -> None:
    die(bench, Threadlet(bench, f"{name}_0", group=name, start=f"id-{name}"))


def test_a_webhook_gets_the_documented_object_once(bench: Bench, tmp_path: Path) -> None:
    bench.weaver.known.alerts.operator = AlertOperator(networks=("10.0.0.0/8",), page="https://loom.example.com/")
    rule(bench, "not_a_number")
    one = Threadlet(bench, "train_0", start="abc12345")
    one.step(7, loss=float("inf"))
    post = Post(bench, tmp_path)
    post.tick(1)
    post.tick()
    bench.now += 100_000
    post.tick()

    ((name, job),) = post.made
    (alert,) = log(bench)
    assert json.loads(base64.b64decode(job["body"])) == {
        "id": alert.id,
        "rule": "not_a_number",
        "run": "abc12345",
        "run_name": "train",
        "replica": "train_0",
        "metric": "loss",
        "step": 7,
        "value": "Infinity",
        "message": "run 'train' (abc12345): loss is inf",
        "time": alert.time,
        "url": "https://loom.example.com/#/runs/abc12345",
        "test": False,
    }
    assert job["networks"] == ["10.0.0.0/8"]
    assert (job["id"], name) == (alert.id, f"{alert.id}-0-0")
    assert alert.url == "https://loom.example.com/#/runs/abc12345"
    assert [to.state for to in alert.deliveries] == [DeliveryState.SENT]


def test_a_failed_delivery_is_tried_again_with_longer_and_longer_waits_for_a_day(
    bench: Bench, tmp_path: Path
) -> None:
    rule(bench, "crashed")
    crash(bench, "a")
    post = Post(bench, tmp_path)
    post.outcomes["https://hooks.example.com/T0/secret"] = AttemptOutcome(None, "HTTP 503")
    began, times = bench.now, []
    while log(bench)[0].deliveries[0].state is DeliveryState.WAITING:
        before = len(post.made)
        post.tick()
        if len(post.made) > before or post.deliveries._under_way:
            post.tick(1)
            times.append(bench.now - began)
        bench.now += 1.0 if bench.now - began < 100 else 60.0

    assert times[:6] == [0.0, 2.0, 6.0, 14.0, 30.0, 62.0]
    assert 86_400 <= times[-1] < 88_000
    assert 90 < len(times) < 130
    (given_up,) = log(bench)[0].deliveries
    assert (given_up.state, given_up.error, given_up.attempts) == (DeliveryState.GIVEN_UP, "HTTP 503", len(times))
    assert len({name for name, _ in post.made}) == len(post.made)  # each attempt has a file of its own


@pytest.mark.guarantees("weaver", "A dead webhook holds up neither other alerts nor a training")
def test_a_dead_receiver_holds_up_no_other_and_a_bad_alert_no_other_alert(bench: Bench, tmp_path: Path) -> None:
    dead, alive = "https://dead.example.com/x", "https://alive.example.com/y"
    for one in (dead, alive):
        rule(bench, "crashed", webhook=one)
    post = Post(bench, tmp_path)
    post.held[dead] = threading.Event()
    for name in ("a", "b", "c"):
        crash(bench, name)
        post.tick(1)

    assert [job["url"] for _, job in post.made if job["url"] == alive] == [alive] * 3
    assert [job["url"] for _, job in post.made if job["url"] == dead] == [dead]  # one attempt at a time
    post.outcomes[dead] = AttemptOutcome(None, "it never answered")
    post.held[dead].set()
    post.tick(1)
    bench.now += 10
    post.tick(1)
    assert (
        len({job["id"] for _, job in post.made if job["url"] == dead}) == 2
    )  # the next alert, not the first again


def test_a_user_has_so_many_attempts_at_once_and_no_more(bench: Bench, tmp_path: Path) -> None:
    post = Post(bench, tmp_path)
    hooks = [f"https://h{number}.example.com/x" for number in range(AT_ONCE + 3)]
    for one in hooks:
        post.held[one] = threading.Event()
        rule(bench, "crashed", webhook=one)
    crash(bench, "a")
    post.tick()
    assert len(post.deliveries._under_way) == AT_ONCE
    for one in post.held.values():
        one.set()
    post.tick(AT_ONCE)
    post.tick(3)
    assert {job["url"] for _, job in post.made} == {*hooks}


async def test_a_test_is_tried_once_and_its_failure_is_the_answer(bench: Bench, tmp_path: Path) -> None:
    made = rule(bench, "crashed")
    post = Post(bench, tmp_path)
    post.outcomes["https://hooks.example.com/T0/secret"] = AttemptOutcome(None, "HTTP 404")
    waits = asyncio.ensure_future(do(bench, operations.TryAlert(made.id, wait=10.0)))
    await asyncio.sleep(0)
    bench.commit()
    post.tick(1)
    bench.now += 100
    post.tick()

    (delivery,) = (await waits).deliveries
    assert (delivery.state, delivery.error) == (DeliveryState.GIVEN_UP, "HTTP 404")
    assert len(post.made) == 1


def test_nothing_is_delivered_before_it_is_stored(bench: Bench, tmp_path: Path) -> None:
    made = rule(bench, "crashed")
    post = Post(bench, tmp_path)
    with pytest.raises(StopIteration):
        do(bench, operations.TryAlert(made.id)).send(None)  # it has fired, and no commit has followed
    post.deliveries.tick(bench.now)
    assert post.made == []
    bench.commit()
    post.tick(1)
    assert len(post.made) == 1


def test_a_user_begins_only_so_many_attempts_a_second(bench: Bench, tmp_path: Path) -> None:
    post = Post(bench, tmp_path)
    rule(bench, "crashed")
    for number in range(BURST + 5):
        crash(bench, f"a{number}")
    for _ in range(BURST):
        post.tick(1)
    post.tick()
    assert len(post.made) == BURST
    bench.now += 1.0
    for _ in range(int(PER_SECOND)):
        post.tick(1)
    post.tick()
    assert len(post.made) == BURST + PER_SECOND


def test_an_attempt_at_an_alert_that_others_have_replaced_brings_it_not_back(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "KEPT", 1)
    rule(bench, "crashed")
    post = Post(bench, tmp_path)
    crash(bench, "a")
    post.deliveries.tick(bench.now)
    crash(bench, "b")
    post.tick(1)
    post.tick(1)

    assert [one.run_name for one in log(bench)] == ["b"]
    assert len(dict(bench.weaver.known.store.rows("alerts"))) == 1


def test_a_weaver_that_comes_after_removes_the_files_of_attempts_that_are_over(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "store")
    rule(bench, "crashed")
    crash(bench, "a")
    (alert,) = log(bench)
    folder = tmp_path / "alerts"
    folder.mkdir()
    for name in (f"{alert.id}-0-0", "gone-0-0", f"{alert.id}-0-7"):
        (folder / name).touch()
    bench.restart()
    Post(bench, tmp_path)

    assert [one.name for one in folder.iterdir()] == [f"{alert.id}-0-0"]


def test_an_attempt_that_cannot_be_made_is_a_failed_one(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule(bench, "crashed")
    crash(bench, "a")
    post = Post(bench, tmp_path)

    def full(path: Path, job: bytes) -> AttemptOutcome:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(post.deliveries, "_make", full)
    post.tick(1)
    assert "No space left" in str(log(bench)[0].deliveries[0].error)


def test_what_the_operator_allows_is_read_again_and_email_is_sent_by_the_command(
    bench: Bench, tmp_path: Path
) -> None:
    file = tmp_path / AlertOperator.FILE
    post = Post(bench, tmp_path, file)
    with pytest.raises(WrongArguments, match="--alert-mail"):
        rule(bench, "crashed", email=["ann@example.com"], webhook=None)
    AlertOperator.made("sendmail -t -i", ["10.0.0.0/8"], "http://h:1/").write(tmp_path)
    bench.now += 100
    post.tick(1)
    rule(bench, "crashed", email=["ann@example.com", "bob@example.com"], webhook=None)
    die(bench, Threadlet(bench, "a_0", group="a"), "killed\nBcc: eve@example.com")
    post.tick(1)

    ((_, job),) = post.made
    assert job["command"] == ["sendmail", "-t", "-i"]
    mail = message_from_bytes(base64.b64decode(job["body"]), policy=SMTP)
    assert mail["To"] == "ann@example.com, bob@example.com"
    assert mail["Bcc"] is None
    assert mail["Idempotency-Key"] == job["id"]
    assert "crashed run 'a'" in mail["Subject"]
    assert "url: http://h:1/#/runs/" in mail.get_content()


@pytest.mark.parametrize("wrong", [("sendmail 'x", []), ("", ["10.0.0.0/99"]), ("", ["everything"])])
def test_options_of_the_operator_that_make_no_sense_are_refused(wrong: tuple[str, list[str]]) -> None:
    with pytest.raises(WrongArguments, match="--alert-"):
        AlertOperator.made(*wrong, "")


def test_without_the_operators_word_nothing_private_is_allowed(tmp_path: Path) -> None:
    (tmp_path / AlertOperator.FILE).write_text('{"mail": 1}')

    assert AlertOperator.read(tmp_path / AlertOperator.FILE) == AlertOperator()
    assert AlertOperator().url_of("abc") is None
    assert AlertOperator(page="http://h/").url_of(None) == "http://h/"


def test_slack_gets_a_text_in_which_no_name_calls_anybody() -> None:
    told = {"rule": "crashed", "message": "run '<!channel>' & more", "url": "http://h/#/runs/a", "run_name": "a"}

    assert slack_of(told) == {"text": "*crashed* run '&lt;!channel&gt;' &amp; more <http://h/#/runs/a|a>"}
    assert slack_of({**told, "run_name": "<!here>"})["text"].endswith("more")
    assert slack_of({**told, "url": None})["text"].endswith("more")


def test_a_rule_for_slack_sends_slacks_form(bench: Bench, tmp_path: Path) -> None:
    rule(bench, "crashed", form="slack")
    crash(bench, "a")
    post = Post(bench, tmp_path)
    post.tick(1)

    assert list(json.loads(base64.b64decode(post.made[0][1]["body"]))) == ["text"]


def test_the_disks_of_the_store_and_of_checkpoints_on_this_host_are_looked_at(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def used(path: str) -> float:
        seen.append(path)
        return 0.95

    monkeypatch.setattr(module, "_used", used)
    monkeypatch.setattr(module.socket, "gethostname", lambda: "here")
    rule(bench, "disk")
    for name, host in (("a", "here"), ("b", "there")):
        one = Threadlet(bench, f"{name}_0", group=name, config={"output_dir": "out", "lr": 1.0})
        one.say("start", {"folder": "/srv/runs", "host": host})
    post = Post(bench, tmp_path)
    bench.now += 100
    post.tick(1)

    assert seen == [str(tmp_path), "/srv/runs/out"]
    assert set(messages(bench)) == {f"the disk of {one} is 95% full" for one in seen}


def test_a_folder_that_is_not_there_yet_has_the_disk_above_it(tmp_path: Path) -> None:
    used = module._used(str(tmp_path / "not" / "yet"))

    assert used is not None
    assert 0.0 < used < 1.0
    assert module._used(str(tmp_path / ("x" * 5000))) is None


def test_a_message_in_any_script_becomes_an_email() -> None:
    told = {"id": "a", "rule": "crashed", "message": "Lauf «é» ist tot\r\nX: y \ud800", "time": 1.0, "run": None}

    mail = message_from_bytes(mail_of(told, ("a@example.com",)), policy=SMTP)
    assert mail["X"] is None
    assert "«é»" in mail.get_content()
