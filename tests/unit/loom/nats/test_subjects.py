"""Envelopes in both formats, and that the schema is what the code was made of."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2

from loom.control.reports import DEVICE_NUMBERS
from loom.errors import InvalidAddress, WrongArguments
from loom.nats import loom_pb2
from loom.nats.bridge import Publication, Publisher
from loom.nats.requests import CommandRequest, FailureReport, read_request
from loom.nats.subjects import Envelope, EnvelopeKind, Format, decode, subjects_of
from tests.support.needs import skip_because
from tests.support.paths import ROOT

PACKAGE = ROOT / "loom"
SCHEMA = "loom/nats/loom.proto"

REPLICA = {
    "id": "train_0",
    "group": "train",
    "state": "running",
    "step": 7,
    "epoch": None,
    "max_step": 100,
    "metrics": {"loss": 0.25, "grad/norm": "Infinity"},
    "reported": 1767225600.5,
    "phase": "step",
    "connected": True,
}
DEVICE = {
    "uuid": "GPU-1",
    "kind": "gpu",
    "server": "node-0",
    "type": "H200",
    "memory": 150_000_000_000,
    "state": "failed",
    "reason": "xid 79",
    "replicas": ["train_0"],
    "status": {
        "utilization": 0.5,
        "memory_used": 1024,
        "temperature": None,
        "power": 700.0,
        "sm_clock": 1_980_000_000,
        "ecc_uncorrected": 2,
        "throttled": ["thermal"],
        "xid": 79,
        "time": 1.0,
    },
}
FAILED = {
    "id": 5,
    "time": 1767225601.0,
    "kind": "failed",
    "replica": "train_0",
    "reason": "its process 7 is gone",
    "step": 7,
    "devices": ["GPU-1"],
    "action": "notify",
}
COMMANDED = {
    "id": 6,
    "time": 1767225602.0,
    "kind": "command",
    "replica": None,
    "command": "4f1c",
    "do": "update_config",
    "params": {"learning_rate": 0.002, "layers": [1, 2], "schedule": None},
    "target": "train_*",
    "replicas": 1,
    "by": "operator",
    "cause": None,
}
APPLIED = {
    "id": 7,
    "time": 1767225603.0,
    "kind": "refused",
    "replica": "train_0",
    "command": "4f1c",
    "do": "update_config",
    "by": "operator",
    "cause": 6,
    "ok": False,
    "reason": "not all of it",
    "step": 8,
    "changes": {"learning_rate": {"old": 0.1, "new": 0.002}, "schedule": {"new": "cosine"}},
    "refused": {"layers": "no handler"},
}
REPLY = {
    "ok": False,
    "done": True,
    "command_id": "4f1c",
    "outcomes": {
        "train_0": {
            "ok": False,
            "step": 8,
            "changes": {"learning_rate": {"old": 0.1, "new": 0.002}},
            "refused": {"layers": "no handler"},
            "reason": "not all of it",
            "taken": ["learning_rate"],
        }
    },
    "error": {"code": "wrong_arguments", "message": "no"},
    "event_id": 5,
    "affected": [{"replica_id": "train_0", "group": "train", "state": "running", "command_ids": ["a", "b"]}],
}


def everything_said() -> list[Publication]:
    """Something of every kind."""
    publisher = Publisher()
    status = {"event": 4}
    said = [*publisher.snapshot({"status": status, "replicas": [REPLICA], "devices": [DEVICE]})]
    said += publisher.delta(
        {"replicas": {"train_0": {**REPLICA, "step": 8}}, "devices": {"GPU-1": {"power": 1.0}}}, 9.0
    )
    for event in (FAILED, COMMANDED, APPLIED):
        said += publisher.event(event)
    said += [publisher.away("it restarts"), (EnvelopeKind.REPLY, REPLY)]
    said += [(EnvelopeKind.MONITORED_FAIL, {"device_uuid": "GPU-1", "reason": "xid 79"})]
    about = {"replica_id": "train_0", "device_uuid": "GPU-1"}
    said += [
        (EnvelopeKind.REGISTER_DEVICE, {**about, "memory": 1024, "handlers": {"lr": "float"}, "config": {"lr": 1}})
    ]
    said += [(EnvelopeKind.DRAIN, {**about, "reason": "spot instance"})]
    changed = {"learning_rate": {"old": 0.1, "new": 0.002}}
    answer = {"replica_id": "train_0", "command_id": "4f1c", "ok": False, "current_step": 8, "changes": changed}
    said += [(EnvelopeKind.ACKNOWLEDGEMENT, answer)]
    said += [(EnvelopeKind.BRIDGE_METRICS, {"bridge": "x", "taken": {"torchLoom.heartbeat": 5}, "commands": 1})]
    return [*said, (EnvelopeKind.UI_COMMAND, {"command_type": "pause", "target_id": "*", "wait": 2})]


def same(value: Any) -> Any:
    """A value as both formats have it. Protobuf leaves out what is empty, and writes whole numbers as texts."""
    if isinstance(value, dict):
        return {name: same(item) for name, item in value.items() if item or item is None}
    if isinstance(value, list):
        return [same(item) for item in value]
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def test_both_formats_say_the_same() -> None:
    said = everything_said()

    for kind, body in said:
        in_json = decode(kind, Envelope(kind, body, "loom-bridge/x").encode(Format.JSON))
        in_protobuf = decode(kind, Envelope(kind, body, "loom-bridge/x").encode(Format.PROTOBUF))

        assert in_json == Envelope(kind, body, "loom-bridge/x")
        assert in_protobuf.source == "loom-bridge/x"
        assert same(in_protobuf.body) == same(body)
    assert {kind for kind, _ in said} == set(EnvelopeKind)


def test_no_protobuf_begins_as_json_does() -> None:
    for kind, body in everything_said():
        for source in ("", "loom-bridge/x"):
            envelope = Envelope(kind, body, source)

            assert Format.of(envelope.encode(Format.PROTOBUF)) is Format.PROTOBUF
            assert Format.of(b"\n " + envelope.encode(Format.JSON)) is Format.JSON


def test_an_empty_envelope_of_protobuf_is_refused() -> None:
    data = loom_pb2.EventEnvelope(time=1.0).SerializeToString()

    with pytest.raises(WrongArguments, match="empty; this subject takes ui_command"):
        decode(EnvelopeKind.UI_COMMAND, data)


def test_what_protobuf_cannot_say_is_refused() -> None:
    with pytest.raises(WrongArguments, match="cannot say this training_status"):
        Envelope(EnvelopeKind.TRAINING_STATUS, {"current_step": 1 << 70}).encode(Format.PROTOBUF)


@pytest.mark.parametrize("format", Format)
def test_an_order_is_the_same_in_both_formats(format: Format) -> None:
    body = {
        "replica_id": "train_0",
        "config_params": {"steps": 3, "rate": 0.5, "on": True, "layers": [1, {"a": 2}]},
    }

    request = read_request(
        decode(EnvelopeKind.CONFIG_INFO, Envelope(EnvelopeKind.CONFIG_INFO, body).encode(format))
    )

    assert isinstance(request, CommandRequest)
    assert (request.kind, request.target) == ("update_config", "train_0")
    assert request.params == body["config_params"]
    assert type(request.params["steps"]) is int


def test_the_reason_of_a_failure_may_be_long_or_missing() -> None:
    long = read_request(Envelope(EnvelopeKind.MONITORED_FAIL, {"device_uuid": "GPU-1", "reason": "x" * 9000}))
    none = read_request(Envelope(EnvelopeKind.MONITORED_FAIL, {"device_uuid": "GPU-1"}))

    assert long == FailureReport(device_uuid="GPU-1", reason="x" * 2000)
    assert none == FailureReport(device_uuid="GPU-1")


def test_the_subjects_are_those_of_torchloom() -> None:
    names = (
        "training.status", "device.status", "heartbeat", "DRentry", "weaver.events", "ui.commands", "ui.update",
        "weaver.commands", "config.info", "monitored.failure", "replica.fail",
    )  # fmt: skip
    found = set(subjects_of("torchLoom").values())

    assert {f"torchLoom.{name}" for name in names} <= found


@pytest.mark.parametrize("prefix", ["", " ", "a b", "a.*", ">", ".a", "a.", "a..b"])
def test_a_prefix_that_can_begin_no_subject_is_refused(prefix: str) -> None:
    with pytest.raises(InvalidAddress, match="cannot begin a subject"):
        subjects_of(prefix)


def test_many_replicas_are_said_in_parts() -> None:
    replicas = [{**REPLICA, "id": f"train_{number}"} for number in range(250)]

    snapshot = Publisher().snapshot({"status": {"event": 1}, "replicas": replicas, "devices": []})
    updates = [body["data"] for kind, body in snapshot if kind is EnvelopeKind.UI_UPDATE]
    delta = Publisher().delta({"replicas": {replica["id"]: replica for replica in replicas}}, 1.0)
    changes = [body["data"]["replicas"] for kind, body in delta if kind is EnvelopeKind.UI_UPDATE]

    assert [(update["part"], update["parts"], len(update["replicas"])) for update in updates] == [
        (1, 3, 100),
        (2, 3, 100),
        (3, 3, 50),
    ]
    assert [len(change) for change in changes] == [100, 100, 50]


def test_nothing_is_said_twice_unless_it_was_not_heard() -> None:
    publisher = Publisher()
    message = {"status": {"event": 1}, "replicas": [REPLICA], "devices": [DEVICE]}
    statuses = (EnvelopeKind.TRAINING_STATUS, EnvelopeKind.DEVICE_STATUS)

    first = [kind for kind, _ in publisher.snapshot(message) if kind in statuses]
    second = [kind for kind, _ in publisher.snapshot(message) if kind in statuses]
    publisher.forget()
    third = [kind for kind, _ in publisher.snapshot(message) if kind in statuses]

    assert (first, second, third) == (list(statuses), [], list(statuses))


def test_a_device_is_said_with_every_number_and_its_health() -> None:
    status = {name: float(number) for number, name in enumerate(DEVICE_NUMBERS, 1)}
    status |= {
        "throttled": ["thermal"],
        "error": "NVML does not work here",
        "xid": 79,
        "time": 1.0,
        "by": "train_0",
    }

    ((_, body),) = Publisher().devices([{**DEVICE, "status": status}])

    told = {name: value for name, value in status.items() if name not in ("time", "by")}
    assert body.items() >= told.items()
    assert decode(
        EnvelopeKind.DEVICE_STATUS, Envelope(EnvelopeKind.DEVICE_STATUS, body).encode(Format.PROTOBUF)
    ).body.keys() >= {*DEVICE_NUMBERS, "throttled", "error", "xid"}


def test_a_device_or_a_group_is_taken_out_of_use() -> None:
    def read(**body: Any) -> Any:
        return read_request(Envelope(EnvelopeKind.UI_COMMAND, {"command_type": "deactivate_device", **body}))

    assert read(params={"device_uuid": "GPU-1"}).params == {"device": "GPU-1"}
    assert read(params={"group": "train"}).params == {"group": "train"}
    assert read(params={"group": "train"}).target is None
    for params in ({}, {"device_uuid": "GPU-1", "group": "train"}):
        with pytest.raises(WrongArguments, match="either device_uuid, or group"):
            read(params=params)


def test_heartbeats_are_said_once_a_second() -> None:
    publisher = Publisher()

    said = [publisher.delta({"replicas": {"train_0": REPLICA}}, 10.0 + tick * 0.5) for tick in range(6)]
    beats = [[kind for kind, _ in some if kind is EnvelopeKind.HEARTBEAT] for some in said]

    assert beats == [[EnvelopeKind.HEARTBEAT], []] * 3


def test_the_code_was_made_of_the_schema(tmp_path: Path) -> None:
    if shutil.which("protoc") is None:
        skip_because("the program protoc (Debian package protobuf-compiler) is not installed")
    made = tmp_path / "made"

    subprocess.run(["protoc", f"--descriptor_set_out={made}", SCHEMA], cwd=PACKAGE, check=True, timeout=60)

    (schema,) = descriptor_pb2.FileDescriptorSet.FromString(made.read_bytes()).file
    code = descriptor_pb2.FileDescriptorProto.FromString(loom_pb2.DESCRIPTOR.serialized_pb)
    for message in schema.message_type:
        forget_json_names(message)
    assert code == schema


def forget_json_names(message: descriptor_pb2.DescriptorProto) -> None:
    """Generated code has none: they follow from the fields' names."""
    for field in message.field:
        field.ClearField("json_name")
    for nested in message.nested_type:
        forget_json_names(nested)
