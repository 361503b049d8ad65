"""Pages that subscribe, over a real gateway and a real weaver; and sockets that were lost."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from loom_proxy.local import LocalCluster
from tests.support.gateways import await_true
from tests.support.page_frames import Frame
from tests.support.page_socket import Message, page_socket
from tests.support.users import House
from tests.support.weaver_training import training
from tests.support.weavers import await_weaver

pytestmark = pytest.mark.timeout(120)

REPORT = {"state", "step", "epoch", "max_step", "metrics", "phase", "reported", "connected"}


@pytest.fixture(scope="module")
def house(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A gateway at which two processes of ann's train, and none of bob's."""
    made = House(list(cluster.workers), tmp_path_factory.mktemp("feed"))
    await_weaver(made.weaver("ann"))
    with training(made.weaver("ann").address(), "train_0", "train_1", group="train"):
        await_true(lambda: sum("loss" in one.metrics for one in made.weaver("ann").replicas().values()) == 2)
        yield made
    made.gateway.close()


def numbers(snapshot: Message) -> dict[str, int]:
    """The number of each replica of a snapshot."""
    return {one["id"]: number for one, number in zip(snapshot["replicas"], snapshot["numbers"], strict=True)}


def column(name: str) -> Callable[[Frame], Any]:
    return lambda frame: frame.section(name)


def note(house: House, text: str) -> None:
    """Cause an event."""
    house.weaver("ann").set_policy(text, "notify")


def noted(one: Message) -> str | None:
    """The name in an event that `note` has caused."""
    event = one.get("event", {})
    return event["group"] if event.get("kind") == "policy" else None


# -- subscribing ---------------------------------------------------------------------------------------------------


def test_columns_come_dense_and_then_as_they_change(house: House) -> None:
    with house.page() as ann:
        snapshot = ann.of_type("snapshot")
        known = numbers(snapshot)
        assert ann.subscribe(columns=["state", "step", "loss", "pace"]) == {"type": "subscribed", "id": "subscribe"}
        first = ann.frame()
        steps = first.section("step")
        assert steps is not None
        dense = {section.column: section for section in first.sections}
        assert set(dense) == {"state", "step", "loss", "pace"}
        assert all(section.dense for section in first.sections)
        running = snapshot["states"].index("running")
        assert [dense["state"].values[known[id]] for id in ("train_0", "train_1")] == [running, running]
        later = ann.frame(column("step")).section("step")

    assert later is not None
    assert later.values[known["train_0"]] > steps.values[known["train_0"]]
    assert 0 < dense["loss"].values[known["train_0"]] < 1
    assert first.position >= snapshot["at"]


def test_what_changes_comes_sparse_and_each_replica_has_a_number_of_its_own(house: House) -> None:
    with house.page() as ann:
        known = numbers(ann.of_type("snapshot"))
        with training(house.weaver("ann").address(), "more_0", "more_1", "more_2", group="more"):
            came = [ann.next(lambda one: one.get("event", {}).get("kind") == "registered") for _ in range(3)]
        for _ in range(3):
            ann.next(lambda one: one.get("event", {}).get("kind") == "failed")
        ann.subscribe(columns=["step", "state"])
        first = ann.frame()
        # The states of those that have failed may be pushed a moment after the events.
        later = ann.frame(lambda frame: len(frame.sections) == 1 and not frame.sections[0].dense)

    known |= {one["info"]["id"]: one["number"] for one in came}
    assert sorted(known.values()) == list(range(len(known)))
    assert all(len(section.values) == len(known) for section in first.sections)
    (section,) = later.sections
    assert (section.column, set(section.values)) == ("step", {known["train_0"], known["train_1"]})


def test_rows_come_whole_and_only_those(house: House) -> None:
    with house.page() as ann:
        ann.of_type("snapshot")
        ann.subscribe(rows=["train_1", "nobody"])
        first = ann.delta("replicas")
        second = ann.delta("replicas")
        ann.subscribe(rows=["train_1", "train_0"])
        both = ann.delta("replicas", lambda replicas: "train_0" in replicas)

    assert set(first) == set(second) == {"train_1"}
    assert set(first["train_1"]) == REPORT
    assert first["train_1"]["metrics"]["grad/norm"] == "NaN"
    assert second["train_1"]["step"] > first["train_1"]["step"]
    assert both["train_0"]["step"] > 0


