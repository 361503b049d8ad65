"""Frames between threadlets and the weaver: what travels, and what is refused with a word on what is wrong."""

from __future__ import annotations

import pickle
from typing import Any

import msgpack
import pytest

from loom.control.commands import (
    Acknowledged,
    Acknowledgement,
    Change,
    Command,
    CommandKind,
    FaultRemoved,
    UnknownCommandKind,
    plain_config,
)
from loom.control.frame import MAX_COUNT, MAX_NAME, MAX_VALUES, Frame
from loom.control.handshake import (
    Activity,
    Bye,
    Device,
    Handlers,
    Refusal,
    ThreadletHello,
    ThreadletWelcome,
    TrainingEnding,
)
from loom.control.profiles import Profile, ProfileRequest
from loom.control.reports import (
    MAX_REASON_NAME,
    MAX_REASONS,
    REASONS,
    DeviceFailed,
    DeviceReport,
    Draining,
    FailureNoted,
    Heartbeat,
    PeerFailure,
    PeerFailures,
    Phase,
    Registration,
    Stack,
    StackRequest,
    StatusReports,
    Stored,
    TimeAccount,
)
from loom.errors import ProtocolMismatch, WrongArguments

GPU = {"uuid": "GPU-0", "kind": "gpu", "server": "host", "type": "H100", "memory": 80 << 30}

HELLO = ThreadletHello(
    key="key",
    replica="train_0",
    instance="abc",
    group="trainers",
    pid=7,
    host="host",
    procs="trainers",
    rank=3,
    actors="train",
    session="mine",
    devices=(Device.from_body(GPU),),
    handlers={"lr": "float"},
    config={"lr": 0.1},
    state=Activity.PAUSED,
    step=12,
    injectable=True,
    removed={"injection": {"seen": True}},
    applied=("one", "two"),
    mesh="fitters",
)

FRAMES: list[Frame] = [
    HELLO,
    Handlers({"lr": "float"}),
    ThreadletWelcome(beat=0.5, weaver="w", seq=9, spent=True, changes=True),
    Registration((Device.from_body(GPU),)),
    Draining("the data has ended"),
    PeerFailures((PeerFailure("train_1", "abc", "it is dead"),)),
    Refusal("key", "the key is not known"),
    Bye("all steps were made", TrainingEnding.FINISHED),
    Command("1", CommandKind.UPDATE_CONFIG, {"lr": 0.2}),
    Acknowledged("1", Acknowledgement(True, 4, {"lr": Change(0.1, 0.2)}, {"seed": "cannot change"})),
    Acknowledged("2", Acknowledgement(False, reason="no", evidence={"pid": 7})),
    FaultRemoved("injection", {"seen": True}),
    StatusReports([[1, 2.0, 3, None, None, {"loss": 1.0}, None]]),
    Stored(4),
    Heartbeat(2.5, None, Phase.BETWEEN),
    DeviceReport(
        2.5,
        {
            "GPU-0": {
                "utilization": 0.5,
                "memory_used": 10,
                "temperature": None,
                "power": 200.0,
                "sm_clock": 1_980_000_000,
                "memory_clock": None,
                "ecc_corrected": 3,
                "ecc_uncorrected": 0,
                "throttled": ["thermal"],
                "xid": 79,
            }
        },
    ),
    DeviceFailed("f1", "GPU-0", "Xid 79"),
    FailureNoted("f1"),
    StackRequest("1"),
    Stack("1", "Thread 0x1"),
    ProfileRequest("1", 10.0),
    Profile("1", "a;b 2\n", 2, 1, ""),
    TimeAccount(9.0, 1.0, 0, 5, 0.5, {"checkpoint": 1.0}),
]


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_a_frame_arrives_as_it_was_sent(frame: Frame) -> None:
    body = msgpack.unpackb(msgpack.packb(frame.to_body()))

    assert body[0] == frame.KIND
    assert type(frame).from_body(body) == frame


