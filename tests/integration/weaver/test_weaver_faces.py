"""Change a learning rate from outside while processes train, and see it applied: each face of the weaver."""

from __future__ import annotations

import asyncio
import json
import math
import os
import queue
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.sync.client import connect as websocket_connect

import loom
from loom.control.commands import Acknowledgement, Change
from loom.weaver.views import Delta, Snapshot, WeaverEvent, WeaverUpdate
from loom_proxy.local import LocalCluster
from loom_proxy.weaver.client import WeaverProxy
from tests.support.gateways import BOUND, await_true
from tests.support.processes import LOOM, read_json, run_loom, start
from tests.support.weaver_training import Training, training
from tests.support.weavers import await_weaver


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(1) as running:
        yield running


@pytest.fixture(scope="module")
def weaver(cluster: LocalCluster) -> WeaverProxy:
    return WeaverProxy(cluster.url, cluster.token)


@pytest.fixture(scope="module")
def address(weaver: WeaverProxy) -> str:
    return await_weaver(weaver)


@pytest.fixture
def trainers(weaver: WeaverProxy, address: str) -> Iterator[list[Training]]:
    """Two processes that train."""
    with training(address, "train_0", "train_1") as processes:
        await_true(lambda: states(weaver, "train_0", "train_1") == ["running", "running"])
        yield processes


def states(weaver: WeaverProxy, *ids: str) -> list[str]:
    replicas = weaver.replicas()
    return [replicas[id].state for id in ids if id in replicas and replicas[id].connected]