def test_aggregates_say_what_the_replicas_say(house: House) -> None:
    with house.page() as ann:
        ann.of_type("snapshot")
        ann.subscribe(aggregates=True, rows=["train_0", "train_1"], columns=["pace"])
        ann.delta("aggregates", lambda jobs: jobs.get("train", {}).get("rate"))
        message = ann.next(lambda one: len(one.get("replicas", ())) == 2 and "train" in one.get("aggregates", ()))

    job, rows = message["aggregates"]["train"], message["replicas"].values()
    assert (job["group"], job["session"], job["user"]) == ("train", None, "ann")
    assert (job["replicas"], job["living"], job["states"]) == (2, 2, {"running": 2})
    assert job["step"] == max(row["step"] for row in rows)
    assert math.isclose(job["loss"], sum(row["metrics"]["loss"] for row in rows) / 2)
    assert (job["not_finite"], job["max_step"]) == (0, None)
    assert 0 < job["rate"] < 1 / 0.009


def test_without_a_subscription_no_report_comes(house: House) -> None:
    with house.page() as ann, house.page() as other:
        ann.of_type("snapshot"), other.of_type("snapshot")
        other.subscribe(rows=["train_0"], columns=["step"])
        for _ in range(2):
            other.frame(), other.delta("replicas")
        ann.ask(type="ping", id=1)

        assert not any(one["type"] == "frame" or one.get("replicas") for one in ann._kept)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [({"columns": ["colour"]}, "colour"), ({"rows": ["r"] * 201}, "200"), ({"row": ["r"]}, "row")],
)
def test_a_subscription_that_makes_no_sense_changes_nothing(house: House, wrong: dict[str, Any], why: str) -> None:
    with house.page() as ann:
        ann.of_type("snapshot")
        ann.subscribe(columns=["step"])
        ann.frame()
        error = ann.subscribe(**wrong)
        ann.frame(column("step"))

    assert (error["type"], error["code"]) == ("error", "wrong_arguments")
    assert why in error["message"]


def test_another_program_subscribes_to_nothing_and_gets_all_reports(house: House) -> None:
    with page_socket(house.url, house.tokens["ann"], page=False) as plain:
        assert set(plain.of_type("snapshot")) == {"type", "status", "replicas", "devices"}
        assert plain.subscribe(columns=["step"])["code"] == "wrong_arguments"
        found = plain.delta("replicas", lambda replicas: "train_0" in replicas)

    assert set(found["train_0"]) == REPORT


def test_another_user_sees_nothing_and_an_admin_sees_that_user(house: House) -> None:
    with house.page("bob") as bob, house.page("root", "?user=ann") as root:
        assert (bob.of_type("snapshot")["numbers"], len(numbers(root.of_type("snapshot"))) >= 2) == ([], True)
        for one in (bob, root):
            one.subscribe(columns=["step", "state"], rows=["train_0"], aggregates=True)
        root.delta("aggregates", lambda jobs: "train" in jobs)
        root.delta("replicas", lambda replicas: "train_0" in replicas)
        assert root.frame(column("step")).sections
        bob.ask(type="ping", id=1)
        frames = [one["frame"] for one in bob._kept if one["type"] == "frame"]
        told = json.dumps([one for one in bob._kept if one["type"] != "frame"])

    assert not any(section.values for frame in frames for section in frame.sections)
    assert "train" not in told


# -- sockets that were lost ----------------------------------------------------------------------------------------


