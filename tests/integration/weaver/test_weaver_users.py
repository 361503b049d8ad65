"""Two users of one gateway whose replicas have the same names, and an admin, over REST and on the command line."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest

import loom
from loom.control.address import parse_weaver_address
from loom_proxy.local import LocalCluster
from loom_proxy.weaver.client import WeaverProxy
from tests.support.gateways import BOUND, TOKEN, await_true, gateway_of
from tests.support.processes import LOOM, run, run_loom
from tests.support.users import House
from tests.support.weaver_training import training
from tests.support.weavers import await_weaver
from tests.unit.loom.weaver.raw_threadlet import RawThreadlet

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def house(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    made = House(list(cluster.workers), tmp_path_factory.mktemp("users"), "--injectable")
    yield made
    made.gateway.close()


@pytest.mark.guarantees("weaver", "Only an admin names another user, over REST and on the command line")
def test_two_users_with_a_group_of_one_name_never_touch_each_other(house: House) -> None:
    await_weaver(house.weaver("ann"))
    ann, bob, root = (house.weaver(user) for user in ("ann", "bob", "root"))
    with training(ann.address(), "train_0", group="train"), training(bob.address(), "train_0", group="train"):
        await_true(lambda: all("train_0" in user.replicas() for user in (ann, bob)))
        taken = ann.update_config("*", learning_rate=0.25).get(BOUND)

        assert set(taken) == {"train_0"}
        assert ann.replica("train_0").config["learning_rate"] == 0.25
        assert bob.replica("train_0").config.get("learning_rate") != 0.25
        assert not list(bob.events(kind="command"))
        assert root.replicas() == {}
        assert house.weaver("root", "bob").replica("train_0").user == "bob"
        assert {"ann/train_0", "bob/train_0"} <= set(house.weaver("root", "*").replicas())
        with pytest.raises(loom.ScopeError, match="to name another user needs a token of scope admin"):
            house.weaver("bob", "ann").replicas()
        with pytest.raises(loom.NotFound, match="knows no user 'nobody'"):
            house.weaver("root", "nobody").replicas()


def test_the_command_line_names_another_user_for_an_admin(house: House) -> None:
    await_weaver(house.weaver("ann"))
    ann = house.weaver("ann")
    environment = {**os.environ, "LOOM_URL": house.url, "LOOM_TOKEN": house.tokens["root"]}
    with training(ann.address(), "cli_0"):
        await_true(lambda: "cli_0" in ann.replicas())

        shown = run_loom("devices", "--user", "ann", "--json", env=environment)
        paused = run_loom("pause", "--replica", "cli_0", "--user", "ann", env=environment)

    assert "cli_0" in [one for device in json.loads(shown.stdout)["devices"] for one in device["replicas"]]
    assert paused.returncode == 0, paused.stderr


def test_an_admin_injects_into_another_users_replicas(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOM_INJECTABLE", "1")
    await_weaver(house.weaver("ann"))
    ann = house.weaver("ann")
    environment = {**os.environ, "LOOM_URL": house.url, "LOOM_TOKEN": house.tokens["root"]}
    inject = ["-c", LOOM, "inject", "once", "sigkill", "--replica", "struck_0"]
    with training(ann.address(), "struck_0") as (trained,):
        await_true(lambda: "struck_0" in ann.replicas())

        of_own = run(*inject, env=environment)
        of_ann = run(*inject, "--user", "ann", env=environment)

        assert of_own.returncode != 0
        assert of_ann.returncode == 0, of_ann.stderr
        assert trained.process.wait(BOUND) == -signal.SIGKILL


@pytest.mark.guarantees("weaver", "Faults of the gateway, the weaver and other users' drivers need an admin")
@pytest.mark.slow
def test_faults_that_strike_all_users_need_an_admin(house: House) -> None:
    await_weaver(house.weaver("ann"))
    with house.connect("ann") as job:
        for fault in ("dead_gateway", "dead_weaver"):
            with pytest.raises(loom.ScopeError, match="strikes all users"):
                house.weaver("bob").inject(fault, "*")
        with pytest.raises(loom.UnknownSession):
            house.weaver("bob").inject("dead_driver", job.session)
        assert job.run(len, "ab") == 2


def test_what_a_session_commands_is_in_the_audit(house: House) -> None:
    with house.connect("ann") as job:
        await_weaver(house.weaver("ann"))
        job.weaver.pause("nobody-*")

        await_true(lambda: bool(house.audit(operation="command")))
        (line,) = house.audit(operation="command")

        assert (line["user"], line["session"], line["kind"]) == ("ann", job.session, "pause")


def test_the_numbers_of_another_user_are_not_in_ones_metrics(house: House) -> None:
    await_weaver(house.weaver("ann"))
    ann = house.weaver("ann")
    with training(ann.address(), "counted_0"), house.connect("ann") as job:
        await_true(lambda: "counted_0" in house.answer("ann", "GET", "/metrics", None)[1])
        seen = {user: house.answer(user, "GET", "/metrics", None)[1] for user in ("ann", "bob", "root")}

    assert "counted_0" in seen["root"]
    assert job.session in seen["root"]
    assert "counted_0" not in seen["bob"]
    assert job.session not in seen["bob"]
    assert 'user="ann"' not in seen["bob"]


@pytest.mark.guarantees("weaver", "A secret that was removed makes every key void")
def test_a_secret_that_is_removed_makes_the_keys_void_also_of_a_weaver_that_lives(cluster: LocalCluster) -> None:
    with gateway_of(cluster) as gateway:
        weaver = WeaverProxy(gateway.url, TOKEN)
        await_weaver(weaver)
        before = parse_weaver_address(weaver.address())
        gateway.end()
        (gateway.state / "weaver" / "secret").unlink()
        gateway.start()
        weaver = WeaverProxy(gateway.url, TOKEN)
        await_weaver(weaver)

        after = parse_weaver_address(weaver.address())

        assert after.key != before.key
        assert "authentication" in RawThreadlet(str(after._replace(key=before.key))).receive()
        RawThreadlet(str(after)).welcome()