def rest(cluster: LocalCluster, path: str, body: Any = None) -> Any:
    """The answer to a request, as any program would make it."""
    request = urllib.request.Request(
        f"{cluster.url.replace('ws:', 'http:')}/api/v1/weaver{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {cluster.token}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=BOUND) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        return {"status": error.code, **json.load(error)}


@pytest.fixture
def environment(cluster: LocalCluster) -> dict[str, str]:
    return {**os.environ, "LOOM_URL": cluster.url, "LOOM_TOKEN": cluster.token, "COLUMNS": "200"}


# -- the flow, through each face --------------------------------------------------------------------------------


def test_the_learning_rate_over_rest(cluster: LocalCluster, trainers: list[Training]) -> None:
    order = {
        "kind": "update_config",
        "target": "train_*",
        "params": {"learning_rate": 0.002},
        "wait": 10,
    }

    answer = rest(cluster, "/commands", order)

    applied = [trainer.learning_rate() for trainer in trainers]
    assert answer["done"]
    for id, (rate, _) in zip(("train_0", "train_1"), applied, strict=True):
        outcome = answer["outcomes"][id]
        assert (outcome["ok"], rate) == (True, 0.002)
        assert outcome["changes"] == {"learning_rate": {"old": 0.1, "new": 0.002}}
    assert [answer["outcomes"][id]["step"] for id in ("train_0", "train_1")] == [step for _, step in applied]
    assert rest(cluster, f"/commands/{answer['id']}") == answer


def test_the_learning_rate_in_python(weaver: WeaverProxy, trainers: list[Training]) -> None:
    command = weaver.update_config("trainers", learning_rate=0.002)

    outcomes = command.get(BOUND)

    assert command.done()
    assert set(command.replicas) == {"train_0", "train_1"}
    for id, trainer in zip(("train_0", "train_1"), trainers, strict=True):
        rate, step = trainer.learning_rate()
        assert rate == 0.002
        assert outcomes[id] == Acknowledgement(True, step, {"learning_rate": Change(0.1, 0.002)})
    assert weaver.replica("train_0").config["learning_rate"] == 0.002


def test_the_learning_rate_on_the_command_line(environment: dict[str, str], trainers: list[Training]) -> None:
    arguments = ["config", "set", "learning_rate=0.002", "--replica", "train_*"]

    ended = run_loom(*arguments, env=environment)

    assert ended.returncode == 0, ended.stderr
    for id, trainer in zip(("train_0", "train_1"), trainers, strict=True):
        rate, step = trainer.learning_rate()
        assert rate == 0.002
        (line,) = [line for line in ended.stdout.splitlines() if id in line]
        cells = [cell.strip() for cell in line.strip("│ ").split("│")]
        assert cells == [id, "applied", str(step), "learning_rate: 0.1 → 0.002"]


def test_the_learning_rate_seen_through_the_websocket(cluster: LocalCluster, trainers: list[Training]) -> None:
    headers = {"Authorization": f"Bearer {cluster.token}"}
    with websocket_connect(f"{cluster.url}/ws/v1/weaver", additional_headers=headers) as socket:
        snapshot = json.loads(socket.recv(BOUND))
        assert snapshot["type"] == "snapshot"
        there = {one["id"]: one for one in snapshot["replicas"]}
        assert there["train_0"]["config"]["learning_rate"] == 0.1

        order = {"kind": "update_config", "target": "train_0", "params": {"learning_rate": 0.002}}
        command = rest(cluster, "/commands", order)["id"]

        kinds = []
        while True:
            message = json.loads(socket.recv(BOUND))
            if message["type"] == "event" and message["event"].get("command") == command:
                kinds.append(message["event"]["kind"])
                if kinds[-1] == "applied":
                    break
    applied = message["event"]
    assert kinds == ["command", "applied"]
    assert (0.002, applied["step"]) == trainers[0].learning_rate()
    assert applied["changes"] == {"learning_rate": {"old": 0.1, "new": 0.002}}


# -- commands ---------------------------------------------------------------------------------------------------


def test_each_replica_says_what_it_refuses(weaver: WeaverProxy, trainers: list[Training]) -> None:
    assert len(trainers) == 2
    refused = weaver.update_config("train_0", learning_rate=-1).get(BOUND)["train_0"]
    unknown = weaver.update_config(["train_1", "nobody"], momentum=0.9).get(BOUND)

    assert not refused.ok
    assert "larger than 0" in refused.refused["learning_rate"]
    assert "learning_rate" in unknown["train_1"].refused["momentum"]
    assert "no replica named" in (unknown["nobody"].reason or "")


def test_a_command_to_nobody_is_done_and_its_outcome_is_empty(weaver: WeaverProxy) -> None:
    command = weaver.pause("no-such-*")

    assert command.done()
    assert command.get(0) == {}


def test_a_replica_that_does_not_answer_is_waited_for(weaver: WeaverProxy, trainers: list[Training]) -> None:
    os.kill(trainers[0].pid, signal.SIGSTOP)
    try:
        command = weaver.update_config("train_*", learning_rate=0.3)
        with pytest.raises(loom.WaitTimeout, match="train_0"):
            command.get(0.2)
        assert command.outcomes()["train_0"].waiting
    finally:
        os.kill(trainers[0].pid, signal.SIGCONT)

    again = weaver.command_of(command.id)
    assert all(one.ok for one in again.get(BOUND).values())
    assert command.get(BOUND) == again.get(0)


def test_pause_resume_and_stop(weaver: WeaverProxy, trainers: list[Training]) -> None:
    assert all(one.ok for one in weaver.pause().get(BOUND).values())
    assert states(weaver, "train_0", "train_1") == ["paused", "paused"]
    weaver.resume("train_1").get(BOUND)
    assert states(weaver, "train_0", "train_1") == ["paused", "running"]

    weaver.stop("train_*").get(BOUND)

    assert [trainer.process.wait(BOUND) for trainer in trainers] == [0, 0]
    await_true(lambda: {weaver.replica(id).state for id in ("train_0", "train_1")} == {"finished"})
    assert "finished" in (weaver.pause("train_0").get(BOUND)["train_0"].reason or "")


@pytest.mark.slow
def test_save_and_evaluate(
    cluster: LocalCluster, weaver: WeaverProxy, environment: dict[str, str], trainers: list[Training]
) -> None:
    saved = weaver.save("train_0").get(BOUND)
    assert saved == {"train_0": Acknowledgement(True, trainers[0].saved())}
    over_rest = rest(cluster, "/commands", {"kind": "save", "target": "train_*", "wait": BOUND})
    assert {id: made["step"] for id, made in over_rest["outcomes"].items()} == {
        "train_0": trainers[0].saved(),
        "train_1": trainers[1].saved(),
    }
    in_a_shell = run_loom("save", "--replica", "train_1", "--json", env=environment)
    assert in_a_shell.returncode == 0, in_a_shell.stderr
    assert json.loads(in_a_shell.stdout)["outcomes"]["train_1"]["step"] == trainers[1].saved()

    evaluated = weaver.evaluate("trainers").get(BOUND)

    assert not any(made.ok for made in evaluated.values())
    assert "nothing here evaluates" in str(evaluated["train_0"].reason)
    in_a_shell = run_loom("evaluate", env=environment)
    assert in_a_shell.returncode == 1
    assert "nothing here evaluates" in in_a_shell.stdout


async def test_coroutines_await_the_same(weaver: WeaverProxy, trainers: list[Training]) -> None:
    assert len(trainers) == 2
    both, one = await asyncio.gather(
        weaver.aio.update_config(learning_rate=0.2), weaver.update_config("train_1", learning_rate=0.3)
    )

    assert {id: ack.ok for id, ack in both.items()} == {"train_0": True, "train_1": True}
    assert list(one) == ["train_1"]
    assert set(await weaver.aio.replicas()) >= {"train_0", "train_1"}
    assert (await weaver.aio.replica("train_0")).group == "trainers"
    with pytest.raises(loom.UnknownReplica, match="nobody"):
        await weaver.aio.stacks("nobody")


# -- looking ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_job_knows_its_weaver(cluster: LocalCluster, trainers: list[Training]) -> None:
    assert len(trainers) == 2
    with loom.connect(cluster.url, cluster.token) as job:
        assert job.weaver.status()["replicas"]["running"] == 2


def test_values_that_are_no_numbers_come_through(
    cluster: LocalCluster, weaver: WeaverProxy, trainers: list[Training]
) -> None:
    assert len(trainers) == 2
    await_true(lambda: "grad/norm" in weaver.metrics("train_0"))

    history = weaver.history("train_0", "grad/norm", points=5)

    assert history
    assert all(math.isnan(point.value) for point in history)
    assert rest(cluster, "/replicas/train_0/metrics/grad/norm?points=1")["points"][0][2] == "NaN"


def test_the_history_of_a_metric(weaver: WeaverProxy, trainers: list[Training]) -> None:
    assert len(trainers) == 2
    began = weaver.replica("train_0").registered
    await_true(lambda: "loss" in weaver.metrics("train_0"))
    await_true(lambda: len(weaver.history("train_0", "loss", since=began)) > 10)

    history = weaver.history("train_0", "loss", since=began)
    middle = history[5].time

    assert [point.step for point in history] == sorted(point.step or 0 for point in history)
    assert all(point.time >= middle for point in weaver.history("train_0", "loss", since=middle))
    assert len(weaver.history("train_0", "loss", points=3)) <= 3
    with pytest.raises(loom.WrongArguments, match="it reports grad/norm, loss"):
        weaver.history("train_0", "accuracy")


def metrics_of_train_0(update: WeaverUpdate) -> dict[str, float]:
    """What a delta tells of them; it may come before the replica has reported any."""
    replica = update.replicas.get("train_0", {}) if isinstance(update, Delta) else {}
    return dict(replica.get("metrics") or {})


def test_watching_sees_steps_and_what_happens(weaver: WeaverProxy, trainers: list[Training]) -> None:
    assert len(trainers) == 2
    seen: list[Any] = []
    for update in weaver.watch(timeout=BOUND):
        seen.append(update)
        if len(seen) == 1:
            weaver.pause("train_1")
        kinds = {one.kind for one in seen if isinstance(one, WeaverEvent)}
        if "paused" in kinds and any(map(metrics_of_train_0, seen)):
            break

    assert isinstance(seen[0], Snapshot)
    assert seen[0].replicas["train_0"].state == "running"
    told = next(filter(None, map(metrics_of_train_0, seen)))
    assert math.isnan(told["grad/norm"])


def test_watching_stops_after_a_silence(weaver: WeaverProxy) -> None:
    updates = weaver.watch(timeout=0.3)

    assert isinstance(next(updates), Snapshot)
    for update in updates:
        assert not isinstance(update, Snapshot)


def test_events_are_followed_from_the_newest_on(weaver: WeaverProxy) -> None:
    weaver.set_policy("a-group", "pause")
    followed = weaver.events(follow=True, limit=1)
    first = next(followed)
    weaver.set_policy("a-group", "notify")
    weaver.set_policy("another", "stop")

    news = [next(followed), next(followed)]

    assert [(one.id, one.data["group"]) for one in (first, *news)] == [
        (first.id, "a-group"),
        (first.id + 1, "a-group"),
        (first.id + 2, "another"),
    ]
    assert [one.id for one in weaver.events(after=first.id)] == [one.id for one in news]
    assert [one.id for one in weaver.events(after=first.id, kind="weaver_started")] == []


async def test_events_are_followed_by_coroutines(weaver: WeaverProxy) -> None:
    followed = weaver.aio.events(follow=True, limit=1)
    first = await anext(followed)
    weaver.set_policy("a-third", "stop")

    news = await asyncio.wait_for(anext(followed), BOUND)

    assert (news.id, news.data["group"]) == (first.id + 1, "a-third")
    async for update in weaver.aio.watch():
        assert isinstance(update, Snapshot)
        break


def test_stacks_show_where_a_replica_is(weaver: WeaverProxy, trainers: list[Training]) -> None:
    assert len(trainers) == 2

    assert "train" in weaver.stacks("train_0")


# -- devices ----------------------------------------------------------------------------------------------------


def test_a_failed_device_is_looked_up_and_its_replicas_stopped(
    weaver: WeaverProxy, trainers: list[Training]
) -> None:
    (device,) = weaver.replica("train_0").devices
    assert set(weaver.devices()[device].replicas) >= {"train_0", "train_1"}
    weaver.set_policy("trainers", "stop")
    try:
        event = weaver.report_device_failure(device, "an ECC error")
    finally:
        weaver.set_policy("trainers", "notify")

    assert event.data["reason"] == "an ECC error"
    chain = {one["replica"]: one["action"] for one in event.data["replicas"]}
    assert (chain["train_0"], chain["train_1"]) == ("stop", "stop")
    assert [trainer.process.wait(BOUND) for trainer in trainers] == [0, 0]
    assert weaver.devices()[device].state == "failed"
    weaver.reactivate(device).get(BOUND)
    assert weaver.devices()[device].state == "active"


def test_who_can_put_a_replica_elsewhere_is_called(weaver: WeaverProxy, trainers: list[Training]) -> None:
    assert len(trainers) == 2
    (device,) = weaver.replica("train_0").devices
    wanted: queue.Queue[WeaverEvent] = queue.Queue()

    def respawn(event: WeaverEvent) -> None:
        wanted.put(event)
        raise RuntimeError("which is logged, and no more")

    remove = weaver.on_respawn(respawn)
    weaver.set_policy("trainers", "respawn")
    try:
        weaver.report_device_failure(device, "an ECC error")
        events = [wanted.get(timeout=BOUND), wanted.get(timeout=BOUND)]
    finally:
        weaver.set_policy("trainers", "notify")
        weaver.reactivate(device).get(BOUND)

    assert {event.replica for event in events} == {"train_0", "train_1"}
    assert {event.data["device"] for event in events} == {device}
    remove()
    assert wanted.empty()


# -- what makes no sense ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/replicas/nobody", None, 404, "unknown_replica"),
        ("/replicas/nobody/metrics", None, 404, "unknown_replica"),
        ("/replicas/nobody/stacks", None, 404, "unknown_replica"),
        ("/devices/none/failure", {}, 404, "unknown_device"),
        ("/commands/none", None, 404, "unknown_command"),
        ("/events?limit=many", None, 422, "wrong_arguments"),
        ("/events?after=-1", None, 422, "wrong_arguments"),
        ("/commands", {"kind": "dance"}, 422, "wrong_arguments"),
        ("/commands", {"kind": "update_config"}, 422, "wrong_arguments"),
        ("/commands", {"kind": "pause", "wait": 1e9}, 422, "wrong_arguments"),
        ("/commands", {"kind": "update_config", "params": {"a": 1 << 80}}, 422, "wrong_arguments"),
        ("/commands", {"kind": "pause", "targets": "train_0"}, 422, "wrong_arguments"),
        ("/policies", {"group": "g", "action": "dance"}, 422, "wrong_arguments"),
        ("/policies", "not an object", 422, "wrong_arguments"),
    ],
)
def test_what_makes_no_sense_is_refused(
    cluster: LocalCluster, path: str, body: Any, status: int, code: str
) -> None:
    answer = rest(cluster, path, body)

    assert (answer["status"], answer["error"]["code"]) == (status, code)


