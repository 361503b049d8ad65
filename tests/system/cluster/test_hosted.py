"""``images/kubernetes/hosted``, unmodified, in a cluster on one machine: pods go, and sessions go on.

Evictions are deletions here, as they are for the kubelet: no API server counts budgets.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.cluster import OneMachineCluster, missing
from tests.support.cluster.laptop import real_kubectl
from tests.support.docs import Page
from tests.support.needs import skipped_if
from tests.support.paths import ROOT
from tests.system.cluster.test_faults_in_pods import LOOM, PROGRAM
from tests.system.cluster.test_kubernetes_job import Program
from tests.system.cluster.test_pages import IMAGES, deploy, ran, token, typed

pytestmark = [
    skipped_if(missing()),
    pytest.mark.skipif(real_kubectl() is None, reason="needs kubectl 1.31 or newer"),
    pytest.mark.timeout(600),
    pytest.mark.slow,
]

NAMESPACE = "training"
COUNTING = ROOT / "tests/support/cluster/programs" / "counting.py"
PAGE = Page.of("docs/deploy/kubernetes-hosted.md")
DEPLOY, ROLL, EMPTY = (list(block.lines) for block in PAGE.blocks("sh"))
BOUND = 150.0

RESTARTED = """
import time, loom
with loom.connect() as job:
    run = job.run(time.sleep, 10**6, detach=True, name="sleeps", restarts=1)
    print(job.session, flush=True)
    try:
        run.result(timeout=200)
    except loom.SessionRestarted as restarted:
        print(type(restarted).__name__, flush=True)
    print(job.runs()["sleeps"].status, job.run(lambda: 5), flush=True)