@pytest.mark.guarantees(
    "page data",
    "A page whose socket was lost goes on without loss or repetition, and nobody goes on with another "
    "user's feed or a revoked token",
)
def test_a_page_whose_socket_was_lost_goes_on_without_loss_or_repetition(house: House) -> None:
    with house.page() as ann:
        snapshot = ann.of_type("snapshot")
        note(house, "before")
        last = ann.next(lambda one: noted(one) == "before")
    for name in ("missed-1", "missed-2"):
        note(house, name)
    with house.page(query=f"?since={snapshot['feed']}.{last['at']}") as ann:
        ann.subscribe(columns=["step"], aggregates=True)
        note(house, "after")
        ann.next(lambda one: noted(one) == "after")
        resumed, *rest = ann._kept
        frame = ann.frame()
        assert "train" in ann.delta("aggregates")

    assert resumed == {"type": "resumed", "feed": snapshot["feed"], "at": last["at"]}
    assert [noted(one) for one in rest if noted(one)] == ["missed-1", "missed-2"]
    assert not any(one["type"] == "snapshot" for one in rest)
    positions = [one["at"] for one in rest if "at" in one]
    assert positions == sorted(positions)
    assert positions[0] > last["at"] or "sessions" in rest[0]
    assert any("sessions" in one and "workers" in one for one in rest)
    assert frame.sections[0].dense


@pytest.mark.parametrize("since", ["{feed}.999999999", "0a.{at}", "{at}", "{feed}.x"])
def test_a_page_that_cannot_go_on_gets_a_snapshot(house: House, since: str) -> None:
    with house.page() as ann:
        snapshot = ann.of_type("snapshot")
    with house.page(query=f"?since={since.format(**snapshot)}") as ann:
        again = ann.next(lambda one: True)

    assert again["type"] == "snapshot"
    assert again["at"] >= snapshot["at"]


@pytest.mark.guarantees(
    "page data",
    "A page whose socket was lost goes on without loss or repetition, and nobody goes on with another "
    "user's feed or a revoked token",
)
def test_another_user_does_not_go_on_with_it(house: House) -> None:
    with house.page() as ann:
        snapshot = ann.of_type("snapshot")
    with house.page("bob", f"?since={snapshot['feed']}.{snapshot['at']}") as bob:
        assert bob.of_type("snapshot", "resumed")["replicas"] == []


@pytest.mark.guarantees(
    "page data",
    "A page whose socket was lost goes on without loss or repetition, and nobody goes on with another "
    "user's feed or a revoked token",
)
def test_a_revoked_token_goes_on_with_nothing(house: House) -> None:
    token, text = house.file.create("soon revoked", "view", user="ann")
    with page_socket(house.url, text) as ann:
        snapshot = ann.of_type("snapshot")
        house.file.revoke(token.id)
        with pytest.raises(ConnectionClosed):
            ann.of_type("never")
    with (
        pytest.raises(Exception, match="HTTP 401"),
        page_socket(house.url, text, f"?since={snapshot['feed']}.{snapshot['at']}") as ann,
    ):
        ann.of_type("resumed")


def test_a_page_that_changes_its_subscription_all_the_time_is_slowed_down(house: House) -> None:
    with house.page() as ann:
        ann.of_type("snapshot")
        began = time.monotonic()
        for number in range(40):
            ann.send(type="subscribe", id=number, columns=["step"] if number % 2 else ["loss"])
        ann.next(lambda one: one["type"] == "subscribed" and one["id"] == 39)

    assert time.monotonic() - began >= 29 * 0.05 - 0.05
    assert sum(one["type"] == "frame" for one in ann._kept) < 20


# -- a weaver that is away ----------------------------------------------------------------------------------------


def test_after_the_weaver_was_away_there_is_another_feed(house: House) -> None:
    (weaver,) = house.gateway.weavers()
    with house.page() as ann:
        before = ann.of_type("snapshot")
        ann.subscribe(columns=["step"], rows=["train_0"])
        ann.frame()
        weaver.kill()
        ann.of_type("away")
        after = ann.of_type("snapshot")
        ann._kept.clear()
        frame, row = ann.frame(), ann.delta("replicas")
    with house.page(query=f"?since={before['feed']}.{before['at']}") as ann:
        again = ann.next(lambda one: True)

    assert after["feed"] != before["feed"]
    assert set(numbers(after)) >= {"train_0", "train_1"}
    assert (frame.sections[0].column, frame.sections[0].dense, set(row)) == ("step", True, {"train_0"})
    assert (again["type"], again["feed"]) == ("snapshot", after["feed"])
