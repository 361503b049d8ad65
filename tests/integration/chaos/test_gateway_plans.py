"""Plans that the gateway carries out: who may, what is refused, how a run ends, and that no fault is left."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loom_gateway.chaos.routes import MAX_TEXT
from loom_proxy.local import LocalCluster
from tests.support.gateways import await_true
from tests.support.users import House
from tests.support.weaver_training import training

pytestmark = pytest.mark.slow

SLOW = """
name: slow
settle: 0.2 s
faults:
  - fault: slow_rank
    when: {time: 0.2 s}
    target: train_0
    for: FOR
    with: {seconds: 0.05}
    expect: recovers within 20 s
expect: [loss is finite, no step lost twice]
"""


@pytest.fixture
def house(cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    """A gateway of several users, that may be struck, and on which ann trains."""
    monkeypatch.setenv("LOOM_INJECTABLE", "1")
    made = House(cluster.workers, tmp_path, "--injectable")
    try:
        weaver = made.weaver("ann")
        with training(weaver.address(), "train_0"):
            await_true(lambda: bool((found := weaver.replicas().get("train_0")) and found.step))
            yield made
    finally:
        made.gateway.close()


def ask(
    house: House, method: str, path: str = "", body: Any = None, user: str = "ann"
) -> tuple[int, dict[str, Any]]:
    status, text = house.answer(user, method, f"/api/v1/weaver/plans{path}", body)
    return status, json.loads(text)


def begin(house: House, text: str) -> str:
    status, run = ask(house, "POST", "", {"text": text})
    assert status == 201, run
    return str(run["id"])


def look(house: House, run: str) -> dict[str, Any]:
    status, found = ask(house, "GET", f"/{run}")
    assert status == 200, found
    return found


def await_fault(house: House, run: str) -> str:
    """Wait until the run's fault is present; return the id of the injection."""
    await_true(lambda: look(house, run)["progress"]["faults"][0]["state"] == "present")
    return str(look(house, run)["progress"]["faults"][0]["injection"])


def removed(house: House, injection: str) -> bool:
    """Whether a fault was removed, as the weaver's events say."""
    events = house.weaver("ann").events(0, kind="fault_removed")
    return injection in [one.data["injection"] for one in events]


def test_a_plan_is_carried_out_with_its_verdicts_and_is_in_the_audit(house: House) -> None:
    text = SLOW.replace("FOR", "500 ms")
    assert ask(house, "POST", "/check", {"text": text, "seed": 3}) == (
        200,
        {"name": "slow", "faults": 1, "expectations": 3, "seed": 3},
    )
    run = begin(house, text)
    await_true(lambda: look(house, run)["state"] != "running")

    found = look(house, run)
    assert (found["state"], found["why"], found["text"]) == ("held", None, text)
    (fault,) = found["progress"]["faults"]
    assert (fault["fault"], fault["state"], fault["struck"]) == ("slow_rank", "recovered", ["train_0"])
    assert [one["held"] for one in found["progress"]["expectations"]] == [True, True, True]
    assert "slow_rank strikes train_0" in [one["text"] for one in found["lines"]]
    assert [one["id"] for one in ask(house, "GET")[1]["plans"]] == [run]
    (line,) = house.audit(event="injected", plan="slow", fault="slow_rank")
    assert (line["user"], line["replicas"]) == ("ann", ["train_0"])


def test_a_plan_that_is_cancelled_leaves_no_fault(house: House) -> None:
    run = begin(house, SLOW.replace("FOR", "600 s"))
    injection = await_fault(house, run)
    status, refused = ask(house, "POST", "", {"text": SLOW.replace("FOR", "1 s")})
    assert (status, refused["error"]["code"]) == (409, "plan_goes_on")

    assert ask(house, "DELETE", f"/{run}")[0] == 200
    await_true(lambda: look(house, run)["state"] == "cancelled")
    assert look(house, run)["why"] == "it was cancelled"
    assert removed(house, injection)
    assert ask(house, "DELETE", f"/{run}")[1]["state"] == "cancelled"  # it has ended already


@pytest.mark.guarantees(
    "page actions",
    "A plan shows its expectations live, and leaves no fault when it is cancelled, its token is revoked "
    "or the gateway stops",
)
def test_a_plan_ends_with_the_gateway_and_leaves_no_fault(house: House) -> None:
    injection = await_fault(house, begin(house, SLOW.replace("FOR", "600 s")))
    house.gateway.end(signal.SIGTERM)
    house.gateway.start()
    assert removed(house, injection)
    assert ask(house, "GET")[1]["plans"] == []