"""

ONE_CALL = "import loom; job = loom.connect(); print(job.session, job.run(lambda: 5)); job.close()"


@pytest.fixture(scope="module")
def cluster() -> Iterator[OneMachineCluster]:
    """A cluster with what the page says to type."""
    with OneMachineCluster(images=IMAGES, kubectl=real_kubectl()) as cluster:
        shutil.copytree(ROOT / "images" / "kubernetes", cluster.laptop.home / "images" / "kubernetes")
        said = ran(cluster, [*deploy()[:2], *DEPLOY])
        assert "statefulset.apps/loom-session-host condition met" in said
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: OneMachineCluster) -> dict[str, str]:
    """What a client has in its environment that comes through the ingress."""
    url = f"{cluster.ingress_url}/{NAMESPACE}/loom-gateway:8470".replace("http", "ws", 1)
    return {"LOOM_URL": url, "LOOM_TOKEN": token(cluster), "LOOM_INSECURE": "1"}


@pytest.fixture(autouse=True)
def all_there(cluster: OneMachineCluster) -> None:
    for owner, count in (("loom-gateway", 2), ("loom-session-host", 2), ("loom-weaver", 1), ("loom-worker", 2)):
        cluster.wait_ready(owner, count, BOUND, NAMESPACE)


class Counting:
    """A client that counts, on the laptop."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.session = str(self._said()["session"])

    def _said(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        while line and not line.startswith("{"):
            line = self._process.stdout.readline()
        assert line, "the client has ended"
        said: dict[str, Any] = json.loads(line)
        assert said["errors"] == []
        assert said["each_once"]
        return said

    def look(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._said()

    def goes_on(self) -> None:
        """Wait until it has counted on."""
        then = self.look()["answers"]
        OneMachineCluster.wait_until(lambda: self.look()["answers"] > then + 20, BOUND, "the client to count on")

    def end(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.close()
        said = self._said()
        assert self._process.wait(BOUND) == 0
        return said


@contextmanager
def counting(cluster: OneMachineCluster, client: Mapping[str, str]) -> Iterator[Counting]:
    process = cluster.laptop.popen(
        [sys.executable, str(COUNTING)], env=client, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        counting = Counting(process)
        counting.goes_on()
        yield counting
    finally:
        process.kill()
        process.wait()


def hosts_of(cluster: OneMachineCluster, session: str) -> list[str]:
    """The session hosts' pods that have a session, of those that were not told to stop."""
    look = ["sh", "-c", f"grep -l {session} /var/lib/loom/sessions/driver-*.json || true"]
    pods = cluster.pods("loom-session-host", NAMESPACE)
    return [pod.name for pod in pods if cluster.execute(pod.name, look, NAMESPACE)]


def one_call(cluster: OneMachineCluster, client: Mapping[str, str]) -> str:
    """The session of a client that makes a call in it."""
    done = cluster.laptop.run([sys.executable, "-c", ONE_CALL], env=client, timeout=BOUND)
    session, answer = done.stdout.split() or ["", done.stderr]
    assert answer == "5"
    return session


def images(cluster: OneMachineCluster, owner: str) -> list[str]:
    pods = cluster.pods(owner, NAMESPACE)
    return [cluster.described(pod.name, NAMESPACE)["spec"]["containers"][0]["image"] for pod in pods]


@contextmanager
def deleting(cluster: OneMachineCluster, *pods: str) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Pods that are told to end, at once, as by an eviction of each."""
    commands = {pod: ["kubectl", "-n", NAMESPACE, "delete", "pod", pod] for pod in pods}
    running = {pod: cluster.laptop.popen(command, stdout=subprocess.PIPE) for pod, command in commands.items()}
    try:
        yield running
    finally:
        for process in running.values():
            process.kill()
            process.communicate()


@pytest.mark.guarantees(
    "workers", "`images/kubernetes/hosted` works unmodified: a session can be opened and reached by each gateway"
)
def test_each_gateway_reaches_every_session(cluster: OneMachineCluster, client: dict[str, str]) -> None:
    with counting(cluster, client) as laptop:
        for pod in cluster.pods("loom-gateway", NAMESPACE):
            command = ["kubectl", "-n", NAMESPACE, "port-forward", f"pod/{pod.name}", ":8470"]
            forward = cluster.laptop.popen(command, stdout=subprocess.PIPE)
            try:
                assert forward.stdout is not None
                port = re.findall(r"127.0.0.1:(\d+)", forward.stdout.readline())[0]
                env = {**client, "LOOM_URL": f"ws://127.0.0.1:{port}"}
                one_call(cluster, env)
                listed = cluster.laptop.run([*LOOM, "sessions", "list", "--json"], env=env)
                assert laptop.session in listed.stdout, listed.stderr
                status = cluster.laptop.run([*LOOM, "status"], env=env).stdout
                assert len(re.findall(r"tcp://10\.\S+:26600 │ yes", status)) == 2, status
            finally:
                forward.kill()
                forward.communicate()
        assert laptop.end()["answers"] > 20


@pytest.mark.guarantees(
    "workers", "Gateways' pods that are lost with their nodes fail, lose and double no call of a session"
)
def test_gateways_that_are_lost_take_no_call_with_them(cluster: OneMachineCluster, client: dict[str, str]) -> None:
    with counting(cluster, client) as laptop:
        for pod in cluster.pods("loom-gateway", NAMESPACE):
            cluster.kill_pod(pod.name, NAMESPACE)
            laptop.goes_on()
            cluster.wait_ready("loom-gateway", 2, BOUND, NAMESPACE)
        laptop.end()


@pytest.mark.guarantees(
    "workers",
    "When a node is drained, clients of its gateway go on by another one, its weaver comes back, and its session "
    "host takes no new session and waits for those that it has",
)
def test_a_node_is_drained_under_a_session(cluster: OneMachineCluster, client: dict[str, str]) -> None:
    with counting(cluster, client) as laptop:
        (host,) = hosts_of(cluster, laptop.session)
        there = cluster.pod(host, NAMESPACE)
        gateway, _ = cluster.pods("loom-gateway", NAMESPACE)
        (weaver,) = cluster.pods("loom-weaver", NAMESPACE)
        with deleting(cluster, gateway.name, host, weaver.name) as deleted:
            for pod in (gateway, weaver):
                assert deleted[pod.name].wait(60) == 0  # within its grace period
            cluster.wait_ready("loom-gateway", 2, BOUND, NAMESPACE)
            cluster.wait_ready("loom-weaver", 1, BOUND, NAMESPACE)
            laptop.goes_on()
            with counting(cluster, client) as second:
                assert len(hosts_of(cluster, second.session)) == 1  # of those that were not told to stop
                second.end()
            assert deleted[host].poll() is None
            assert there.pid is not None
            laptop.end()
            assert deleted[host].wait(60) == 0
        (back,) = [pod for pod in cluster.wait_ready("loom-session-host", 2, BOUND, NAMESPACE) if pod.name == host]
        assert back.pid != there.pid


@pytest.mark.guarantees("workers", "A weaver's pod that is deleted comes back with all replicas and runs")
def test_the_weaver_comes_back_with_its_replicas_and_runs(
    cluster: OneMachineCluster, client: dict[str, str]
) -> None:
    def runs() -> list[str]:
        done = cluster.laptop.run([*LOOM, "runs", "list", "--json"], env=client)
        return [one["id"] for one in json.loads(done.stdout)["runs"]]

    def points() -> int:
        """The number of points that the weaver has; 0 while it does not answer."""
        asked = [*LOOM, "query", "SELECT count(*) AS points FROM metrics", "--csv"]
        done = cluster.laptop.run(asked, env=client)
        return int(done.stdout.split()[1]) if done.returncode == 0 else 0

    process = cluster.laptop.popen(
        [sys.executable, str(PROGRAM), "100000"], env=client, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        researcher = Program(process, cluster)
        researcher.until("training")
        known, then = runs(), points()
        (weaver,) = cluster.pods("loom-weaver", NAMESPACE)

        ran(cluster, [f"kubectl -n {NAMESPACE} delete pod {weaver.name}"])

        (back,) = cluster.wait_ready("loom-weaver", 1, BOUND, NAMESPACE)
        assert back.address != weaver.address
        # Nothing is missing, and the replicas report on.
        cluster.wait_until(lambda: points() > then + 10, BOUND, "the replicas to report on")
        assert runs() == known
        assert process.stdin is not None
        process.stdin.write("stop\n")
        process.stdin.flush()
        result = researcher.until("result")
        researcher.until("closed")
        assert (result["ending"], result["failures"]) == ("stopped", 0)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.guarantees(
    "workers", "Functions with restarts of a session host's pod that is lost start again elsewhere"
)
def test_a_session_host_that_is_lost_starts_its_functions_again(
    cluster: OneMachineCluster, client: dict[str, str]
) -> None:
    process = cluster.laptop.popen(
        [sys.executable, "-c", RESTARTED], env=client, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        (host,) = hosts_of(cluster, process.stdout.readline().strip())
        cluster.kill_pod(host, NAMESPACE)
        said, errors = process.communicate(timeout=BOUND)
        assert said.splitlines() == ["SessionRestarted", "running 5"], errors
    finally:
        process.kill()
        process.communicate()


@pytest.mark.guarantees(
    "workers",
    "A new version of gateways, weaver and session hosts is put in place under a session, which notices nothing",
)
def test_a_new_version_is_put_in_place_under_a_session(cluster: OneMachineCluster, client: dict[str, str]) -> None:
    kustomization = cluster.laptop.home / "images" / "kubernetes" / "hosted" / "kustomization.yaml"
    kustomization.write_text(kustomization.read_text().replace("newTag: 0.2.0", "newTag: 0.2.1"))
    workers = [pod.pid for pod in cluster.pods("loom-worker", NAMESPACE)]
    with counting(cluster, client) as laptop:
        (host,) = hosts_of(cluster, laptop.session)
        ran(cluster, ROLL)
        assert images(cluster, "loom-gateway") == ["loom:0.2.1"] * 2
        assert images(cluster, "loom-weaver") == ["loom:0.2.1"]
        assert images(cluster, "loom-session-host") == ["loom:0.2.0"] * 2
        # The gateways of before end after their pause, in which the Service hears of it.
        cluster.wait_until(lambda: "gateway_draining" in laptop.look()["events"], BOUND, "the client to be told")
        laptop.goes_on()

        emptying = cluster.laptop.popen(["bash", "-c", typed(EMPTY)], stdout=subprocess.PIPE)
        try:
            others = [name for name in ("loom-session-host-0", "loom-session-host-1") if name != host]
            cluster.wait_until(lambda: names(cluster) == others, BOUND, "the host to be told to stop")
            laptop.goes_on()
            cluster.wait_until(lambda: cluster.pod(others[0], NAMESPACE).ready, BOUND, "the other host")
            one_call(cluster, client)
            assert emptying.poll() is None
            laptop.end()
            said, _ = emptying.communicate(timeout=BOUND)
            assert said.count("condition met") == 2
        finally:
            emptying.kill()
            emptying.communicate()
    assert images(cluster, "loom-session-host") == ["loom:0.2.1"] * 2
    assert [pod.pid for pod in cluster.pods("loom-worker", NAMESPACE)] == workers
    one_call(cluster, client)


def names(cluster: OneMachineCluster) -> list[str]:
    """The session hosts' pods that were not told to stop."""
    return [pod.name for pod in cluster.pods("loom-session-host", NAMESPACE)]