def hello(**told: Any) -> list[Any]:
    """A hello with some of its fields changed."""
    return ["hello", {**HELLO.to_body()[1], **told}]


def test_a_hello_needs_only_who_it_is() -> None:
    told = ThreadletHello.from_body(["hello", {"protocol": 1, "key": "k", "replica": "r", "instance": "i"}])

    assert (told.group, told.pid, told.host, told.devices, told.state) == ("r", 0, "", (), None)
    assert (told.procs, told.applied, told.injectable) == (None, (), False)


def test_a_state_of_a_newer_threadlet_is_no_state() -> None:
    assert ThreadletHello.from_body(hello(state="dreaming")).state is None


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (["status", []], "the first frame on the link is a hello"),
        (["hello"], "the first frame on the link is a hello"),
        (["hello", []], "the first frame on the link is a hello"),
        (hello(protocol=2), "the threadlet speaks version 2, the weaver 1"),
        (hello(procs=1.5), "procs is a name or a number"),
        (hello(devices={}), "devices is a list of at most 1024"),
        (hello(devices=[GPU] * 1025), "devices is a list of at most 1024"),
        (hello(devices=["GPU-0"]), "a device is described by a map"),
        (hello(devices=[{**GPU, "kind": "tpu"}]), "a device is a gpu or a cpu, not 'tpu'"),
        (hello(devices=[{**GPU, "memory": -1}]), "memory is a count or None, not -1"),
        (hello(key=""), "key is a text of 1 to 4096 characters"),
        (hello(replica="a\nb"), "replica is a printable text"),
        (hello(instance=None), "instance is a printable text"),
        (hello(group="g" * (MAX_NAME + 1)), f"group is a text of at most {MAX_NAME} characters"),
        (hello(host=5), "host is a text"),
        (hello(step=MAX_COUNT), "step is a count or None"),
        (hello(rank=True), "rank is a count or None"),
        (hello(config=[]), "config is keys and values"),
        (hello(config=dict.fromkeys(map(str, range(MAX_VALUES + 1)))), "config is keys and values"),
        (hello(handlers={"lr": 1}), "not a 'handlers' frame"),
        (hello(removed={"i" * (MAX_NAME + 1): {}}), "not a 'fault' frame"),
    ],
)
def test_a_hello_that_is_wrong_is_refused_with_what_is_wrong(body: list[Any], why: str) -> None:
    with pytest.raises(ProtocolMismatch, match=why):
        ThreadletHello.from_body(body)