def test_python_raises_what_it_is(weaver: WeaverProxy) -> None:
    with pytest.raises(loom.UnknownReplica, match='no replica named "nobody"'):
        weaver.replica("nobody")
    with pytest.raises(loom.UnknownDevice, match="none"):
        weaver.report_device_failure("none")
    with pytest.raises(loom.UnknownCommand, match="none"):
        weaver.command_of("none")
    with pytest.raises(loom.WrongArguments, match="JSON"):
        weaver.update_config(learning_rate=float("inf"))
    with pytest.raises(ValueError, match="timeout"):
        weaver.pause("no-such-*").get(-1)


# -- the command line -------------------------------------------------------------------------------------------


def test_the_commands_show_replicas(environment: dict[str, str], trainers: list[Training]) -> None:
    assert len(trainers) == 2
    status = run_loom("status", env=environment).stdout
    as_json = json.loads(run_loom("status", "--json", env=environment).stdout)
    devices = run_loom("devices", env=environment).stdout

    assert "train_0" in status
    assert "running" in status
    assert {one["id"] for one in as_json["replicas"]} >= {"train_0", "train_1"}
    assert "train_0" in devices


def test_goodput_through_each_face(
    cluster: LocalCluster, weaver: WeaverProxy, environment: dict[str, str], trainers: list[Training]
) -> None:
    assert len(trainers) == 2
    await_true(lambda: weaver.goodput("trainers")["trainers"].seconds["compute"] > 0.5)

    record = weaver.goodput()["trainers"]
    (job,) = rest(cluster, "/goodput?job=trainers")["jobs"]
    status = run_loom("status", env=environment).stdout
    as_json = json.loads(run_loom("status", "--json", env=environment).stdout)

    assert {one.job for one in weaver.replicas().values() if one.connected} == {"trainers"}
    assert record.ratio == pytest.approx(record.share("compute"))
    assert record.course[-1].time == record.until
    assert job["seconds"].keys() == record.seconds.keys()
    assert job["seconds"]["compute"] >= record.seconds["compute"]
    assert "goodput of trainers: " in status
    assert "trainers" in [one["job"] for one in as_json["goodput"]]
    assert asyncio.run(weaver.aio.goodput("no such job")) == {}


