"""Messages of clients of the weaver's WebSocket, read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loom.control.operations import GiveCommand, InjectFault, RemoveFault, SetPolicy
from loom.errors import ProtocolMismatch, TooLarge, WrongArguments
from loom.weaver.device_failures import Action
from loom_gateway.rest.weaver_changes import checked_change
from loom_gateway.weaver_socket.commands import (
    MAX_MESSAGE,
    check_kind,
    read_change,
    read_id,
    read_message,
)

ID = "command-1"


def command(kind: str, **rest: Any) -> GiveCommand:
    return checked_change(GiveCommand, {"kind": kind, **rest})


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ({"type": "command", "id": ID, "kind": "pause"}, command("pause", id=ID)),
        (
            {"type": "command", "id": ID, "kind": "update_config", "target": ["a"], "params": {"lr": 1}},
            command("update_config", id=ID, target=["a"], params={"lr": 1}),
        ),
        ({"type": "policy", "id": 1, "group": "g", "action": "stop"}, SetPolicy("g", Action.STOP)),
        ({"type": "inject", "fault": "sigkill", "target": "a"}, InjectFault("sigkill", "a")),
        ({"type": "remove_fault", "id": "x", "injection": "i"}, RemoveFault("i")),
        (
            {"type": "update_config", "replica_id": "a", "config_params": {"learning_rate": "0.002"}},
            command("update_config", target="a", params={"learning_rate": "0.002"}),
        ),
        ({"type": "pause_training", "replica_id": "a"}, command("pause", target="a")),
        ({"type": "resume_training", "replica_id": "a", "id": ID}, command("resume", target="a", id=ID)),
        ({"type": "stop_training", "replica_id": "a"}, command("stop", target="a")),
        ({"type": "deactivate_device", "device_id": "G"}, command("deactivate_device", params={"device": "G"})),
        ({"type": "drain_device", "device_id": "G"}, command("deactivate_device", params={"device": "G"})),
        ({"type": "reactivate_group", "replica_id": "a"}, command("reactivate", params={"group": "a"})),
    ],
)
def test_a_message_is_read_as_the_change_that_rest_makes(message: dict[str, Any], change: Any) -> None:
    check_kind(message)

    assert read_change(message) == change


@pytest.mark.parametrize(
    "message",
    [
        {"type": "command", "kind": "pause"},
        {"type": "command", "id": "short", "kind": "pause"},
        {"type": "command", "id": 12345678, "kind": "pause"},
        {"type": "command", "id": ID, "kind": "inject"},
        {"type": "command", "id": ID, "kind": "pause", "wait": 1.0},
        {"type": "command", "id": ID, "kind": "pause", "to": "train_0"},
        {"type": "inject", "fault": "sigkill"},
        {"type": "inject", "fault": "sigkill", "target": "a", "wait": 1},
        {"type": "policy", "group": "g", "action": "panic"},
        {"type": "remove_fault"},
        {"type": "update_config", "replica_id": "a", "config_params": {}},
        {"type": "update_config", "config_params": {"lr": 1}},
        {"type": "pause_training", "replica_id": ""},
        {"type": "pause_training", "replica_id": "a", "id": "short"},
        {"type": "drain_device", "replica_id": "a"},
    ],
)
def test_fields_that_make_no_sense_are_refused(message: dict[str, Any]) -> None:
    with pytest.raises(WrongArguments):
        read_change(message)


def test_an_unknown_type_is_answered_with_those_that_there_are() -> None:
    with pytest.raises(
        WrongArguments, match="no message of type 'dance'; known: ping, subscribe, command, policy, inject"
    ):
        check_kind({"type": "dance"})


@pytest.mark.parametrize("text", [None, "", "{", "null", "[]", "{}", '{"type": 1}', "[" * 50_000, '"\\ud800"'])
def test_what_is_no_message_is_refused(text: str | None) -> None:
    with pytest.raises(ProtocolMismatch):
        read_message(text)


def test_half_a_surrogate_pair_is_refused_and_a_whole_one_is_a_character() -> None:
    with pytest.raises(ProtocolMismatch, match="surrogate"):
        read_message('{"type": "ping", "x": {"\\ud83d": 1}}')
    assert read_message('{"type": "ping", "id": "\\ud83d\\ude00"}')["id"] == "😀"


def test_a_message_has_at_most_so_many_bytes() -> None:
    def message(fill: str) -> str:
        return json.dumps({"type": "ping", "id": fill}, ensure_ascii=False)

    room = MAX_MESSAGE - len(message(""))
    assert read_message(message("x" * room))
    for text in (message("x" * (room + 1)), message("ä" * (room // 2 + 1))):
        with pytest.raises(TooLarge, match="64 KiB"):
            read_message(text)


@pytest.mark.parametrize("id", [None, 7, "", "x" * 200])
def test_an_id_is_a_number_or_a_short_text(id: Any) -> None:
    assert read_id({"type": "ping", "id": id}) == id


@pytest.mark.parametrize("id", [True, 1.5, [], {}, "x" * 201])
def test_another_id_is_refused(id: Any) -> None:
    with pytest.raises(WrongArguments, match="an id is"):
        read_id({"type": "ping", "id": id})
