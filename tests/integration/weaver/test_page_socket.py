"""Pages at the weaver's WebSocket: they see everything, and command over it; each only what is their user's."""

from __future__ import annotations

import json
import os
import signal
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from loom.token_file import Token
from loom_proxy.local import LocalCluster
from tests.support.gateways import await_true
from tests.support.page_socket import Message, page_socket
from tests.support.users import House
from tests.support.weaver_training import Training, training
from tests.support.weavers import await_weaver

pytestmark = pytest.mark.timeout(120)

LASTS = 600.0  # seconds of a fault that a test removes


@pytest.fixture(scope="module")
def house(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    made = House(list(cluster.workers), tmp_path_factory.mktemp("page"), "--injectable")
    await_weaver(made.weaver("ann"))
    yield made
    made.gateway.close()


@pytest.fixture(scope="module")
def trained(house: House) -> Iterator[Training]:
    """A process of ann's that trains, and is injectable."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOOM_INJECTABLE", "1")
        with training(house.weaver("ann").address(), "train_0", group="train") as (process,):
            await_true(lambda: "learning_rate" in handlers(house))
            yield process


def handlers(house: House) -> Any:
    replica = house.weaver("ann").replicas().get("train_0")
    return {} if replica is None else replica.handlers


def new_id() -> str:
    return uuid.uuid4().hex


def told(answers: list[Message]) -> list[str]:
    return [one["type"] for one in answers]


def view_token(house: House) -> tuple[Token, str]:
    return house.file.create("a view", "view", user="ann")


# -- what a page sees ----------------------------------------------------------------------------------------------


def test_a_page_gets_everything_and_another_program_what_it_got_before(house: House, trained: Training) -> None:
    with house.page() as shown, page_socket(house.url, house.tokens["ann"], page=False) as plain:
        full, before = shown.of_type("snapshot"), plain.of_type("snapshot")

        assert shown.socket.subprotocol == "loom.page"
        assert plain.socket.subprotocol is None
        assert set(before) == {"type", "status", "replicas", "devices"}
        more = {"policies", "goodput", "events", "sessions", "workers", "numbers", "states", "feed", "at"}
        assert set(full) - set(before) == more
        assert "registered" in [event["kind"] for event in full["events"]]
        assert len(full["events"]) <= 200
        assert [(job["job"], job["course"]) for job in full["goodput"]] == [("train", [])]
        plain.of_type("delta")
        assert set(plain.of_type("delta")) == {"type", "replicas", "devices"}


def test_a_page_that_comes_after_another_program_gets_everything_too(house: House, trained: Training) -> None:
    with page_socket(house.url, house.tokens["ann"], page=False) as plain:
        plain.of_type("snapshot")
        plain.of_type("delta")
        with page_socket(house.url, house.tokens["ann"], "?page=1", page=False) as shown:
            assert "goodput" in shown.of_type("snapshot")


def test_a_page_hears_of_workers_and_of_sessions_that_come_and_go(house: House) -> None:
    with house.page() as ann, house.page("bob") as bob:
        found, of_bob = ann.of_type("snapshot"), bob.of_type("snapshot")
        assert found["sessions"] == of_bob["sessions"] == []
        with house.connect("ann") as job:
            (session,) = ann.delta("sessions")
            assert (session["name"], session["user"], session["client_connected"]) == (job.session, "ann", True)
        assert ann.delta("sessions", lambda sessions: not sessions) == []
        assert (found["workers"] or ann.delta("workers")) == house.rest("ann").status()["workers"]
        bob.send(type="ping", id=1)
        bob.of_type("pong")
        assert not any("sessions" in message for message in bob._kept)


def test_a_replica_that_registers_is_described(house: House) -> None:
    with house.page() as ann, house.page("bob") as bob:
        ann.of_type("snapshot"), bob.of_type("snapshot")
        with training(house.weaver("ann").address(), "new_0", group="new"):
            came = ann.next(lambda one: one.get("event", {}).get("kind") == "registered")
            device = ann.delta("device_states")[came["info"]["devices"][0]]

            assert (came["info"]["id"], came["info"]["group"], came["info"]["user"]) == ("new_0", "new", "ann")
            assert ("new_0" in device["replicas"], device["state"]) == (True, "active")
        ann.next(lambda one: one.get("event", {}).get("kind") == "failed")
        bob.send(type="ping", id=1)
        bob.of_type("pong")
        assert "new_0" not in json.dumps(bob._kept)


# -- what a page does ----------------------------------------------------------------------------------------------


def test_a_configuration_is_changed_and_acknowledged(house: House, trained: Training) -> None:
    command = new_id()
    with house.page() as ann:
        rate = {"kind": "update_config", "target": "train_0", "params": {"learning_rate": 0.25}}
        accepted, acknowledged, done = ann.answers(type="command", id=command, **rate)
        again = ann.answers(type="command", id=command, **rate)
        event = ann.next(lambda one: one.get("event", {}).get("kind") == "applied")

    assert accepted == {"type": "accepted", "id": command, "command": command, "replicas": ["train_0"]}
    assert (acknowledged["replica"], acknowledged["ok"], acknowledged["waiting"]) == ("train_0", True, False)
    assert acknowledged["changes"] == {"learning_rate": {"old": 0.1, "new": 0.25}}
    assert trained.learning_rate() == (0.25, acknowledged["step"])
    assert done == {"type": "done", "id": command, "command": command}
    assert again == [accepted, acknowledged, done]
    assert event["event"]["changes"] == acknowledged["changes"]
    assert "info" not in event
    lines = house.audit(event="commanded", command=command)
    assert [(line["method"], line["status"], line["kind"], line["keys"], line["of"]) for line in lines] == [
        ("WS", 200, "update_config", ["learning_rate"], "ann")
    ] * 2
    (given,) = [one for one in house.weaver("ann").events(kind="command") if one.data["command"] == command]
    assert given.data["by"] == "ann"


def test_what_is_refused_and_who_does_not_exist_is_acknowledged_too(house: House, trained: Training) -> None:
    with house.page() as ann:
        target = ["train_0", "nobody"]
        rate = {"kind": "update_config", "target": target, "params": {"learning_rate": -1}}
        answers = ann.answers(type="command", id=new_id(), **rate)

    by_replica = {one["replica"]: one for one in answers if one["type"] == "acknowledgement"}
    assert told(answers) == ["accepted", "acknowledgement", "acknowledgement", "done"]
    assert "larger than 0" in by_replica["train_0"]["refused"]["learning_rate"]
    assert 'no replica named "nobody"' in by_replica["nobody"]["reason"]
    assert not any(one["ok"] for one in by_replica.values())


def test_a_command_that_waits_holds_up_nothing(house: House, trained: Training) -> None:
    os.kill(trained.pid, signal.SIGSTOP)
    try:
        with house.page() as ann:
            accepted = ann.ask(type="command", id=new_id(), kind="resume", target="train_0")
            pong = ann.ask(type="ping", id="after it")
            other = ann.answers(type="command", id=new_id(), kind="pause", target="nobody-*")
            assert not any(one["type"] == "acknowledgement" for one in ann._kept)
            os.kill(trained.pid, signal.SIGCONT)
            acknowledged = ann.of_type("acknowledgement")
    finally:
        os.kill(trained.pid, signal.SIGCONT)

    assert (accepted["type"], pong) == ("accepted", {"type": "pong", "id": "after it"})
    assert told(other) == ["accepted", "done"]
    assert (acknowledged["id"], acknowledged["ok"]) == (accepted["id"], True)


@pytest.mark.guarantees(
    "weaver",
    "What a session commands is in the audit once, and what a page commands as over REST, also if its "
    "WebSocket drops",
)
def test_a_command_whose_socket_drops_is_still_given_once(house: House, trained: Training) -> None:
    command, weaver = new_id(), house.weaver("ann")
    with house.page() as ann:
        ann.send(type="command", id=command, kind="update_config", target="*", params={"learning_rate": 0.5})
    await_true(lambda: weaver.replica("train_0").config["learning_rate"] == 0.5)
    with house.page() as ann:
        answers = ann.answers(type="command", id=command, kind="update_config", params={"learning_rate": 0.5})

    assert told(answers) == ["accepted", "acknowledgement", "done"]
    assert len([one for one in weaver.events(kind="command") if one.data["command"] == command]) == 1


def test_a_policy_is_set_and_pushed(house: House) -> None:
    with house.page() as ann:
        ann.of_type("snapshot")
        answers = ann.answers(type="policy", id=1, group="train", action="pause")
        policies = ann.delta("policies")

    assert answers == [
        {"type": "accepted", "id": 1, "command": None, "replicas": []},
        {"type": "done", "id": 1, "command": None},
    ]
    assert policies["train"] == "pause"
    (line,) = house.audit(event="commanded", group="train")
    assert (line["action"], line["method"]) == ("pause", "WS")


def test_a_fault_is_injected_and_removed(house: House, trained: Training) -> None:
    injection = new_id()
    with house.page() as ann:
        fault = {"fault": "slow_rank", "target": "train_0", "params": {"seconds": 0.01}, "duration": LASTS}
        injected = ann.answers(type="inject", id=injection, **fault)
        removed = ann.answers(type="remove_fault", id="away with it", injection=injection)
        unknown = ann.ask(type="remove_fault", id=2, injection="none")

    assert told(injected) == told(removed) == ["accepted", "acknowledgement", "done"]
    assert (injected[0]["command"], injected[1]["ok"], removed[1]["ok"]) == (injection, True, True)
    assert (unknown["type"], unknown["code"]) == ("error", "unknown_injection")
    lines = house.audit(event="injected", method="WS")
    assert [(line.get("fault"), line.get("removed"), line["status"]) for line in lines] == [
        ("slow_rank", None, 200), (None, injection, 200), (None, "none", 404)
    ]  # fmt: skip


def test_a_device_is_taken_out_of_use_for_those_on_it(house: House, trained: Training) -> None:
    with house.page() as ann:
        (device,) = [one for one in ann.of_type("snapshot")["devices"] if "train_0" in one["replicas"]]
        off = ann.answers(type="drain_device", device_id=device["uuid"])
        state = ann.delta("device_states")[device["uuid"]]
        on = ann.answers(type="reactivate_group", replica_id="train_0")
        active = ann.delta("device_states")[device["uuid"]]

    assert (off[0]["replicas"], on[0]["replicas"]) == (["train_0"], ["train_0"])
    assert (state["state"], state["reason"]) == ("inactive", "deactivated by ann")
    assert (active["state"], active["reason"]) == ("active", None)


def test_the_seeds_messages_are_taken(house: House, trained: Training) -> None:
    with house.page() as ann:
        paused = ann.answers(type="pause_training", replica_id="train_0")
        ann.next(lambda one: one.get("event", {}).get("kind") == "paused")
        resumed = ann.answers(type="resume_training", replica_id="train_0", id=new_id())
        changed = ann.answers(
            type="update_config", replica_id="train_0", config_params={"learning_rate": 0.75}, id=new_id()
        )

    assert told(paused) == told(resumed) == told(changed) == ["accepted", "acknowledgement", "done"]
    assert paused[0]["id"] is None
    assert changed[1]["changes"]["learning_rate"]["new"] == 0.75


def test_a_client_that_asks_for_the_seeds_form_is_sent_it(house: House, trained: Training) -> None:
    with page_socket(house.url, house.tokens["ann"], "?form=torchloom", page=False) as ann:
        first = ann.of_type("status_update")["data"]
        assert first["replicaGroups"]["train"]["status"] == "running"
        assert first["training_status"][0]["replica_id"] == "train_0"
        step = ann.of_type("training_status")["data"]["current_step"]
        ann.next(lambda one: one["type"] == "status_update" and one["data"]["step"] >= step)
        ann.send(type="update_config", replica_id="train", config_params={"learning_rate": "0.375"})
        assert ann.of_type("acknowledgement")["changes"]["learning_rate"]["new"] == 0.375
        ann.next(lambda one: one["type"] == "training_status" and one["data"]["config"] == {"learning_rate": 0.375})
        with page_socket(house.url, house.tokens["bob"], "?form=torchloom", page=False) as bob:
            assert bob.of_type("status_update")["data"]["replicaGroups"] == {}
        with page_socket(house.url, house.tokens["ann"], page=False) as plain:
            assert set(plain.of_type("delta")) == {"type", "replicas", "devices"}


def test_the_seeds_address_is_taken(house: House, trained: Training) -> None:
    body = {"replica_id": "train_0", "config_params": {"learning_rate": 0.625}}
    status, answer = house.answer("ann", "POST", "/api/commands/update-config", body)
    command = json.loads(answer)

    assert (status, command["replicas"], command["done"]) == (200, ["train_0"], True)
    assert command["outcomes"]["train_0"]["ok"]
    assert house.weaver("ann").replica("train_0").config["learning_rate"] == 0.625
    (line,) = house.audit(event="commanded", command=command["id"])
    assert (line["path"], line["keys"]) == ("/api/commands/update-config", ["learning_rate"])
    assert house.answer("ann", "POST", "/api/commands/update-config", {"replica_id": "train_0"})[0] == 422


# -- what is refused -----------------------------------------------------------------------------------------------


def test_a_token_that_only_views_is_refused_each_change_and_sees(house: House) -> None:
    refused = len(house.audit(event="refused", code="scope"))
    commanded = len(house.audit(event="commanded"))
    with page_socket(house.url, view_token(house)[1]) as viewer:
        viewer.of_type("snapshot")
        answer = viewer.ask(type="command", id=new_id(), kind="stop", target="*")
        alias = viewer.ask(type="stop_training", id=3, replica_id="train_0")
        pong = viewer.ask(type="ping", id=4)

    assert (answer["type"], answer["code"], alias["code"]) == ("error", "scope", "scope")
    assert "needs a token of scope operate" in answer["message"]
    assert pong == {"type": "pong", "id": 4}
    await_true(lambda: len(house.audit(event="refused", code="scope")) == refused + 1)  # a minute's share a line
    assert len(house.audit(event="commanded")) == commanded


@pytest.mark.guarantees(
    "weaver", "A watcher is told of its user's replicas only, and a page also of the sessions that its user may see"
)
def test_another_users_replicas_are_out_of_reach(house: House, trained: Training) -> None:
    with house.page("bob") as bob:
        assert bob.of_type("snapshot")["replicas"] == []
        everyone = bob.answers(type="command", id=new_id(), kind="stop", target="*")
        named = bob.answers(type="command", id=new_id(), kind="stop", target="train_0")
        struck = bob.ask(type="inject", id=new_id(), fault="sigkill", target="train_0")
        gateway = bob.ask(type="inject", id=new_id(), fault="dead_gateway", target="*")
    with pytest.raises(ConnectionClosed) as closed, house.page("bob", "?user=ann") as bob:
        bob.of_type("snapshot")

    assert (told(everyone), everyone[0]["replicas"]) == (["accepted", "done"], [])
    assert 'no replica named "train_0"' in named[1]["reason"]
    assert (struck["code"], gateway["code"]) == ("unknown_replica", "scope")
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.reason == "scope"
    assert trained.process.poll() is None


def test_an_admin_sees_and_commands_for_another_user(house: House, trained: Training) -> None:
    with house.page("root", "?user=ann") as root:
        assert "train_0" in [one["id"] for one in root.of_type("snapshot")["replicas"]]
        answers = root.answers(type="command", id=new_id(), kind="resume", target="train_0")

    assert told(answers) == ["accepted", "acknowledgement", "done"]


def test_everyone_cannot_be_watched_at_once(house: House) -> None:
    with pytest.raises(ConnectionClosed) as closed, house.page("root", "?user=*") as root:
        root.of_type("snapshot")

    assert closed.value.rcvd is not None
    assert closed.value.rcvd.reason == "wrong_arguments"


@pytest.mark.parametrize(
    ("text", "id", "code"),
    [
        ("{", None, "protocol_mismatch"),
        ("[]", None, "protocol_mismatch"),
        ("[" * 60_000, None, "protocol_mismatch"),
        ('{"id": 1}', None, "protocol_mismatch"),
        ('{"type": "ping", "id": "\\ud800"}', None, "protocol_mismatch"),
        ('{"type": "ping", "id": [1]}', None, "wrong_arguments"),
        ('{"type": "dance", "id": 1}', 1, "wrong_arguments"),
        ('{"type": "command", "id": "too bad", "kind": "pause"}', "too bad", "wrong_arguments"),
        ('{"type": "command", "kind": "pause"}', None, "wrong_arguments"),
        ('{"type": "command", "id": "12345678", "kind": "inject"}', "12345678", "wrong_arguments"),
        ('{"type": "command", "id": "12345678", "kind": "pause", "wait": 5}', "12345678", "wrong_arguments"),
        ('{"type": "command", "id": "12345678", "kind": "update_config"}', "12345678", "wrong_arguments"),
        ('{"type": "policy", "id": 1, "group": "g", "action": "panic"}', 1, "wrong_arguments"),
        ('{"type": "inject", "id": 1, "fault": "sigkill", "target": "*"}', 1, "wrong_arguments"),
        ('{"type": "inject", "id": "12345678", "fault": "rain", "target": "*"}', "12345678", "wrong_arguments"),
        (json.dumps({"type": "ping", "id": 1, "x": "x" * (64 << 10)}), None, "too_large"),
    ],
)
def test_what_makes_no_sense_is_answered_with_an_error(house: House, text: str, id: Any, code: str) -> None:
    with house.page() as ann:
        ann.socket.send(text)
        error = ann.of_type("error")
        pong = ann.ask(type="ping", id="next")

    assert (error["id"], error["code"]) == (id, code)
    assert error["message"]
    assert pong["type"] == "pong"


def test_bytes_are_no_message_and_much_too_large_a_message_closes_the_socket(house: House) -> None:
    with house.page() as ann:
        ann.socket.send(b"{}")
        assert ann.of_type("error")["code"] == "protocol_mismatch"
        with pytest.raises(ConnectionClosed) as closed:
            ann.ask(type="ping", id=1, x="x" * (2 << 20))

    # What was still on its way to a closed socket resets it, which may overtake the reason.
    assert closed.value.rcvd is None or closed.value.rcvd.code == 1009


def test_a_revoked_token_commands_nothing_and_its_socket_is_closed(house: House) -> None:
    token, text = house.file.create("soon revoked", "operate", user="ann")
    with page_socket(house.url, text) as shown:
        shown.of_type("snapshot")
        house.file.revoke(token.id)
        with pytest.raises(ConnectionClosed) as closed:
            shown.of_type("never")

    assert closed.value.rcvd is not None
    assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (4000, "token_revoked")


# -- a weaver that is away -----------------------------------------------------------------------------------------


@pytest.mark.guarantees(
    "weaver",
    "An acknowledged command is on the disk; a page gets each acknowledgement once, also if the weaver is "
    "killed meanwhile",
)
def test_a_weaver_that_is_killed_comes_back_and_so_do_acknowledgements(house: House, trained: Training) -> None:
    (weaver,) = house.gateway.weavers()
    os.kill(trained.pid, signal.SIGSTOP)
    try:
        with house.page() as ann:
            ann.of_type("snapshot")
            accepted = ann.ask(type="command", id=new_id(), kind="resume", target="train_0")
            weaver.kill()
            away, back = ann.of_type("away"), ann.of_type("snapshot")
            os.kill(trained.pid, signal.SIGCONT)
            acknowledged, done = ann.of_type("acknowledgement"), ann.of_type("done")
    finally:
        os.kill(trained.pid, signal.SIGCONT)

    assert away["reason"]
    assert {"goodput", "events", "policies", "sessions", "workers"} <= set(back)
    assert (acknowledged["id"], acknowledged["ok"], done["id"]) == (accepted["id"], True, accepted["id"])
