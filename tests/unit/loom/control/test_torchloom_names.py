"""torchLoom's names of commands: one table, and the same command on every way."""

from __future__ import annotations

from typing import Any

import pytest

from loom.control.commands import CommandKind
from loom.control.operations import GiveCommand
from loom.control.torchloom_names import ALIASES, translate
from loom.errors import WrongArguments
from loom.nats.requests import read_request
from loom.nats.subjects import Envelope, EnvelopeKind
from loom_gateway.rest.weaver_changes import checked_change
from loom_gateway.weaver_socket.commands import check_kind, read_change

Plain = tuple[str, str | None, dict[str, Any]]

MEANT: dict[str, tuple[str, Plain]] = {
    "pause_training": ("replica_id", ("pause", "train_0", {})),
    "resume_training": ("replica_id", ("resume", "train_0", {})),
    "stop_training": ("replica_id", ("stop", "train_0", {})),
    "reactivate_group": ("replica_id", ("reactivate", None, {"group": "train_0"})),
    "deactivate_device": ("device_id", ("deactivate_device", None, {"device": "train_0"})),
    "drain_device": ("device_id", ("deactivate_device", None, {"device": "train_0"})),
}
"""For each name the field of a message that names its target, and the command for a target ``train_0``."""

of_each_name = pytest.mark.parametrize("name", MEANT)


def test_the_names_are_those_that_are_tested() -> None:
    assert set(ALIASES) == set(MEANT) - {"deactivate_device"}


@of_each_name
def test_a_name_means_the_same_command_on_every_way(name: str) -> None:
    field, meant = MEANT[name]
    body = {"command_type": name, "target_id": "train_0"}

    def of(request: Any) -> Plain:
        return request.kind.value, request.target, request.params

    assert translate(name, "train_0", {}) == meant
    assert of(checked_change(GiveCommand, {"kind": name, "target": "train_0"})) == meant
    assert of(read_request(Envelope(EnvelopeKind.UI_COMMAND, body))) == meant
    for message in ({"type": name, field: "train_0"}, {"type": "ui_command", "data": body}):
        check_kind(message)
        assert of(read_change(message)) == meant


@pytest.mark.parametrize("kind", [kind.value for kind in CommandKind])
def test_a_name_of_looms_stays_what_it_is(kind: str) -> None:
    assert translate(kind, "*", {"device": "GPU-0"}) == (kind, "*", {"device": "GPU-0"})
    assert translate(kind, None, {}) == (kind, None, {})


@pytest.mark.parametrize("name", ["reactivate_group", "drain_device"])
@pytest.mark.parametrize("target", ["*", "", None, ["a"]])
def test_a_name_for_a_group_or_a_device_needs_one(name: str, target: Any) -> None:
    with pytest.raises(WrongArguments, match=f"{name} names a (group|device) as its target"):
        translate(name, target, {})
    assert translate(name, target, {"group": "train"})[2] == {"group": "train"}


@pytest.mark.parametrize("kind", ["config_update", "PAUSE", "", "device_failed"])
def test_what_is_no_command_is_refused_with_the_names_of_those_that_are(kind: str) -> None:
    with pytest.raises(
        WrongArguments, match=rf"there is no command '{kind}'; kind is one of .*pause.*pause_training"
    ):
        checked_change(GiveCommand, {"kind": kind})
