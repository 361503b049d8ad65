"""What the weaver shows is the same again when it is read from JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from loom.control.commands import Acknowledgement, Change
from loom.weaver.states import DeviceState, ReplicaState
from loom.weaver.views import (
    Away,
    CommandState,
    CoursePoint,
    Delta,
    DeviceInfo,
    FaultRecord,
    GoodputRecord,
    InjectionState,
    ReplicaInfo,
    Snapshot,
    WeaverEvent,
    few,
    read_update,
)

REPLICA = ReplicaInfo(
    "train_0", ReplicaState.RUNNING, "train", session="s", rank=1, devices=("GPU-0",), metrics={"loss": 1.0}
)
DEVICE = DeviceInfo("GPU-0", DeviceState.FAILED, "gpu", reason="Xid 79", replicas=("train_0",))
EVENT = WeaverEvent(7, 2.0, "applied", "train_0", {"step": 3})
FAULT = FaultRecord("train_0", "killed", 1.0, 1.5, 4.0, 6.0)


@pytest.mark.parametrize(
    "view",
    [
        REPLICA,
        DEVICE,
        EVENT,
        FAULT,
        CommandState("c", ("a", "b"), False, {"a": Acknowledgement(True, 3, {"lr": Change(1, 2)})}),
        InjectionState("c", ("a",), True, {"a": Acknowledgement.failed("no")}, {"pid": 7}),
        GoodputRecord("train", 0.0, 9.0, 1, 0.5, {"compute": 1.0}, (FAULT,), (CoursePoint(1.0, {"compute": 0.5}),)),
    ],
)
def test_a_view_is_read_as_it_was_written(view: Any) -> None:
    body = json.loads(json.dumps(view.to_body()))

    assert type(view).from_body(body) == view
    if not isinstance(view, WeaverEvent):
        assert type(view).from_body({**body, "of a newer weaver": 1}) == view


def test_a_replica_has_a_job_and_a_place_to_be_sorted_by() -> None:
    alone = ReplicaInfo("eval", ReplicaState.PAUSED, "eval")

    assert (REPLICA.job, alone.job) == ("train@s", "eval")
    assert sorted([REPLICA, alone], key=lambda one: one.place) == [alone, REPLICA]


def test_what_a_delta_has_is_changed() -> None:
    changed = REPLICA.changed_by({"state": "paused", "step": 9, "of a newer weaver": 1})

    assert (changed.state, changed.step, changed.group) == (ReplicaState.PAUSED, 9, "train")
    assert REPLICA.changed_by({"step": 3}).state is ReplicaState.RUNNING


def test_what_a_death_cost_is_known_as_far_as_it_went() -> None:
    assert (FAULT.detection, FAULT.respawn, FAULT.waiting, FAULT.recovery) == (0.5, 2.5, 2.0, 5.0)
    fresh = FaultRecord("train_0", "killed", 1.0, 1.5)
    assert (fresh.detection, fresh.respawn, fresh.waiting, fresh.recovery) == (0.5, None, None, None)


def test_a_share_is_of_the_whole() -> None:
    record = GoodputRecord("train", 0.0, 9.0, 1, 0.5, {"compute": 3.0, "lost": 1.0})

    assert (record.share("compute"), record.share("waiting")) == (0.75, 0.0)
    assert GoodputRecord("train", 0.0, 0.0, 0, None, {}).share("compute") == 0.0


def test_messages_of_the_feed_are_updates() -> None:
    snapshot = {
        "type": "snapshot",
        "status": {"event": 7},
        "replicas": [REPLICA.to_body()],
        "devices": [DEVICE.to_body()],
    }
    delta = {"type": "delta", "replicas": {"train_0": {"step": 4, "metrics": {"loss": "NaN"}}}}

    assert read_update(snapshot) == Snapshot({"event": 7}, {"train_0": REPLICA}, {"GPU-0": DEVICE})
    assert read_update({"type": "event", "event": EVENT.to_body()}) == EVENT
    assert read_update({"type": "away", "reason": "killed"}) == Away("killed")
    assert read_update({"type": "of a newer gateway"}) is None
    update = read_update(delta)
    assert isinstance(update, Delta)
    assert math.isnan(update.replicas["train_0"]["metrics"]["loss"])
    assert update.devices == {}


@pytest.mark.parametrize(
    ("names", "text"),
    [([], "none"), (["a"], "a"), (list("abcde"), "a, b, c, d, e"), (list("abcdefg"), "a, b, c, d, e and 2 more")],
)
def test_of_many_names_a_few_are_shown(names: list[str], text: str) -> None:
    assert few(names) == text