@pytest.mark.parametrize(
    ("kind", "rest"),
    [
        (Handlers, [[]]),
        (Handlers, [dict.fromkeys(map(str, range(MAX_VALUES + 1)), "int")]),
        (Handlers, [{"k" * (MAX_NAME + 1): "int"}]),
        (ThreadletWelcome, [{"protocol": 1, "beat": 0.0, "seq": 0}]),
        (ThreadletWelcome, [{"protocol": 1, "beat": 3600.0, "seq": 0}]),
        (ThreadletWelcome, [{"protocol": "1", "beat": 1.0, "seq": 0}]),
        (Refusal, ["code"]),
        (Registration, [{}]),
        (Registration, [[GPU] * 1025]),
        (Draining, [None]),
        (Draining, ["x" * 501]),
        (PeerFailures, ["train_1"]),
        (PeerFailures, [[["train_1", "abc"]]]),
        (PeerFailures, [[["x" * 201, "abc", "dead"]]]),
        (Bye, ["why", "vanished"]),
        (Bye, [1, "failed"]),
        (Command, ["1", "pause"]),
        (Command, [1, "pause", {}]),
        (Acknowledged, ["1", 3]),
        (FaultRemoved, ["i" * (MAX_NAME + 1), {}]),
        (FaultRemoved, ["1", []]),
        (StatusReports, [{}]),
        (StatusReports, [[], []]),
        (Stored, ["4"]),
        (Heartbeat, [1.0, None, "asleep"]),
        (Heartbeat, ["now", None, "step"]),
        (DeviceReport, [1.0, []]),
        (DeviceReport, [1.0, {f"GPU-{number}": {} for number in range(1025)}]),
        (StackRequest, [1]),
        (Stack, ["1", None]),
        (ProfileRequest, ["1", -1.0]),
        (Profile, ["1", "a 1", 1, -1, ""]),
        (TimeAccount, [[1.0, None, None, None]]),
        (TimeAccount, [[-1.0, None, None, None, 0.0, {}]]),
        (TimeAccount, [[1.0, None, -1, None, 0.0, {}]]),
        (TimeAccount, [[1.0, None, None, 1.5, 0.0, {}]]),
        (TimeAccount, [[1.0, None, None, None, 0.0, {"r" * (MAX_REASON_NAME + 1): 1.0}]]),
        (TimeAccount, [[1.0, None, None, None, 0.0, {1: 1.0}]]),
        (TimeAccount, [[1.0, None, None, None, 0.0, None]]),
        (
            TimeAccount,
            [[1.0, None, None, None, 0.0, dict.fromkeys(map(str, range(MAX_REASONS + len(REASONS) + 2)), 1.0)]],
        ),
    ],
)
def test_a_frame_of_another_form_is_refused_by_its_kind(kind: type[Frame], rest: list[Any]) -> None:
    with pytest.raises(ProtocolMismatch, match=f"not a '{kind.KIND}' frame"):
        kind.from_body([kind.KIND, *rest])


@pytest.mark.parametrize(
    ("status", "wrong"),
    [
        (5, "a device's status is a map, not 5"),
        ({"power": "much"}, "power of a device is a number or None, not 'much'"),
        ({"power": True}, "power of a device is a number or None, not True"),
        ({"throttled": "heat"}, "throttled is a list of reasons, not 'heat'"),
        ({"throttled": [7]}, "throttled is a list of reasons"),
        ({"throttled": ["heat"] * 17}, "throttled is a list of reasons"),
        ({"processes": 3}, "processes is a list of at most 256, not 3"),
        ({"processes": [{"pid": 1}] * 257}, "processes is a list of at most 256"),
        ({"processes": [{"memory": 1}]}, "a process of a device has a pid"),
        ({"processes": [{"pid": 1, "memory": "much"}]}, "memory of a device is a number or None"),
        ({"xid": -1}, "xid is a count or None, not -1"),
    ],
)
def test_a_status_of_a_device_of_another_form_is_refused(status: Any, wrong: str) -> None:
    with pytest.raises(ProtocolMismatch, match=wrong):
        DeviceReport.from_body(["devices", 1.0, {"GPU-0": status}])


def test_a_status_of_a_device_has_all_numbers_and_what_else_there_is() -> None:
    health = {
        "throttled": ["thermal"],
        "processes": [{"pid": 7, "memory": 1, "utilization": 0.5}],
        "error": "GPU is lost",
        "xid": 79,
    }
    report = DeviceReport.from_body(["devices", 1.0, {"GPU-0": {"power": 5, **health, "new": 1}, "GPU-1": {}}])

    numbers = ["utilization", "memory_used", "temperature", "power"]
    numbers += ["sm_clock", "memory_clock", "ecc_corrected", "ecc_uncorrected"]
    assert report.devices["GPU-0"] == {**dict.fromkeys(numbers), "power": 5, **health}
    assert report.devices["GPU-1"] == dict.fromkeys(numbers)
    assert report.numbers().devices["GPU-0"] == {**dict.fromkeys(numbers[:4]), "power": 5}


def test_a_failure_of_a_device_is_read_as_it_was_sent() -> None:
    failed = DeviceFailed("f1", "GPU-0", "Xid 79")

    assert DeviceFailed.from_body(failed.to_body()) == failed
    assert len(DeviceFailed.from_body(["device_failed", "f1", "GPU-0", "x" * 1000]).reason) == 500
    for wrong in (["f1", "GPU-0", 79], ["f" * 201, "GPU-0", "Xid 79"]):
        with pytest.raises(ProtocolMismatch, match="not a 'device_failed' frame"):
            DeviceFailed.from_body(["device_failed", *wrong])


