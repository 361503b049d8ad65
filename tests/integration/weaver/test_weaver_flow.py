"""A learning rate is changed from outside while processes train, through each face of the weaver.

The way that a change takes is the same behind each: the gateway gives the weaver a command, which stores it and
sends it to the threadlets; the training thread applies it at a step boundary, through its handler, to torch's
optimizer; the acknowledgement, with that step, comes back to whoever asked.
"""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from websockets.sync.client import connect

import loom
from loom_proxy.local import LocalCluster
from tests.support.gateways import BOUND
from tests.support.processes import run_loom
from tests.support.weaver_actors import FIRST_RATE, Trainers, weight_after

RATE = 0.125

pytestmark = pytest.mark.timeout(180)


class Applied(NamedTuple):
    """An acknowledgement, as a face shows it."""

    step: int
    old: float
    new: float


def through_rest(cluster: LocalCluster, trainers: Trainers) -> dict[str, Applied]:
    answer = give_command(cluster, trainers.glob, wait=BOUND)

    assert answer["done"]
    assert all(one["ok"] for one in answer["outcomes"].values())
    return {id: applied(one) for id, one in answer["outcomes"].items()}


def through_python(cluster: LocalCluster, trainers: Trainers) -> dict[str, Applied]:
    outcomes = trainers.weaver.update_config(trainers.glob, learning_rate=RATE).get(BOUND)

    assert all(one.ok for one in outcomes.values())
    return {id: Applied(one.step or 0, *one.changes["learning_rate"]) for id, one in outcomes.items()}


def through_the_command_line(cluster: LocalCluster, trainers: Trainers) -> dict[str, Applied]:
    arguments = ["config", "set", f"learning_rate={RATE}", "--replica", trainers.glob, "--json"]
    ended = run_loom(*arguments, env={**os.environ, "LOOM_URL": cluster.url, "LOOM_TOKEN": cluster.token})

    assert ended.returncode == 0, ended.stderr
    outcomes = json.loads(ended.stdout)["outcomes"]
    return {id: Applied(one["step"], *one["changes"]["learning_rate"]) for id, one in outcomes.items()}


def through_the_websocket(cluster: LocalCluster, trainers: Trainers) -> dict[str, Applied]:
    """The command is given over REST; everything that is known of it comes over the socket."""
    headers = {"Authorization": f"Bearer {cluster.token}"}
    with connect(f"{cluster.url}/ws/v1/weaver", additional_headers=headers, max_size=None) as socket:
        snapshot = json.loads(socket.recv(BOUND))
        config = {one["id"]: one["config"] for one in snapshot["replicas"]}
        assert all(config[id]["learning_rate"] == FIRST_RATE for id in trainers.replicas)
        command = give_command(cluster, trainers.glob, wait=0.0)["id"]
        found: dict[str, Applied] = {}
        went_on: set[str] = set()
        while not went_on >= set(trainers.replicas):
            message = json.loads(socket.recv(BOUND))
            event = message.get("event", {})
            if event.get("command") == command and event["kind"] == "applied":
                found[event["replica"]] = applied(event)
            elif message["type"] == "delta":
                steps = {id: one["step"] for id, one in message["replicas"].items()}
                went_on |= {id for id in found if steps.get(id, 0) > found[id].step}
    return found


def applied(one: dict[str, Any]) -> Applied:
    change = one["changes"]["learning_rate"]
    return Applied(one["step"], change["old"], change["new"])


def give_command(cluster: LocalCluster, target: str, wait: float) -> Any:
    order = {"kind": "update_config", "target": target, "params": {"learning_rate": RATE}, "wait": wait}
    request = urllib.request.Request(
        f"{cluster.url.replace('ws:', 'http:')}/api/v1/weaver/commands",
        data=json.dumps(order).encode(),
        headers={"Authorization": f"Bearer {cluster.token}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=2 * BOUND) as response:
        return json.load(response)


@pytest.mark.parametrize(
    "change",
    [
        through_rest,
        pytest.param(through_python, marks=pytest.mark.slow),
        pytest.param(through_the_command_line, marks=pytest.mark.slow),
        pytest.param(through_the_websocket, marks=pytest.mark.slow),
    ],
)
def test_a_learning_rate_is_changed_while_processes_train(
    cluster: LocalCluster, job: loom.Job, change: Callable[[LocalCluster, Trainers], dict[str, Applied]]
) -> None:
    trainers = Trainers(job, "tuned")

    answers = change(cluster, trainers)
    configs = {id: trainers.weaver.replica(id).config for id in trainers.replicas}
    events = {id: list(trainers.weaver.events(after=0, replica=id)) for id in trainers.replicas}
    trained = trainers.stop()

    assert set(answers) == set(trainers.replicas)
    for id, answer in answers.items():
        # The handler was called once, at the step that is acknowledged.
        assert answer == (answer.step, FIRST_RATE, RATE)
        assert trained[id].calls == [(answer.step, RATE)]
        # The optimizer goes by it from there on: that step, where it came before it, or the one after.
        (first, _), (changed, rate) = trained[id].rates
        assert (first, rate) == (0, RATE)
        assert changed - answer.step in (0, 1)
        assert trained[id].weight == weight_after(trained[id])
        # The weaver knows.
        assert configs[id]["learning_rate"] == RATE
        (event,) = [event for event in events[id] if event.kind == "applied"]
        assert event.data["step"] == answer.step