@pytest.mark.guarantees(
    "page actions",
    "A plan shows its expectations live, and leaves no fault when it is cancelled, its token is revoked "
    "or the gateway stops",
)
def test_a_plan_ends_with_the_token_that_began_it(house: House) -> None:
    record, token = house.file.create("ann 2", "operate", user="ann")
    house.tokens["ann 2"] = token
    status, run = ask(house, "POST", "", {"text": SLOW.replace("FOR", "600 s")}, user="ann 2")
    assert status == 201
    injection = await_fault(house, run["id"])
    house.file.revoke(record.id)
    await_true(lambda: look(house, run["id"])["state"] == "cancelled")
    assert "was revoked" in look(house, run["id"])["why"]
    assert removed(house, injection)


@pytest.mark.parametrize(
    ("text", "status", "code", "message"),
    [
        ("", 422, "bad_plan", "plan:1:1: the plan is empty"),
        ("faults:\n  - fault: slow_rnk\n    when: {time: 1 s}", 422, "bad_plan", "plan:2:12: "),
        (SLOW.replace("FOR", "-5 s"), 422, "bad_plan", "plan:8:10: a time is not negative"),
        (SLOW.replace("FOR", "1 s").replace("train_0", "nobody"), 422, "bad_plan", "matches no replica that lives"),
        (
            "faults: {fault: dead_gateway, when: {time: 1 s}}",
            422,
            "bad_plan",
            "plan:1:9: dead_gateway: the gateway",
        ),
        ("faults: {fault: dead_weaver, when: {time: 1 s}}", 403, "scope", "to inject dead_weaver"),
        (f"within: 5 h\n{SLOW.replace('FOR', '1 s')}", 422, "wrong_arguments", "a plan takes at most 14400 s"),
        ("x" * (MAX_TEXT + 1), 422, "wrong_arguments", "at most 65536 characters"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused_before_anything_is_touched(
    house: House, text: str, status: int, code: str, message: str
) -> None:
    for path in ("/check", ""):
        found, answer = ask(house, "POST", path, {"text": text})
        assert (found, answer["error"]["code"]) == (status, code), answer
        assert message in answer["error"]["message"]
    assert ask(house, "GET")[1]["plans"] == []


def test_what_is_not_injectable_is_refused_by_its_line(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOOM_INJECTABLE")
    weaver = house.weaver("ann")
    with training(weaver.address(), "safe_0"):
        await_true(lambda: "safe_0" in weaver.replicas())
        status, answer = ask(house, "POST", "", {"text": SLOW.replace("train_0", "safe_0").replace("FOR", "1 s")})
        assert (status, answer["error"]["code"]) == (422, "bad_plan")
        assert answer["error"]["message"].startswith("plan:5:5: slow_rank: the target")
        assert "not marked as injectable: safe_0" in answer["error"]["message"]


def test_a_plan_of_another_user_is_none_but_for_an_admin_who_names_the_user(house: House) -> None:
    run = begin(house, SLOW.replace("FOR", "600 s"))
    for method in ("GET", "DELETE"):
        assert ask(house, method, f"/{run}", user="bob")[1]["error"]["code"] == "not_found"
        assert ask(house, method, f"/{run}", user="root")[0] == 404
    assert ask(house, "GET", user="bob")[1]["plans"] == []
    assert ask(house, "GET", f"/{run}?user=ann", user="bob")[0] == 403
    assert [one["user"] for one in ask(house, "GET", "?user=*", user="root")[1]["plans"]] == ["ann"]
    assert ask(house, "POST", "?user=*", {"text": SLOW.replace("FOR", "1 s")}, user="root")[0] == 422
    assert ask(house, "DELETE", f"/{run}?user=ann", user="root")[0] == 200
    await_true(lambda: look(house, run)["state"] == "cancelled")


def test_the_users_are_listed_for_an_admin(house: House) -> None:
    with house.connect("bob"):
        status, text = house.answer("root", "GET", "/api/v1/users")
        assert status == 200
        assert json.loads(text)["users"] == [
            {"name": "ann", "replicas": 1, "sessions": 0},
            {"name": "bob", "replicas": 0, "sessions": 1},
        ]
    assert house.answer("ann", "GET", "/api/v1/users")[0] == 403