def test_a_step_that_is_no_count_is_refused_in_a_heartbeat() -> None:
    with pytest.raises(ProtocolMismatch, match="step is a count or None, not 'two'"):
        Heartbeat.from_body(["beat", 1.0, "two", "step"])


def test_a_command_that_a_threadlet_does_not_know_is_named_with_its_id() -> None:
    with pytest.raises(UnknownCommandKind, match="this replica knows no command 'dance'") as caught:
        Command.from_body(["command", "17", "dance", {}])

    assert caught.value.id == "17"


def test_a_kind_of_command_is_read_by_its_name() -> None:
    assert CommandKind.read("pause") is CommandKind.PAUSE
    assert str(CommandKind.PAUSE) == "pause"
    with pytest.raises(WrongArguments, match="there is no command 'dance'; choose one of update_config, pause, "):
        CommandKind.read("dance")


def test_an_acknowledgement_says_only_what_there_is_to_say() -> None:
    assert Acknowledgement.failed("it is gone").to_body() == {
        "ok": False,
        "reason": "it is gone",
        "step": None,
        "changes": {},
        "refused": {},
    }
    assert Acknowledgement.failed("not yet", waiting=True).to_body()["waiting"] is True


@pytest.mark.parametrize(
    "acknowledgement",
    [
        Acknowledgement(True, 3, {"lr": Change(None, 0.1)}, {"seed": "no"}, "not all", evidence={"pid": 1}),
        Acknowledgement(False, reason="not yet", waiting=True),
    ],
)
def test_an_acknowledgement_is_read_from_json(acknowledgement: Acknowledgement) -> None:
    assert Acknowledgement.from_body(acknowledgement.to_body()) == acknowledgement


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({}, "not an acknowledgement"),
        ({"ok": 1}, "not an acknowledgement"),
        ({"ok": True, "reason": 5}, "not an acknowledgement"),
        ({"ok": True, "changes": [1]}, "not an acknowledgement"),
        ({"ok": True, "evidence": "none"}, "not an acknowledgement"),
        ({"ok": True, "step": -1}, "step is a count or None"),
        ({"ok": True, "changes": {"lr": 0.1}}, "a change is an old and a new value"),
        ({"ok": True, "changes": {"lr": {"old": 0.1}}}, "a change is an old and a new value"),
    ],
)
def test_what_is_no_acknowledgement_is_refused(body: dict[str, Any], why: str) -> None:
    with pytest.raises(ProtocolMismatch, match=why):
        Acknowledgement.from_body(body)


@pytest.mark.parametrize(
    "value", [None, True, 1, -(1 << 63), (1 << 64) - 1, 1.5, "text", [1, [None]], (1, "a"), {"a": {"b": [1]}}]
)
def test_plain_values_are_taken_for_a_configuration(value: Any) -> None:
    plain_config({"key": value})


@pytest.mark.parametrize("value", [b"bytes", 1 << 64, {1: 2}, [object()], {"a": {"b": b""}}])
def test_other_values_are_refused_by_their_path(value: Any) -> None:
    with pytest.raises(WrongArguments, match=r"config\.key.*: "):
        plain_config({"key": value})


def test_a_configuration_without_a_key_is_refused() -> None:
    with pytest.raises(WrongArguments, match="give at least one key and its value"):
        plain_config({})


def test_a_change_is_the_pair_of_its_values_and_knows_what_takes_it_back() -> None:
    change = Change(0.1, 0.5, {"learning_rate": None})

    old, new = change
    again = pickle.loads(pickle.dumps(change))

    assert change == (old, new) == (0.1, 0.5) == again
    assert change.back == again.back == {"learning_rate": None}
    assert Change(1, 2).back is None
