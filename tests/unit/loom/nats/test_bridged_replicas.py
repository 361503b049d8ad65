"""What a bridge knows of replicas without threadlets, and the bounds of it."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from loom.control.commands import Acknowledgement, Change, Command, CommandKind
from loom.control.handshake import Activity, TrainingEnding
from loom.errors import Conflict, LimitReached, NotFound, RateLimited, WrongArguments
from loom.nats import bridged_replicas, state
from loom.nats.bridged_replicas import BridgedReplicas
from loom.nats.message_counts import LOG_EVERY, REPLICA_RATE, Bucket, MessageTrouble, Tally
from loom.nats.outside_replica import MAX_COMMANDS, MAX_WAITING, REPEAT_EVERY, OutsideReplica
from loom.nats.reports import MAX_METRICS, DeviceRegistration, ProgressReport, read_report
from loom.nats.state import KEEP_DONE, BridgeState
from loom.nats.subjects import Envelope, EnvelopeKind


def registration(**more: Any) -> DeviceRegistration:
    body = {"replica_id": "out_0", "device_uuid": "GPU-0", **more}
    report = read_report(Envelope(EnvelopeKind.REGISTER_DEVICE, body))
    assert isinstance(report, DeviceRegistration)
    return report


def progress(**more: Any) -> ProgressReport:
    report = read_report(Envelope(EnvelopeKind.TRAINING_STATUS, {"replica_id": "out_0", **more}))
    assert isinstance(report, ProgressReport)
    return report


@pytest.fixture
def replica() -> OutsideReplica:
    return OutsideReplica.registered(registration(), "a bridge")


def table(state: BridgeState | None = None) -> BridgedReplicas:
    """An intake whose weaver is never asked, since nothing runs it."""

    async def nobody(*_: object) -> Any:
        raise AssertionError

    return BridgedReplicas(state or BridgeState(None), Tally(), nobody, nobody)


def take(intake: BridgedReplicas, kind: EnvelopeKind, age: float = 0.0, **body: Any) -> OutsideReplica:
    return intake.take(Envelope(kind, body), age)


# -- one replica ------------------------------------------------------------------------------------------------


def test_reports_wait_for_the_weaver_and_are_numbered_after_those_that_it_has(replica: OutsideReplica) -> None:
    for step in range(MAX_WAITING + 1):
        assert replica.progress(progress(current_step=step), connected=False) == []

    (frame,) = replica.welcomed(seq=40)
    (later,) = replica.progress(progress(current_step=900), connected=True)

    rows = frame.to_body()[1]
    assert [row[0] for row in rows] == list(range(41, 41 + MAX_WAITING))
    assert (rows[0][2], rows[-1][2]) == (1, MAX_WAITING)
    assert later.to_body()[1][0][0] == 41 + MAX_WAITING


def test_a_connection_that_is_made_again_begins_with_what_the_replica_does(replica: OutsideReplica) -> None:
    assert replica.hello("key").state is None
    replica.welcomed(0)
    replica.progress(progress(current_step=1), connected=True)
    assert replica.hello("key").state is Activity.RUNNING
    replica.progress(progress(state="paused"), connected=True)
    assert replica.hello("key").state is Activity.PAUSED
    replica.progress(progress(state="draining"), connected=True)
    assert replica.hello("key").state is Activity.DRAINING


def test_an_acknowledged_update_has_changed_every_value_unless_it_says_otherwise(replica: OutsideReplica) -> None:
    replica.register(registration(config={"lr": 0.1}))
    for id in ("first", "second"):
        assert replica.command(Command(id, CommandKind.UPDATE_CONFIG, {"lr": 0.5, "wd": 1}), 0.0) is None

    every = replica.answer("first", Acknowledgement(True, 7))
    some = replica.answer("second", Acknowledgement(True, changes={"lr": Change(0.5, 0.4)}))

    assert every is not None
    assert some is not None
    assert every.acknowledgement.changes == {"lr": (0.1, 0.5), "wd": (None, 1)}
    assert some.acknowledgement.changes == {"lr": (0.5, 0.4)}
    assert replica.config == {"lr": 0.4, "wd": 1}


def test_a_command_that_the_weaver_gives_again_is_acknowledged_as_before(replica: OutsideReplica) -> None:
    command = Command("c", CommandKind.STOP, {})
    replica.command(command, 0.0)
    made = replica.answer("c", Acknowledgement(True))

    assert replica.command(command, 1.0) is made
    assert replica.answer("c", Acknowledgement(False)) is None
    assert replica.ending is TrainingEnding.STOPPED


def test_commands_are_due_again_until_they_are_acknowledged_and_bounded(replica: OutsideReplica) -> None:
    for number in range(MAX_COMMANDS):
        replica.command(Command(f"{number}", CommandKind.PAUSE, {}), 0.0)
    refused = replica.command(Command("one more", CommandKind.PAUSE, {}), 0.0)

    assert refused is not None
    assert "left 100 commands unacknowledged" in str(refused.acknowledgement.reason)
    assert replica.due_commands(REPEAT_EVERY - 0.1) == []
    assert len(replica.due_commands(REPEAT_EVERY)) == MAX_COMMANDS
    assert replica.due_commands(REPEAT_EVERY) == []


def test_the_names_of_metrics_are_bounded(replica: OutsideReplica) -> None:
    replica.progress(progress(metrics={f"m{number}": 1 for number in range(MAX_METRICS)}), connected=True)

    with pytest.raises(LimitReached, match="at most 1000 metrics, not 1001"):
        replica.progress(progress(metrics={"one more": 1}), connected=True)
    with pytest.raises(WrongArguments, match="metrics has at most 1000 keys or items, not 1001"):
        progress(metrics={f"m{number}": 1 for number in range(MAX_METRICS + 1)})


@pytest.mark.parametrize(
    ("kind", "body", "text"),
    [
        (EnvelopeKind.HEARTBEAT, {}, "replica_id is missing; there is nothing"),
        (EnvelopeKind.HEARTBEAT, {"replica_id": None, "a": 1}, "replica_id is missing; there is 'replica_id', 'a'"),
        (EnvelopeKind.HEARTBEAT, {"replica_id": ""}, "replica_id is missing; there is 'replica_id'"),
        (EnvelopeKind.HEARTBEAT, {"replica_id": 7}, "replica_id is a text, not 7"),
        (EnvelopeKind.HEARTBEAT, {"replica_id": "a\nb"}, "replica_id is a printable text, not 'a\\nb'"),
        (EnvelopeKind.HEARTBEAT, {"replica_id": "x" * 201}, "replica_id has at most 200 characters, not 201"),
        (EnvelopeKind.HEARTBEAT, {"phase": "x"}, "phase is 'step', 'between' or 'paused', not 'x'"),
        (EnvelopeKind.HEARTBEAT, {"current_step": -1}, "current_step is a whole number from 0, not -1"),
        (EnvelopeKind.HEARTBEAT, {"current_step": True}, "current_step is a whole number from 0, not True"),
        (EnvelopeKind.TRAINING_STATUS, {"reason": "\ud800"}, "reason has half a character: '\\ud800'"),
        (EnvelopeKind.TRAINING_STATUS, {"metrics": {"loss": "low"}}, "loss in metrics is a number, not 'low'"),
        (EnvelopeKind.TRAINING_STATUS, {"metrics": {"a\tb": 1}}, "a key of metrics is a printable text"),
        (EnvelopeKind.TRAINING_STATUS, {"metrics": [1]}, "metrics has keys and values, not [1]"),
        (EnvelopeKind.REGISTER_DEVICE, {}, "device_uuid is missing; there is nothing"),
        (EnvelopeKind.REGISTER_DEVICE, {"device_uuids": "a"}, "device_uuids is a list, not 'a'"),
        (
            EnvelopeKind.REGISTER_DEVICE,
            {"device_uuids": ["a"] * 2000},
            "at most 1024 keys or items",
        ),
        (EnvelopeKind.REGISTER_DEVICE, {"device_uuids": ["a", 7]}, "1 in device_uuids is a text, not 7"),
        (
            EnvelopeKind.REGISTER_DEVICE,
            {"device_uuid": "a", "heartbeat_interval": 0.1},
            "heartbeat_interval is from 0.2 to 300 seconds, not 0.1",
        ),
        (EnvelopeKind.ACKNOWLEDGEMENT, {"command_id": "c", "ok": 1}, "ok is true or false, not 1"),
        (EnvelopeKind.ACKNOWLEDGEMENT, {"command_id": "c"}, "ok is missing"),
        (
            EnvelopeKind.ACKNOWLEDGEMENT,
            {"command_id": "c", "ok": True, "changes": {"lr": {"old": 1}}},
            "new of lr in changes is missing",
        ),
    ],
)
def test_a_report_that_makes_no_sense_is_refused_with_its_field_and_the_reason(
    kind: EnvelopeKind, body: dict[str, Any], text: str
) -> None:
    with pytest.raises(WrongArguments) as refused:
        read_report(Envelope(kind, {"replica_id": "out_0", **body} if body and "replica_id" not in body else body))

    assert text in str(refused.value)


# -- all of them ------------------------------------------------------------------------------------------------


def test_silent_replicas_make_room_and_living_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridged_replicas, "MAX_REPLICAS", 2)
    intake = table()
    for id, age in (("out_0", 100.0), ("out_1", 0.0), ("out_2", 0.0)):
        take(intake, EnvelopeKind.REGISTER_DEVICE, age, replica_id=id, device_uuid=f"GPU-{id}")

    with pytest.raises(NotFound, match="no replica 'out_0' was registered here"):
        take(intake, EnvelopeKind.HEARTBEAT, replica_id="out_0")
    with pytest.raises(LimitReached, match="there are 2 replicas without threadlets"):
        take(intake, EnvelopeKind.REGISTER_DEVICE, replica_id="out_3", device_uuid="GPU-3")


def test_one_replica_cannot_send_without_bound() -> None:
    intake = table()
    take(intake, EnvelopeKind.REGISTER_DEVICE, replica_id="out_0", device_uuid="GPU-0")

    def flood() -> None:
        for _ in range(int(REPLICA_RATE) * 1000):
            take(intake, EnvelopeKind.HEARTBEAT, replica_id="out_0")

    with pytest.raises(RateLimited, match="sends more messages"):
        flood()


def test_a_registration_that_was_stored_long_ago_makes_no_replica_alive() -> None:
    intake = table()

    replica = take(intake, EnvelopeKind.REGISTER_DEVICE, 60.0, replica_id="out_0", device_uuid="GPU-0")
    assert not replica.is_alive(time.monotonic())
    take(intake, EnvelopeKind.HEARTBEAT, replica_id="out_0")
    assert replica.is_alive(time.monotonic())


def test_another_instance_is_another_process_and_the_same_one_is_not() -> None:
    intake = table()

    def register(**more: Any) -> OutsideReplica:
        return take(intake, EnvelopeKind.REGISTER_DEVICE, replica_id="out_0", device_uuid="GPU-0", **more)

    first = register(instance="a")

    assert register(instance="a") is first
    assert register() is first
    assert register(instance="b").instance != first.instance


def test_a_device_is_reported_by_another_replica_on_it_when_one_leaves() -> None:
    intake = table()
    for id in ("out_0", "out_1"):
        take(intake, EnvelopeKind.REGISTER_DEVICE, replica_id=id, device_uuid="GPU-0")

    def report() -> OutsideReplica:
        return take(intake, EnvelopeKind.DEVICE_STATUS, device_uuid="GPU-0", utilization=0.5)

    assert report().id == "out_1"
    take(intake, EnvelopeKind.DRAIN, replica_id="out_1", device_uuid="GPU-0")
    assert report().id == "out_0"


# -- what is kept and counted -----------------------------------------------------------------------------------


def test_replicas_and_requests_are_there_after_a_restart(tmp_path: Path) -> None:
    state = BridgeState(tmp_path / "state")
    intake = table(state)
    before = take(intake, EnvelopeKind.REGISTER_DEVICE, replica_id="out_0", device_uuid="GPU-0", config={"lr": 1})
    take(intake, EnvelopeKind.DRAIN, replica_id="out_0")
    state.note_done("a request")
    state.close()

    again = BridgeState(tmp_path / "state")
    replica = take(table(again), EnvelopeKind.HEARTBEAT, replica_id="out_0", current_step=7)

    assert again.id == state.id
    assert replica.to_stored() == before.to_stored()
    assert replica.ending is TrainingEnding.FINISHED
    assert again.is_done("a request")
    assert not again.is_done("another")


def test_a_file_of_state_is_of_one_bridge_and_for_its_owner_only(tmp_path: Path) -> None:
    state = BridgeState(tmp_path / "state")

    with pytest.raises(Conflict, match="another bridge uses this file"):
        BridgeState(tmp_path / "state")
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o600
    state.close()
    with pytest.raises(WrongArguments, match="no file for the state of a bridge"):
        BridgeState(tmp_path)


def test_requests_that_were_done_long_ago_are_forgotten_but_for_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that is ahead does not let the stream's requests be done again."""
    monkeypatch.setattr(state, "KEPT_DONE", 2)
    now = time.time()
    before = BridgeState(tmp_path / "state")
    for number in range(4):
        monkeypatch.setattr(time, "time", lambda number=number: now + number)
        before.note_done(f"request {number}")
    before.close()
    monkeypatch.setattr(time, "time", lambda: now + KEEP_DONE + 100)

    after = BridgeState(tmp_path / "state")

    assert [after.is_done(f"request {number}") for number in range(4)] == [False, False, True, True]