def test_a_refusal_is_exit_code_1(environment: dict[str, str], trainers: list[Training]) -> None:
    assert len(trainers) == 2
    refused = run_loom("config", "set", "learning_rate=-1", env=environment)
    nobody = run_loom("pause", "--replica", "no-such-*", env=environment)
    nonsense = run_loom("config", "set", "learning_rate", env=environment)
    unknown = run_loom("stacks", "nobody", env=environment)

    assert (refused.returncode, nobody.returncode, nonsense.returncode, unknown.returncode) == (1, 1, 2, 9)
    assert "larger than 0" in refused.stdout
    assert "no replica" in nobody.stderr
    assert "KEY=VALUE" in nonsense.stderr


def test_a_metric_is_drawn(environment: dict[str, str], weaver: WeaverProxy, trainers: list[Training]) -> None:
    assert len(trainers) == 2
    await_true(lambda: "loss" in weaver.metrics("train_0") and len(weaver.history("train_0", "loss")) > 20)

    drawn = run_loom("metrics", "train_0", "loss", "--plot", env=environment).stdout
    listed = run_loom("metrics", "train_0", env=environment).stdout
    points = json.loads(run_loom("metrics", "train_0", "loss", "--json", env=environment).stdout)

    assert "loss of train_0" in drawn
    assert any("\u2801" <= character <= "\u28ff" for character in drawn)
    assert "grad/norm" in listed
    assert len(points["points"]) > 20


