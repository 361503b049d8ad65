"""Injecting through a gateway: who may, into what, what is told of it, and Loom's own pieces."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import loom
from loom.token_file import TokenFile
from loom_proxy.local import LocalCluster
from loom_proxy.weaver.client import WeaverProxy
from tests.support.actors import Counter
from tests.support.gateways import BOUND, TOKEN, Gateway, await_true, gateway_of
from tests.support.processes import still_there
from tests.support.weaver_training import training, weaver_address
from tests.support.weavers import await_another, await_weaver


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inject")


@pytest.fixture(scope="module")
def gateway(cluster: LocalCluster, folder: Path) -> Iterator[Gateway]:
    options = ["--injectable", "--tokens", str(folder / "tokens.json"), "--audit", str(folder / "audit")]
    with gateway_of(cluster, *options) as running:
        await_weaver(WeaverProxy(running.url, TOKEN))
        yield running


@pytest.fixture
def weaver(gateway: Gateway) -> WeaverProxy:
    return WeaverProxy(gateway.url, TOKEN)


@pytest.fixture
def injectable(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """What is started in this test is injectable."""
    monkeypatch.setenv("LOOM_INJECTABLE", "1")
    monkeypatch.setenv("LOOM_CHAOS_DIR", str(folder / "agents"))


def trains(weaver: WeaverProxy, *replicas: str) -> None:
    await_true(lambda: all((found := weaver.replicas().get(one)) and found.step for one in replicas))


def test_a_fault_strikes_and_is_told_with_its_evidence(weaver: WeaverProxy, injectable: None) -> None:
    with training(weaver.address(), "struck_0", "struck_1") as (struck, other):
        trains(weaver, "struck_0", "struck_1")
        assert weaver.replica("struck_0").injectable

        injection = weaver.inject("sigkill", "struck_0")

        assert injection.get(BOUND)["struck_0"].evidence == {"pid": struck.pid}
        assert injection.evidence == {"struck_0": {"pid": struck.pid}}
        assert struck.process.wait(BOUND) == -9
        await_true(lambda: weaver.replica("struck_0").state == "failed")
        assert other.process.poll() is None
        (event,) = [one for one in weaver.events(replica="struck_0") if one.kind == "applied"]
        assert event.data["do"] == "inject"
        assert event.data["evidence"] == {"pid": struck.pid}


def test_a_fault_is_removed_by_another_process_of_the_host(weaver: WeaverProxy, injectable: None) -> None:
    with training(weaver.address(), "held_0", "held_1") as (held, _):
        trains(weaver, "held_0", "held_1")
        injection = weaver.inject("sigstop", "held_0", 600.0)
        process = psutil.Process(held.pid)
        await_true(lambda: process.status() == psutil.STATUS_STOPPED)

        removal = injection.remove()

        await_true(lambda: process.status() != psutil.STATUS_STOPPED)
        assert any(one.ok for one in removal.get(BOUND).values())
        await_true(lambda: any(one.kind == "fault_removed" for one in weaver.events(replica="held_0")))


def test_what_is_not_marked_is_not_struck(weaver: WeaverProxy) -> None:
    with training(weaver.address(), "safe_0") as (safe,):
        trains(weaver, "safe_0")

        with pytest.raises(loom.errors.NotInjectable, match=r"not marked as injectable: safe_0\. Spawn them on"):
            weaver.inject("sigkill", "safe_*")

        assert safe.process.poll() is None
        assert not weaver.replica("safe_0").injectable


@pytest.mark.parametrize(
    ("fault", "target", "more", "error", "match"),
    [
        ("sigkil", "*", {}, loom.errors.WrongArguments, "no fault 'sigkil'; did you mean sigkill"),
        ("sigkill", "nobody-*", {}, loom.errors.UnknownReplica, "no replica that lives is named by 'nobody-"),
        ("sigkill", "nobody", {}, loom.errors.UnknownReplica, 'no replica named "nobody"'),
        ("sigkill", "*", {"duration": 3.0}, loom.errors.WrongArguments, "sigkill is over at once"),
        (
            "slow_rank",
            "*",
            {"params": {"pace": 1}},
            loom.errors.WrongArguments,
            "no parameter 'pace'; it has seconds",
        ),
        ("dead_driver", "none", {}, loom.errors.UnknownSession, "none"),
    ],
)
def test_what_makes_no_sense_is_refused(
    weaver: WeaverProxy, fault: str, target: str, more: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        weaver.inject(fault, target, **more)


def test_it_needs_a_token_of_scope_operate_and_is_audited(gateway: Gateway, folder: Path) -> None:
    tokens = TokenFile(folder / "tokens.json")
    viewer, operator = (tokens.create(f"a {scope}", scope, user="admin") for scope in ("view", "operate"))

    with pytest.raises(loom.ScopeError, match="operate"):
        WeaverProxy(gateway.url, viewer[1]).inject("sigkill", "*")
    with pytest.raises(loom.errors.UnknownReplica):
        WeaverProxy(gateway.url, operator[1]).inject("sigkill", "nobody-*")

    lines = [json.loads(line) for line in (folder / "audit").read_text().splitlines()]
    (line,) = [one for one in lines if one["event"] == "injected" and one["token"] == operator[0].id]
    assert (line["fault"], line["target"], line["status"]) == ("sigkill", "nobody-*", 404)


def test_a_fault_is_no_command_that_everybody_may_give(gateway: Gateway) -> None:
    with pytest.raises(loom.errors.WrongArguments, match="kind"):
        WeaverProxy(gateway.url, TOKEN).command("inject", {"fault": "sigkill"}, "*")


def test_a_weaver_that_is_killed_is_followed_by_another(gateway: Gateway, weaver: WeaverProxy) -> None:
    before = weaver.status()["weaver"]
    (process,) = gateway.weavers()

    evidence = weaver.inject("dead_weaver", "*").evidence[""]

    assert evidence["how"] == "was killed by SIGKILL"
    assert not process.is_running()

    await_another(weaver, before)


def test_a_driver_that_is_killed_ends_its_session(gateway: Gateway, weaver: WeaverProxy) -> None:
    with gateway.connect() as job:
        weaver.inject("dead_driver", job.session)

        with pytest.raises(loom.SessionLost):
            job.hosts.spawn_procs().spawn("counters", Counter).add.call(1).get(BOUND)
    assert gateway.ended(job.session)["exit_code"] == -9


@pytest.mark.slow
def test_a_gateway_that_is_killed_is_gone_and_its_weaver_goes_on(cluster: LocalCluster) -> None:
    with gateway_of(cluster, "--injectable") as gateway:
        weaver = WeaverProxy(gateway.url, TOKEN)
        await_weaver(weaver)
        before = weaver.status()["weaver"]

        pid = weaver.inject("dead_gateway", "*").evidence[""]["pid"]

        assert still_there([psutil.Process(pid)] if psutil.pid_exists(pid) else []) == []
        gateway.start()
        await_weaver(weaver)
        assert weaver.status()["weaver"] == before


def test_pieces_of_a_gateway_that_is_not_marked_are_not_struck(cluster: LocalCluster) -> None:
    await_true(lambda: bool(weaver_address(cluster.pids[0])))

    with pytest.raises(loom.errors.NotInjectable, match="--injectable"):
        WeaverProxy(cluster.url, cluster.token).inject("dead_weaver", "*")


def test_processes_are_marked_when_they_are_spawned(job: loom.Job) -> None:
    procs = job.hosts.as_injectable().spawn_procs(name="marked").spawn("asked", Asked)
    plain = job.hosts.spawn_procs(name="plain").spawn("asked", Asked)

    assert list(procs.environment.call("LOOM_INJECTABLE").get(BOUND).values()) == ["1", "1"]
    assert list(plain.environment.call("LOOM_INJECTABLE").get(BOUND).values()) == [None, None]


class Asked(loom.Actor):
    """Tells what is in its environment."""

    @loom.endpoint
    def environment(self, name: str) -> str | None:
        return os.environ.get(name)