def test_a_trouble_is_logged_once_a_minute_with_its_number(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    tally = Tally(lambda: now)
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            tally.refuse("here", MessageTrouble.MALFORMED, "no JSON")
        tally.refuse("there", MessageTrouble.MALFORMED, "no JSON")
        now = LOG_EVERY
        tally.refuse("here", MessageTrouble.MALFORMED, "no JSON")

    assert [record.getMessage() for record in caplog.records] == [
        "not taken on here (malformed): no JSON",
        "not taken on there (malformed): no JSON",
        "not taken on here (malformed): no JSON; 100 since the last such line",
    ]
    assert tally.to_body()["refused"] == {"here malformed": 101, "there malformed": 1}


def test_a_bucket_lets_a_burst_through_and_then_its_rate() -> None:
    now = 0.0
    bucket = Bucket(10.0, lambda: now)

    burst = sum(bucket.take() for _ in range(100))
    now = 1.0
    later = sum(bucket.take() for _ in range(100))

    assert (burst, later) == (20, 10)


async def test_a_replica_that_the_weaver_does_not_get_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridged_replicas, "SETTLE_TIMEOUT", 0.01)
    intake = table()
    replica = take(intake, EnvelopeKind.REGISTER_DEVICE, replica_id="out_0", device_uuid="GPU-0")

    with pytest.raises(ConnectionError, match="'out_0' is not connected with the weaver yet"):
        await intake.settle(replica)
    await asyncio.sleep(0)