def test_events_are_followed_on_the_command_line(environment: dict[str, str], weaver: WeaverProxy) -> None:
    last = max((event.id for event in weaver.events(limit=1)), default=0)
    weaver.set_policy("before", "stop")
    process = start("-c", LOOM, "events", "--follow", "--json", "--after", f"{last}", env=environment)
    try:
        await_true(lambda: read_json(process).get("group") == "before")  # a replica may have ended meanwhile
        weaver.set_policy("after", "stop")
        await_true(lambda: read_json(process).get("group") == "after")
        process.send_signal(signal.SIGINT)
        assert process.wait(BOUND) == 0
    finally:
        process.kill()
        process.communicate()


def test_the_newest_events_are_listed_on_the_command_line(environment: dict[str, str], weaver: WeaverProxy) -> None:
    weaver.set_policy("newest", "stop")
    ended = run_loom("events", "--json", "--kind", "policy", "--limit", "1", env=environment)
    assert ended.returncode == 0, ended.stderr
    (line,) = ended.stdout.splitlines()
    assert json.loads(line)["group"] == "newest"


def test_watch_draws_what_there_is(environment: dict[str, str], trainers: list[Training]) -> None:
    assert len(trainers) == 2
    process = start("-c", LOOM, "watch", "--json", env=environment)
    try:
        assert read_json(process)["type"] == "snapshot"
        process.send_signal(signal.SIGINT)
        assert process.wait(BOUND) == 0
    finally:
        process.kill()
        process.communicate()
