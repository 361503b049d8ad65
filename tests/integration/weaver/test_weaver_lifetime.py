"""The weaver is there while its gateway is, is started again when it dies, and is found by the next gateway."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

import loom
from loom.weaver.views import Away, Snapshot
from loom_gateway.sessions.state_dir import DriverFiles
from loom_gateway.weaver_process import WeaverSupervisor
from loom_gateway.workers.sources import WorkerList
from loom_proxy.local import LocalCluster
from loom_proxy.weaver.client import WeaverProxy
from loom_proxy.weaver.command import CommandProxy
from tests.support.gateways import BOUND, TOKEN, Gateway, await_end, await_true, gateway_of
from tests.support.processes import read_json, start
from tests.support.weaver_training import training, weaver_address, weavers
from tests.support.weavers import await_weaver

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def gateway(cluster: LocalCluster) -> Iterator[Gateway]:
    with gateway_of(cluster) as running:
        yield running


def weaver_of(gateway: Gateway) -> WeaverProxy:
    weaver = WeaverProxy(gateway.url, TOKEN)
    await_weaver(weaver)
    return weaver


def weaver_pid(gateway: Gateway) -> int:
    return DriverFiles(str(gateway.state / "weaver" / "weaver")).read_record().pid


# -- one that dies ----------------------------------------------------------------------------------------------


def test_a_weaver_that_is_killed_is_started_again_and_found_by_its_replicas(gateway: Gateway) -> None:
    weaver = weaver_of(gateway)
    with training(weaver.address(), "train_0") as (trainer,):
        await_true(lambda: "train_0" in weaver.replicas())
        weaver.update_config(learning_rate=0.2).get(BOUND)
        assert trainer.learning_rate()[0] == 0.2
        before, instance = weaver.address(), weaver.status()["weaver"]

        os.kill(weaver_pid(gateway), signal.SIGKILL)

        assert weaver.status()["weaver"] != instance  # a question waits for the next one
        assert weaver.address() == before
        assert weaver.replica("train_0").config["learning_rate"] == 0.2
        assert weaver.update_config("train_0", learning_rate=0.3).get(BOUND)["train_0"].ok
        assert trainer.learning_rate()[0] == 0.3


@pytest.mark.slow
def test_watchers_are_told_and_see_everything_again(gateway: Gateway) -> None:
    weaver = weaver_of(gateway)
    updates = weaver.watch(timeout=BOUND)
    first = next(updates)
    assert isinstance(first, Snapshot)

    os.kill(weaver_pid(gateway), signal.SIGKILL)

    rest = [update for update in (next(updates), next(updates)) if isinstance(update, (Away, Snapshot))]
    assert [type(update) for update in rest] == [Away, Snapshot]
    assert isinstance(rest[1], Snapshot)
    assert rest[1].status["weaver"] != first.status["weaver"]


def test_events_that_are_followed_go_on_without_a_gap(gateway: Gateway) -> None:
    weaver = weaver_of(gateway)
    weaver.set_policy("one", "stop")
    followed = weaver.events(after=0, follow=True)
    while next(followed).data.get("group") != "one":
        pass

    os.kill(weaver_pid(gateway), signal.SIGKILL)
    weaver.status()
    weaver.set_policy("two", "stop")

    seen = [next(followed), next(followed)]
    assert [one.kind for one in seen] == ["weaver_started", "policy"]
    assert seen[1].data["group"] == "two"


@pytest.mark.slow
def test_while_no_weaver_comes_up_calls_say_so(gateway: Gateway) -> None:
    weaver = weaver_of(gateway)
    process = psutil.Process(weaver_pid(gateway))
    folder = gateway.state / "weaver"
    store = folder / "weaver.sqlite"

    folder.chmod(0o755)  # in which none may start
    process.kill()
    try:
        with pytest.raises(loom.WeaverUnavailable, match=r"chmod 700"):
            weaver.status()
        assert "loom_weaver_up 0" in gateway_text(gateway, "/metrics")
        assert store.exists()
    finally:
        folder.chmod(0o700)
    await_weaver(weaver)


def gateway_text(gateway: Gateway, path: str) -> str:
    import urllib.request

    request = urllib.request.Request(gateway.url.replace("ws://", "http://") + path)
    request.add_header("Authorization", f"Bearer {TOKEN}")
    with urllib.request.urlopen(request, timeout=BOUND) as response:
        return str(response.read().decode())


# -- gateways that end ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_outlives_its_gateway_and_the_next_one_finds_it(gateway: Gateway, number: int) -> None:
    weaver = weaver_of(gateway)
    with training(weaver.address(), "train_0") as (trainer,):
        await_true(lambda: "train_0" in weaver.replicas())
        before = weaver_pid(gateway), weaver.status()["weaver"], weaver.address()

        gateway.end(number)
        gateway.start()

        again = weaver_of(gateway)
        assert (weaver_pid(gateway), again.status()["weaver"], again.address()) == before
        assert again.update_config("train_0", learning_rate=0.4).get(BOUND)["train_0"].ok
        assert trainer.learning_rate()[0] == 0.4

        os.kill(weaver_pid(gateway), signal.SIGKILL)  # one that was adopted is kept, too
        assert again.status()["weaver"] != before[1]


def test_who_waits_for_a_replica_does_not_hold_up_a_gateway_that_ends(gateway: Gateway) -> None:
    weaver = weaver_of(gateway)
    with training(weaver.address(), "train_0") as (trainer,):
        await_true(lambda: "train_0" in weaver.replicas())
        os.kill(trainer.pid, signal.SIGSTOP)
        command = weaver.pause("train_0")
        raised: list[Exception] = []
        waiting = threading.Thread(target=lambda: raised.append(error_of(command)))
        waiting.start()
        gateway.end(signal.SIGTERM)
        waiting.join(BOUND)

    assert isinstance(raised[0], (loom.WeaverUnavailable, loom.GatewayUnreachable))


def error_of(command: CommandProxy) -> Exception:
    with pytest.raises((loom.WeaverUnavailable, loom.GatewayUnreachable)) as raised:
        command.get(3.0)
    return raised.value


def test_who_waits_for_a_replica_waits_on_while_weaver_and_gateway_are_away(
    gateway: Gateway,
) -> None:
    weaver = weaver_of(gateway)
    with training(weaver.address(), "train_0") as (trainer,):
        await_true(lambda: "train_0" in weaver.replicas())
        os.kill(trainer.pid, signal.SIGSTOP)
        try:
            command = weaver.update_config("train_0", learning_rate=0.4)
            with ThreadPoolExecutor(1) as waiting:
                outcomes = waiting.submit(command.get, BOUND)
                os.kill(weaver_pid(gateway), signal.SIGKILL)
                gateway.end(signal.SIGKILL)
                await_true(lambda: command._away is not None)
                gateway.start()
                os.kill(trainer.pid, signal.SIGCONT)
                assert outcomes.result(BOUND)["train_0"].ok
        finally:
            os.kill(trainer.pid, signal.SIGCONT)
        assert trainer.learning_rate()[0] == 0.4


def test_who_waits_for_a_weaver_that_stays_away_is_told(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    weaver = weaver_of(gateway)
    with training(weaver.address(), "train_0") as (trainer,):
        await_true(lambda: "train_0" in weaver.replicas())
        os.kill(trainer.pid, signal.SIGSTOP)
        command = weaver.pause("train_0")
        gateway.end(signal.SIGKILL)
        monkeypatch.setattr("loom_proxy.weaver.command.AWAY", 1.0)

        with pytest.raises(loom.GatewayUnreachable):
            command.get()
        with pytest.raises(loom.GatewayUnreachable):
            asyncio.run(awaited(command))


async def awaited(command: CommandProxy) -> None:
    await command


async def test_a_cancellation_that_is_lost_does_not_hold_up_a_gateway_that_ends(tmp_path: Path) -> None:
    lost = asyncio.Event()

    async def keep() -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:  # as wait_for does where its answer comes in the same moment
            lost.set()
        await asyncio.sleep(3600)

    async def workers() -> WorkerList:
        return WorkerList(["tcp://127.0.0.1:1"])

    keeper = WeaverSupervisor(str(tmp_path), workers)
    keeper._keeping = asyncio.ensure_future(keep())
    await asyncio.sleep(0)

    await asyncio.wait_for(keeper.close(end=False), BOUND)

    assert lost.is_set()
    assert keeper._keeping.cancelled()


def test_it_ends_with_the_sessions(gateway: Gateway) -> None:
    weaver_of(gateway)
    pid = weaver_pid(gateway)

    gateway.end(signal.SIGINT)

    await_end(pid)
    assert not (gateway.state / "weaver" / "weaver.sock").exists()


def test_one_that_was_left_is_ended_with_the_sessions_of_the_next_gateway(gateway: Gateway) -> None:
    weaver_of(gateway)
    pid = weaver_pid(gateway)
    gateway.end(signal.SIGKILL)
    gateway.start()
    weaver_of(gateway)

    gateway.end(signal.SIGINT)

    await_end(pid)


def test_a_gateway_that_ends_while_its_weaver_comes_up_leaves_none_that_is_in_the_way(gateway: Gateway) -> None:
    weaver_of(gateway)
    pid = weaver_pid(gateway)
    gateway.end(signal.SIGKILL)
    record = gateway.state / "weaver" / "weaver.json"
    record.write_text(record.read_text().replace('"address": "tcp', '"address": "", "was": "tcp'))

    gateway.start()

    weaver_of(gateway)
    assert weaver_pid(gateway) != pid
    await_end(pid)


@pytest.mark.parametrize("killed", [True, False])
def test_a_gateway_that_is_killed_before_it_wrote_of_its_weaver_leaves_none(tmp_path: Path, killed: bool) -> None:
    with start("-m", "loom.weaver", "--state", str(tmp_path / "weaver"), "--await-release") as weaver:
        assert weaver.stdin is not None
        if not killed:
            weaver.stdin.write("\n")
            weaver.stdin.flush()
            assert read_json(weaver)["event"] == "listening"
            weaver.terminate()
        weaver.stdin.close()

        assert weaver.wait(BOUND) == int(killed)
        assert (tmp_path / "weaver").exists() is not killed


@pytest.mark.parametrize("text", ["", "{}", "no JSON"])
def test_a_record_that_is_none_is_passed_over(gateway: Gateway, text: str) -> None:
    weaver_of(gateway)
    os.kill(weaver_pid(gateway), signal.SIGKILL)
    gateway.end(signal.SIGKILL)
    (gateway.state / "weaver" / "weaver.json").write_text(text)

    gateway.start()

    assert weaver_of(gateway).status()["replicas"] == {}


def test_a_record_of_another_process_is_passed_over(gateway: Gateway) -> None:
    weaver_of(gateway)
    pid = weaver_pid(gateway)
    gateway.end(signal.SIGKILL)
    psutil.Process(pid).kill()
    record = gateway.state / "weaver" / "weaver.json"
    record.write_text(record.read_text().replace(f'"pid": {pid}', f'"pid": {os.getpid()}'))

    gateway.start()

    assert weaver_of(gateway).status()["replicas"] == {}


def test_a_local_cluster_takes_its_weaver_along() -> None:
    with LocalCluster(1) as cluster:
        weaver_address(cluster.pids[0])
        (process,) = weavers(cluster.pids[0])
        command = process.cmdline()
        folder = Path(command[command.index("--state") + 1])
    await_end(process.pid)
    assert not folder.exists()


def test_a_local_cluster_that_is_killed_takes_its_weaver_along() -> None:
    with LocalCluster(1) as cluster:
        weaver_address(cluster.pids[0])
        (process,) = weavers(cluster.pids[0])
        os.kill(cluster.pids[0], signal.SIGKILL)
        await_end(process.pid)


def test_its_files_are_its_user_s_alone(gateway: Gateway) -> None:
    weaver_of(gateway)
    folder = gateway.state / "weaver"

    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for name in ("weaver.json", "weaver.sock", "weaver.out"):
        assert stat.S_IMODE((folder / name).stat().st_mode) & 0o077 == 0


def test_where_it_listens_can_be_said(cluster: LocalCluster) -> None:
    with gateway_of(cluster, "--weaver-listen", "127.0.0.1:0", "--weaver-advertise", "localhost") as gateway:
        weaver = weaver_of(gateway)
        assert weaver.address().startswith("tcp://localhost:")
        with training(weaver.address(), "train_0"):
            await_true(lambda: "train_0" in weaver.replicas())


def test_a_question_that_comes_first_waits_for_it(cluster: LocalCluster) -> None:
    with gateway_of(cluster) as gateway:
        answers: list[object] = []
        asking = [
            threading.Thread(target=lambda: answers.append(WeaverProxy(gateway.url, TOKEN).status()["replicas"]))
            for _ in range(4)
        ]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join(BOUND)
        assert answers == [{}, {}, {}, {}]
