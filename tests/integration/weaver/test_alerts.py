"""Alerts of real trainings at a real receiver of webhooks: once each, by all faces, over kills of the weaver."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import loom
from loom.alerting.operator import AlertOperator
from loom.weaver.alert_views import DeliveryState
from loom_proxy.local import LocalCluster
from loom_proxy.weaver.client import WeaverProxy
from tests.support.gateways import BOUND, TOKEN, Gateway, await_true, gateway_of
from tests.support.processes import run_loom
from tests.support.users import House
from tests.support.weaver_training import training
from tests.support.weavers import await_another, await_weaver
from tests.support.webhooks import Hook, WebhookReceiver, receiving, status
from tests.unit.loom.weaver.raw_threadlet import running_weaver

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def gateway(cluster: LocalCluster) -> Iterator[Gateway]:
    with gateway_of(cluster, "--alert-network", "127.0.0.1/32") as running:
        yield running


@pytest.fixture(scope="module")
def weaver(gateway: Gateway) -> WeaverProxy:
    found = WeaverProxy(gateway.url, TOKEN)
    await_weaver(found)
    return found


@pytest.fixture
def receiver() -> Iterator[WebhookReceiver]:
    with receiving() as found:
        yield found


def steps(weaver: WeaverProxy, name: str) -> int:
    found = weaver.runs(name, limit=1)
    return -1 if not found else found[0].step or -1


def test_a_training_that_is_not_a_number_and_crashes_is_told_once_by_all_faces(
    gateway: Gateway, weaver: WeaverProxy, receiver: WebhookReceiver
) -> None:
    at = ("--url", gateway.url, "--token", TOKEN)
    added = run_loom("alerts", "add", "not_a_number", "--run", "told", "--webhook", receiver.url(), "--json", *at)
    assert added.returncode == 0, added.stderr
    rule = json.loads(added.stdout)
    rules = loom.alerts(url=gateway.url, token=TOKEN)
    crashed = rules.add("crashed", run="told", webhook=receiver.url("/slack"), form="slack")
    tested = run_loom("alerts", "test", rule["id"][:6], *at)
    assert (tested.returncode, "HTTP 204" in tested.stdout) == (0, True), tested.stdout + tested.stderr
    before = weaver.status()["event"]

    with training(weaver.address(), "told_0", group="told"):
        receiver.wait(2)
        await_true(lambda: steps(weaver, "told") > 50)
    receiver.wait(3)
    await_true(lambda: all(to.state is DeliveryState.SENT for one in rules.log() for to in one.deliveries))

    test, odd, crash = receiver.hooks
    assert (test.body["test"], odd.body["test"]) == (True, False)
    assert (odd.body["rule"], odd.body["metric"], odd.body["value"]) == ("not_a_number", "grad/norm", "NaN")
    assert (odd.body["run_name"], odd.body["replica"]) == ("told", "told_0")
    assert odd.body["url"].endswith(f"/#/runs/{odd.body['run']}")
    assert list(crash.body) == ["text"]
    assert crash.body["text"].startswith("*crashed* run 'told'")
    assert crash.headers["Idempotency-Key"] == rules.log(crashed)[0].id
    told = [event for event in weaver.events(before) if event.kind == "alerted"]
    assert [event.data["alert"] for event in told] == [hook.headers["Idempotency-Key"] for hook in (odd, crash)]
    logged = run_loom("alerts", "log", "--run", "told", *at).stdout
    assert "not_a_number" in logged
    assert "sent, HTTP 204" in logged
    shown = logged + run_loom("alerts", "list", *at).stdout + (gateway.folder / "output").read_text()
    assert "secret" not in shown
    for one in list(rules):
        assert run_loom("alerts", "rm", one.id, *at).returncode == 0
    assert weaver.alerts() == []
    assert run_loom("alerts", "test", "nothing", *at).returncode == loom.UnknownAlert.exit_status


@pytest.mark.guarantees("weaver", "A dead webhook holds up neither other alerts nor a training")
def test_a_dead_webhook_holds_up_neither_the_training_nor_other_alerts(
    weaver: WeaverProxy, receiver: WebhookReceiver
) -> None:
    over = threading.Event()

    def never(hook: Hook, line: socket.socket) -> bytes:
        over.wait(60)
        return b""

    with receiving() as dead:
        dead.answer = never
        rules = weaver.alerts()
        for webhook in (dead.url(), receiver.url(), "http://127.0.0.1:9/refused"):
            for rule in ("not_a_number", "crashed"):
                rules.add(rule, run="beside*", webhook=webhook)
        with training(weaver.address(), "stays_0", group="stays"):
            for number in range(2):
                name = f"beside{number}"
                with training(weaver.address(), f"{name}_0", group=name):
                    receiver.wait(2 * number + 1)
                receiver.wait(2 * number + 2)
            reached = steps(weaver, "stays")
            weaver.update_config("stays_0", learning_rate=0.5).get(BOUND)
            await_true(lambda: steps(weaver, "stays") > reached + 50)
        assert len(receiver.hooks) == 4
        assert len(dead.hooks) >= 1
        states = {to.to: to.state for one in rules.log() for to in one.deliveries if "beside" in one.message}
        assert states[f"http://127.0.0.1:{receiver.port}/…"] is DeliveryState.SENT
        assert states["http://127.0.0.1:9/…"] is DeliveryState.WAITING
        over.set()
    for one in list(rules):
        rules.remove(one)


@pytest.mark.guarantees("users", "Rules and alerts are a user's own")
def test_users_have_alerts_of_their_own_and_reach_nothing_that_is_not_public(
    cluster: LocalCluster, tmp_path: Path, receiver: WebhookReceiver
) -> None:
    house = House(list(cluster.workers), tmp_path)  # its operator allows nothing
    try:
        ann, bob = house.weaver("ann"), house.weaver("bob")
        await_weaver(ann)
        mine = ann.alerts().add("crashed", webhook=receiver.url())
        for address in ("http://169.254.169.254/latest/meta-data/", "https://localhost:8470/x"):
            ann.alerts().add("crashed", webhook=address)

        assert bob.alerts() == []
        with pytest.raises(loom.UnknownAlert):
            bob.alerts().remove(mine)
        with pytest.raises(loom.WrongArguments, match="--alert-mail"):
            ann.alerts().add("crashed", email=["ann@example.com"])
        for one in ann.alerts():
            (delivery,) = ann.alerts().test(one).deliveries
            assert (delivery.state, "not public" in str(delivery.error)) == (DeliveryState.GIVEN_UP, True)
        assert receiver.hooks == []
        assert {one.user for one in house.weaver("root", "*").alerts()} == {"ann"}
        assert house.weaver("root", "ann").alerts().log(limit=1)[0].user == "ann"
        with pytest.raises(loom.ScopeError):
            house.weaver("bob", "ann").alerts()
        assert "secret" not in house.audit_path.read_text()
        assert [line["rule"] for line in house.audit(event="commanded", do="set_alert")] == ["crashed"] * 4
    finally:
        house.gateway.close()


@pytest.mark.slow
def test_an_alert_waits_for_the_next_weaver_of_the_gateway(
    gateway: Gateway, weaver: WeaverProxy, receiver: WebhookReceiver
) -> None:
    receiver.answer = status(503)
    rules = weaver.alerts()
    made = rules.add("not_a_number", run="waits", webhook=receiver.url())
    with training(weaver.address(), "waits_0", group="waits"):
        receiver.wait(1)
    before = weaver.status()["weaver"]
    (process,) = gateway.weavers()
    process.kill()
    receiver.answer = status(200)
    await_another(weaver, before)
    await_true(lambda: weaver.alerts().log(made)[0].deliveries[0].state is DeliveryState.SENT)

    assert len({hook.headers["Idempotency-Key"] for hook in receiver.hooks}) == 1
    assert receiver.hooks[0].body == receiver.hooks[-1].body
    weaver.alerts().remove(made)


KILLS, TRAININGS = 50, 3


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.guarantees(
    "weaver",
    "Over 50 kills of the weaver each alert reaches its webhook exactly once, beside dead and failing ones",
)
def test_each_alert_comes_once_over_50_kills_of_the_weaver() -> None:
    chosen, keys = random.Random(11), Counter[str]()
    refused: set[str] = set()

    def moody(hook: Hook, line: socket.socket) -> bytes:
        """Answer late, and refuse some alerts the first time."""
        time.sleep(chosen.uniform(0.0, 0.3))
        key = hook.headers["Idempotency-Key"]
        if key not in refused and chosen.random() < 0.2:
            refused.add(key)
            return b"HTTP/1.1 503 Later\r\n\r\n"
        keys[key] += 1
        return b"HTTP/1.1 200 OK\r\n\r\n"

    def never(hook: Hook, line: socket.socket) -> bytes:
        time.sleep(60)
        return b""

    with receiving() as good, receiving() as dead, running_weaver() as weaver:
        good.answer, dead.answer = moody, never
        weaver.end()
        AlertOperator(networks=("127.0.0.1/32",)).write(weaver.folder)
        weaver.start()
        asks = weaver.gateway()
        for to in (good, dead):
            for rule in ("not_a_number", "crashed"):
                asks.ask("set_alert", rule=rule, webhook=to.url())
        for kill in range(KILLS):
            names = [f"run{kill}x{number}_0" for number in range(TRAININGS)]
            with training(weaver.address, *names, group=f"run{kill}"):
                asks = weaver.gateway()
                await_true(lambda asks=asks, names=names: told(asks, names))  # type: ignore[misc]
                if kill % 2:
                    weaver.end()
                    weaver.start()
            time.sleep(chosen.uniform(0.0, 0.6))
            weaver.end()
            weaver.start()
        asks = weaver.gateway()
        await_true(lambda: len(delivered(asks, "crashed", good)) == KILLS, 120)
        await_true(lambda: len(delivered(asks, "not_a_number", good)) == KILLS, 120)
        runs = {one["id"] for one in asks.ask("runs", limit=1000)}
        for rule in ("crashed", "not_a_number"):
            assert {one["run"] for one in delivered(asks, rule, good)} == runs
        log = asks.ask("alert_log", limit=500)
        assert len(log) == 4 * KILLS  # none was made twice, for either receiver
        sent = {one["id"] for rule in ("crashed", "not_a_number") for one in delivered(asks, rule, good)}

    assert len(runs) == KILLS
    assert keys == dict.fromkeys(sent, 1)
    assert len(refused) > 5
    assert len(dead.hooks) > 5


def told(asks: object, names: list[str]) -> bool:
    """Whether the weaver has a step of each replica."""
    found = {one["id"]: one["step"] for one in asks.ask("replicas")}  # type: ignore[attr-defined]
    return all((found.get(name) or 0) > 3 for name in names)


def delivered(asks: object, rule: str, to: WebhookReceiver) -> list[dict[str, object]]:
    place = f"http://127.0.0.1:{to.port}/…"
    return [
        one
        for one in asks.ask("alert_log", limit=500)  # type: ignore[attr-defined]
        if one["rule"] == rule and [(to["to"], to["state"]) for to in one["deliveries"]] == [(place, "sent")]
    ]
