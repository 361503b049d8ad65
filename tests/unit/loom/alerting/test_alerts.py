"""Alerts by event: when each rule fires, once for each incident, and what is stored with what caused it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from loom.alerting import alerts as bounds
from loom.alerting.alerts import WaitingDelivery
from loom.alerting.operator import AlertOperator
from loom.control import operations
from loom.control.frame import pack_value
from loom.errors import LimitReached, NotFound, WrongArguments
from loom.weaver.alert_views import Alert, AlertRule, DeliveryState
from loom.weaver.server.guests_and_admins import Asker
from tests.unit.loom.weaver.bench import Bench, Threadlet
from tests.unit.loom.weaver.raw_threadlet import GPU

HOOK = "https://hooks.example.com/T0/secret"


def do(bench: Bench, asked: operations.Operation) -> Any:
    handlers = bench.weaver.known.alerts.handlers("ann")
    found = handlers[type(asked)](asked, Asker("ann's token"), bench.now)
    bench.commit()
    return found


def rule(bench: Bench, kind: str, **options: Any) -> AlertRule:
    options.setdefault("webhook", HOOK)
    made: AlertRule = do(bench, operations.SetAlert.read({"rule": kind, **options}))
    return made


def log(bench: Bench, **wanted: Any) -> list[Alert]:
    found: list[Alert] = do(bench, operations.GetAlertLog(**wanted))
    return found


def waiting(bench: Bench) -> list[WaitingDelivery]:
    return list(bench.weaver.known.alerts.waiting())


def messages(bench: Bench) -> list[str]:
    return [one.message.partition("): ")[2] or one.message for one in log(bench)][::-1]


def die(bench: Bench, one: Threadlet, reason: str = "killed") -> None:
    replica = one.replica
    assert replica is not None
    bench.weaver.lost(one, bench.now)
    bench.weaver.died(replica, one.instance, reason, bench.now)
    bench.commit()


def test_a_metric_that_is_not_a_number_is_told_once_with_its_step(bench: Bench) -> None:
    rule(bench, "not_a_number")
    one = Threadlet(bench, "train_0", start="abc")
    for step, loss in enumerate((1.0, float("nan"), float("nan"), 0.5)):
        one.step(step, loss=loss)

    (alert,) = log(bench)

    assert (alert.rule.value, alert.run, alert.run_name, alert.replica) == (
        "not_a_number",
        "abc",
        "train",
        "train_0",
    )
    assert (alert.metric, alert.step, alert.value) == ("loss", 1, "NaN")
    assert alert.message == "run 'train' (abc): loss is nan"
    assert [one.to for one in alert.deliveries] == ["https://hooks.example.com/…"]
    assert bench.event("alerted")["alert"] == alert.id


@pytest.mark.parametrize("values", [(float("inf"),), (1.0, float("-inf")), (float("nan"),), (1.0, float("inf"))])
def test_an_odd_value_of_one_step_is_told_though_the_next_one_is_in_order(
    bench: Bench, values: tuple[float, ...]
) -> None:
    rule(bench, "not_a_number", metric="grad*")
    one = Threadlet(bench, "train_0")
    one.seq += 1
    rows = [[n + 1, bench.now, n, None, None, {"grad_norm": value, "loss": float("nan")}, None]
            for n, value in enumerate((*values, 1.0))]  # fmt: skip
    one.say("status", rows)

    assert [one.metric for one in log(bench)] == ["grad_norm"]


def test_the_same_incident_is_told_again_only_after_a_time_in_order(bench: Bench) -> None:
    rule(bench, "not_a_number", rearm=30.0)
    one = Threadlet(bench, "train_0")

    def spike(step: int) -> None:
        one.step(step, loss=float("inf"))
        one.step(step + 1, loss=1.0)
        bench.wait(20.0, one)

    spike(0)
    spike(10)
    assert len(log(bench)) == 1
    bench.wait(20.0, one)
    spike(20)
    assert len(log(bench)) == 2


def test_a_loss_far_above_its_best_for_a_window_has_diverged(bench: Bench) -> None:
    rule(bench, "diverged", factor=2.0, window=10.0)
    one = Threadlet(bench, "train_0")
    for step in range(5):
        one.step(step, train_loss=1.0 - step / 10, lr=1.0)
        bench.wait(1.0, one)
    one.step(5, train_loss=9.0)  # a spike of one step, reported once in a while
    bench.wait(30.0, one)
    assert log(bench) == []
    one.step(6, train_loss=0.7)
    bench.wait(2.0, one)
    for step in range(7, 30):
        one.step(step, train_loss=9.0, lr=100.0)
        bench.wait(1.0, one)

    (alert,) = log(bench)

    assert (alert.metric, alert.value) == ("train_loss", 9.0)
    assert alert.step is not None
    assert 15 <= alert.step <= 19
    assert "its best value was 0.6" in alert.message


def test_a_negative_loss_diverges_too(bench: Bench) -> None:
    rule(bench, "diverged", factor=2.0, window=1.0)
    one = Threadlet(bench, "train_0")
    for step, loss in enumerate([-4.0, -3.9, 2.0, 2.0, 2.0, 2.0, 2.0]):
        one.step(step, loss=loss)
        bench.wait(1.0, one)

    assert len(log(bench)) == 1


def test_a_run_that_makes_no_step_is_told_once_also_after_a_restart_of_the_weaver(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "store")
    rule(bench, "no_progress", seconds=20.0)
    one = Threadlet(bench, "train_0")
    one.step(3, loss=1.0)
    bench.wait(19.0, one)
    assert log(bench) == []
    bench.wait(5.0, one)
    assert messages(bench) == ["no progress for 20 s: step 4 does not come"]
    instance = one.instance
    bench.restart()
    one = Threadlet(bench, "train_0", instance=instance, step=3)
    bench.wait(100.0, one)
    assert len(log(bench)) == 1
    for step in range(4, 12):
        one.step(step, loss=1.0)
        bench.wait(10.0, one)
    assert len(log(bench)) == 1
    bench.wait(30.0, one)
    assert len(log(bench)) == 2


def test_no_progress_in_median_steps_and_not_in_a_pause(bench: Bench) -> None:
    rule(bench, "no_progress", steps=20.0)
    one = Threadlet(bench, "train_0")
    for step in range(6):
        one.step(step, loss=1.0)
        bench.wait(1.0, one)
    for _ in range(100):
        one.beat(phase="paused")
        bench.wait(1.0)
    assert bench.state() == "paused"
    assert log(bench) == []
    one.step(7, loss=1.0)
    for _ in range(25):
        one.beat()
        bench.wait(1.0, one)

    (alert,) = log(bench)
    assert alert.rule.value == "no_progress"


def test_a_run_that_never_makes_its_first_step_is_told(bench: Bench) -> None:
    rule(bench, "no_progress", seconds=30.0)
    one = Threadlet(bench, "train_0")
    bench.wait(35.0, one)

    assert messages(bench) == ["no progress for 30 s: its first step does not come"]


def test_a_crash_is_told_in_the_commit_that_ends_the_run_and_a_loop_of_crashes_once(bench: Bench) -> None:
    rule(bench, "crashed", run="train")
    rule(bench, "finished")
    one = Threadlet(bench, "train_0", start="abc")
    one.step(7, loss=1.0)
    before = len(bench.events)
    die(bench, one, "killed by SIGKILL")

    assert "alerted" in [event["kind"] for event in bench.events[before:]]
    assert messages(bench) == ["crashed at step 7 (killed by SIGKILL)"]
    for _ in range(3):
        one = Threadlet(bench, "train_0", start="abc", restarted=1)
        bench.wait(5.0, one)
        die(bench, one)
    assert len(log(bench)) == 1
    one = Threadlet(bench, "train_0", start="abc", restarted=1)
    bench.wait(70.0, one)
    die(bench, one)
    assert len(log(bench)) == 2


def test_each_end_is_told_as_what_it_is_and_to_whom_it_concerns(bench: Bench) -> None:
    rule(bench, "crashed", group="none*")
    rule(bench, "finished", run="sft*")
    for name in ("sft_0", "other_0"):
        one = Threadlet(bench, name, group=name.partition("_")[0])
        one.step(1, loss=1.0)
        one.say("bye", "done", "finished")

    assert [(one.rule.value, one.run_name) for one in log(bench)] == [("finished", "sft")]
    assert messages(bench)[0].startswith("completed at step 1")


def test_a_rule_says_nothing_of_runs_that_had_ended_before(bench: Bench) -> None:
    Threadlet(bench, "train_0").say("bye", "done", "finished")
    rule(bench, "finished")
    bench.wait(5.0)

    assert log(bench) == []


def test_a_device_that_fails_or_is_not_healthy_is_told(bench: Bench) -> None:
    bodies = [{**GPU, "uuid": f"GPU-{number}"} for number in range(2)]
    rule(bench, "device", group="train")
    rule(bench, "device", group="none")
    one = Threadlet(bench, "train_0", devices=bodies)
    one.say("devices", bench.now, {"GPU-1": {"error": "falls off the bus"}, "GPU-0": {"utilization": 0.5}})
    bench.weaver.dispatcher.fail_device("GPU-0", "Xid 79", "monitor", bench.now)
    bench.commit()
    one.say("devices", bench.now, {"GPU-1": {"error": "falls off the bus", "ecc_uncorrected": 3}})

    found = {one.message.partition("): ")[2]: one.replica for one in log(bench)}
    assert found == {
        "device GPU-1 is not healthy: falls off the bus": "train_0",
        "device GPU-0 has failed: Xid 79": "train_0",
    }
    one.say("devices", bench.now, {"GPU-1": {}})
    bench.wait(70.0, one)
    one.say("devices", bench.now, {"GPU-1": {"error": "again"}})
    assert len(log(bench)) == 3


def test_goodput_under_a_bound_for_a_window_is_told(bench: Bench) -> None:
    rule(bench, "goodput", below=0.5, window=20.0)
    one = Threadlet(bench, "train_0")
    began = bench.now
    one.step(1, loss=1.0)
    for second in range(1, 60):
        bench.wait(1.0, one)
        made = min(second, 20)  # it works for 20 s, and then waits
        spent = {"compute": float(made), "data": float(second - made)}
        one.say("spent", [float(second), 0.5, 0, made, 0.0, spent])
        if second == 30:
            assert log(bench) == []

    (alert,) = log(bench)
    assert alert.value is not None
    assert float(alert.value) < 0.5
    assert 30 < alert.time - began < 50


def test_a_disk_that_is_nearly_full_is_told_for_the_store_or_a_run(bench: Bench) -> None:
    rule(bench, "disk", above=0.8)
    rule(bench, "disk", run="other*")
    Threadlet(bench, "train_0")
    alerts = bench.weaver.known.alerts
    (run,) = alerts.living_runs()
    for used in (0.7, 0.85, 0.9):
        alerts.take_disk("/store", None, used, bench.now)
        alerts.take_disk("/ckpt", run, used, bench.now)
    bench.commit()

    assert sorted(messages(bench)) == ["the disk of /ckpt is 85% full", "the disk of /store is 85% full"]
    assert not alerts.settled


@pytest.mark.guarantees(
    "weaver", "An alert is stored by the commit that stores its cause, and sent once over restarts"
)
def test_an_alert_is_stored_with_its_cause_and_waits_after_a_restart_until_it_is_sent(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "store")
    rule(bench, "crashed")
    die(bench, Threadlet(bench, "train_0"))
    (before,) = waiting(bench)
    bench.restart()
    (one,) = waiting(bench)
    assert (one.alert.view.id, one.to) == (before.alert.view.id, HOOK)
    alerts = bench.weaver.known.alerts
    alerts.attempted(one, None, "HTTP 500", False, bench.now)
    bench.commit()
    bench.restart()
    (one,) = waiting(bench)
    assert (one.view.attempts, one.view.error) == (1, "HTTP 500")
    removed: list[int] = []
    bench.weaver.known.alerts.attempted(one, 204, None, False, bench.now, lambda: removed.append(1))
    assert removed == []  # the outcome is not stored yet
    bench.commit()
    assert removed == [1]
    bench.restart()
    assert waiting(bench) == []
    (alert,) = log(bench)
    assert [(to.state, to.status, to.attempts) for to in alert.deliveries] == [(DeliveryState.SENT, 204, 2)]
    die(bench, Threadlet(bench, "other_0", group="other"))
    assert len({one.id for one in log(bench)}) == 2


def test_what_was_judged_before_a_restart_is_not_told_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "store")
    rule(bench, "not_a_number", rearm=0.0)
    one = Threadlet(bench, "train_0")
    one.step(1, loss=float("nan"))
    one.step(2, loss=1.0)
    bench.wait(3.0, one)
    assert len(log(bench)) == 1
    bench.restart()  # the journal has the reports
    bench.commit()
    bench.wait(3.0)

    assert len(log(bench)) == 1


def test_a_delivery_is_given_up_when_its_rule_goes_or_the_time_is_over(bench: Bench) -> None:
    gone, kept = rule(bench, "crashed"), rule(bench, "crashed", webhook="https://other.example.com/x")
    die(bench, Threadlet(bench, "train_0"))
    assert len(waiting(bench)) == 2
    do(bench, operations.RemoveAlert(gone.id[:6]))
    (one,) = waiting(bench)
    assert one.alert.view.of == kept.id
    rule(bench, "crashed", id=kept.id, webhook="https://new.example.com/y")
    assert one.to == "https://new.example.com/y"
    bench.weaver.known.alerts.attempted(one, None, "HTTP 500", True, bench.now)
    bench.commit()

    assert waiting(bench) == []
    assert {to.error for one in log(bench) for to in one.deliveries} == {"the rule was removed", "HTTP 500"}


def test_a_rule_that_goes_while_its_alert_is_being_written_sends_nothing(bench: Bench) -> None:
    made = rule(bench, "not_a_number")
    one = Threadlet(bench, "train_0")
    bench.weaver.receive(
        one, pack_value(["status", [[1, bench.now, 1, None, None, {"loss": float("nan")}, None]]]), bench.now
    )
    commit, _ = bench.weaver.begin_commit(bench.now)
    assert commit is not None
    asked = operations.RemoveAlert(made.id)
    bench.weaver.known.alerts.handlers("ann")[type(asked)](asked, Asker(), bench.now)
    bench.weaver.known.store.write(commit)
    commit.stored()
    bench.commit()

    assert waiting(bench) == []
    assert [to.state for to in log(bench)[0].deliveries] == [DeliveryState.GIVEN_UP]


def test_rules_are_kept_and_shown_without_the_secret_of_their_webhook(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "store")
    made = rule(bench, "crashed", webhook="https://hooks.slack.com/services/T/B/secret", run="a*")
    bench.restart()
    (found,) = do(bench, operations.GetAlerts())

    assert (found.id, found.run, found.by, found.user) == (made.id, "a*", "ann's token", "ann")
    assert (found.webhook, found.form) == ("https://hooks.slack.com/…", "slack")
    assert "secret" not in str(found) + str(log(bench))
    changed = rule(bench, "crashed", id=made.id, webhook=None)
    assert changed.webhook == "https://hooks.slack.com/…"
    assert rule(bench, "crashed", id=made.id, webhook="").webhook is None
    do(bench, operations.RemoveAlert(made.id))
    bench.restart()
    assert do(bench, operations.GetAlerts()) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"rule": "nothing"},
        {"rule": "crashed", "factor": 2.0},
        {"rule": "diverged", "factor": 0.5},
        {"rule": "goodput", "below": 2.0},
        {"rule": "diverged", "window": float("nan")},
        {"rule": "crashed", "webhook": "ftp://h/x"},
        {"rule": "crashed", "webhook": "https://ann:pw@h/secret"},
        {"rule": "crashed", "webhook": "https://h:99999/secret"},
        {"rule": "crashed", "webhook": "https://h/sec\r\nret: x"},
        {"rule": "crashed", "webhook": "secret"},
        {"rule": "crashed", "form": "xml"},
        {"rule": "crashed", "email": ["ann@h\nBcc: x@y"]},
        {"rule": "crashed", "email": ["-oQ/tmp@h"]},
        {"rule": "crashed", "email": ["a@b.c"]},
        {"rule": "crashed", "run": "x" * 300},
        {"rule": "crashed", "rearm": -1.0},
    ],
)
def test_a_rule_that_makes_no_sense_is_refused_without_repeating_a_secret(bench: Bench, wrong: Any) -> None:
    with pytest.raises(WrongArguments) as refused:
        rule(bench, wrong.pop("rule"), **wrong)
    assert "secret" not in str(refused.value)


def test_email_needs_the_operators_command(bench: Bench) -> None:
    bench.weaver.known.alerts.operator = AlertOperator(mail=("sendmail", "-t"))
    rule(bench, "crashed", email=["ann@example.com"], webhook=None)
    die(bench, Threadlet(bench, "train_0"))

    (one,) = waiting(bench)
    assert one.is_mail


def test_rules_and_the_alerts_that_are_kept_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MAX_RULES", 1)
    monkeypatch.setattr(bounds, "KEPT", 3)
    made = rule(bench, "crashed")
    with pytest.raises(LimitReached):
        rule(bench, "crashed")
    rule(bench, "crashed", id=made.id)
    for number in range(5):
        die(bench, Threadlet(bench, f"train{number}_0", group=f"train{number}"))

    assert [one.run_name for one in log(bench)] == ["train4", "train3", "train2"]
    assert len(waiting(bench)) == 3


def test_what_waits_for_a_dead_receiver_takes_no_room_from_another(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "MAX_WAITING", 2)
    rule(bench, "crashed")
    for number in range(3):
        die(bench, Threadlet(bench, f"train{number}_0", group=f"train{number}"))
    rule(bench, "crashed", webhook="https://other.example.com/x")
    die(bench, Threadlet(bench, "last_0", group="last"))

    errors = [(one.run_name, to.to[8:13], to.error) for one in log(bench) for to in one.deliveries]
    assert errors[::-1] == [
        ("train0", "hooks", None),
        ("train1", "hooks", None),
        ("train2", "hooks", "too many alerts wait"),
        ("last", "hooks", "too many alerts wait"),
        ("last", "other", None),
    ]


def test_a_tick_looks_at_living_runs_for_a_short_time_and_goes_on_with_the_next(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule(bench, "no_progress", seconds=30.0)
    living = [Threadlet(bench, f"train{number}_0", group=f"train{number}") for number in range(3)]
    bench.wait(1.0, *living)
    monkeypatch.setattr(bounds, "LOOKS_FOR", 0.0)
    bench.now += 60.0
    counts = []
    for _ in range(4):
        bench.now += 0.1
        bench.weaver.known.alerts.tick(bench.now)
        counts.append(len(log(bench)))

    assert counts == [1, 2, 3, 3]


def test_incidents_are_bounded_and_those_of_ended_runs_make_room(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "MAX_INCIDENTS", 2)
    rule(bench, "not_a_number")
    rule(bench, "crashed")
    living = [Threadlet(bench, f"train{number}_0", group=f"train{number}") for number in range(3)]
    for one in living:
        one.step(1, loss=float("nan"))
        bench.wait(3.0, *living)
    assert [one.run_name for one in log(bench)] == ["train1", "train0"]
    die(bench, living[0])
    bench.wait(3.0, *living[1:])

    assert [(one.rule.value, one.run_name) for one in log(bench)][:-2] == [
        ("not_a_number", "train2"),
        ("crashed", "train0"),
    ]


def test_an_unknown_rule_is_named_with_those_that_there_are(bench: Bench) -> None:
    made = rule(bench, "crashed")
    for wrong in ("none", ""):
        with pytest.raises(NotFound, match=made.id):
            do(bench, operations.RemoveAlert(wrong))


async def test_a_test_alert_waits_for_its_outcome(bench: Bench) -> None:
    made = rule(bench, "crashed")
    asked = do(bench, operations.TryAlert(made.id, wait=5.0))
    waits = asyncio.ensure_future(asked)
    await asyncio.sleep(0)
    bench.commit()
    (one,) = waiting(bench)
    bench.weaver.known.alerts.attempted(one, 200, None, False, bench.now)
    alert: Alert = await waits

    assert alert.test
    assert [to.state for to in alert.deliveries] == [DeliveryState.SENT]
    late: Alert = await do(bench, operations.TryAlert(made.id, wait=0.01))
    assert [to.state for to in late.deliveries] == [DeliveryState.WAITING]


def test_without_rules_nothing_is_looked_at_and_nothing_waits(bench: Bench) -> None:
    one = Threadlet(bench, "train_0")
    one.step(1, loss=float("nan"))
    bench.wait(2.0, one)
    rule(bench, "not_a_number")
    one.step(2, loss=1.0)
    bench.wait(2.0, one)

    assert log(bench) == []
    assert "alerted" not in bench.kinds()
    assert bench.weaver.known.alerts.settled


def test_rows_of_a_later_version_are_left_alone(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "store")
    rule(bench, "crashed")
    store = bench.weaver.known.store
    store.put("alert_rules", "later", {"version": 2, "what": "nobody knows"})
    store.put("alert_incidents", "later\x1fabc", {"version": 2})
    store.put("alerts", "000000000007", {"version": 2})
    bench.commit()
    bench.restart()
    die(bench, Threadlet(bench, "train_0"))

    assert len(do(bench, operations.GetAlerts())) == 1
    assert len(log(bench)) == 1
