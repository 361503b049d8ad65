"""The cluster on one machine: what it has of a real one, and that nothing is left of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import OneMachineCluster, missing
from tests.support.cluster.laptop import real_kubectl
from tests.support.cluster.network import Network, remove_stale
from tests.support.cluster.services import load_rules
from tests.support.needs import skipped_if
from tests.support.paths import ROOT

pytestmark = skipped_if(missing())

UNPULLABLE = "registry.example/nothing:1"

ECHO = """
import asyncio, os, websockets
async def echo(socket):
    async for message in socket:
        await socket.send(f"{os.environ['POD_NAME']} {socket.request.path}: {message}")
async def main():
    async with websockets.serve(echo, "0.0.0.0", 9000):
        await asyncio.Event().wait()
asyncio.run(main())
"""

ASK = """
import asyncio, sys, websockets
async def main():
    async with websockets.connect(sys.argv[1]) as socket:
        for word in sys.argv[2:]:
            await socket.send(word)
            print(await socket.recv())
asyncio.run(main())
"""

HTTP = ["python3", "-m", "http.server", "8000"]
SERVES_HTTP = {"httpGet": {"path": "/", "port": 8000}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[OneMachineCluster]:
    with OneMachineCluster(missing_images=[UNPULLABLE]) as cluster:
        yield cluster


@contextlib.contextmanager
def running(cluster: OneMachineCluster, name: str, command: list[str], **options: object) -> Iterator[str]:
    cluster.run_container(name, command, **options)  # type: ignore[arg-type]
    try:
        yield name
    finally:
        cluster.remove(name)


def fetched(cluster: OneMachineCluster, url: str) -> str:
    """The status with which a request from the laptop is answered; "000" if it is not."""
    answer = cluster.laptop.run(["curl", "-s", "-m", "1", "-o", "/dev/null", "-w", "%{http_code}", url])
    return answer.stdout


def states(cluster: OneMachineCluster, owner: str) -> list[str]:
    return [pod.state for pod in cluster.pods(owner)]


def through_nginx(cluster: OneMachineCluster, service: str, port: int, path: str = "/") -> str:
    return f"{cluster.kt_api_url}/default/{service}:{port}{path}"


def eventually(true: object, what: str, timeout: float = 15.0) -> None:
    OneMachineCluster.wait_until(true, timeout, what)  # type: ignore[arg-type]


def test_the_name_of_a_headless_service_has_the_addresses_of_its_ready_pods(cluster: OneMachineCluster) -> None:
    with running(cluster, "web", HTTP, replicas=3, readiness=SERVES_HTTP):
        pods = cluster.wait_ready("web", 3)
        addresses = sorted(pod.address for pod in pods)
        eventually(lambda: cluster.resolve("web-headless.default.svc.cluster.local") == addresses, "3 addresses")
        inside = cluster.execute(pods[0].name, ["getent", "ahostsv4", "web-headless"])
        assert {line.split()[0] for line in inside.splitlines()} == set(addresses)


def test_the_address_of_a_service_leads_to_its_ports_and_to_no_others(cluster: OneMachineCluster) -> None:
    with running(cluster, "web", HTTP, ports=[8000], readiness=SERVES_HTTP):
        cluster.wait_ready("web", 1)
        url = through_nginx(cluster, "web", 8000)
        eventually(lambda: fetched(cluster, url) == "200", "nginx to reach the service")
        other, headless = through_nginx(cluster, "web", 8001), through_nginx(cluster, "web-headless", 8000)
        eventually(lambda: fetched(cluster, other) == "502", "nginx to say that nobody is there")
        eventually(lambda: fetched(cluster, headless) == "200", "nginx to reach a pod")


def test_the_laptop_reaches_nginx_only(cluster: OneMachineCluster) -> None:
    with running(cluster, "web", HTTP, readiness=SERVES_HTTP):
        pod = cluster.wait_ready("web", 1)[0]
        assert fetched(cluster, f"{cluster.kt_api_url}/health") == "200"
        assert fetched(cluster, f"http://{pod.address}:8000/") == "000"
        assert fetched(cluster, "http://10.243.0.1:8081/cluster/pods") == "000"


def test_a_killed_pod_is_replaced_by_one_with_another_name_and_address(cluster: OneMachineCluster) -> None:
    with running(cluster, "web", HTTP, replicas=2, readiness=SERVES_HTTP):
        killed, kept = cluster.wait_ready("web", 2)
        cluster.kill_pod(killed.name)
        new = [pod for pod in cluster.wait_ready("web", 2) if pod.name != kept.name]
        assert len(new) == 1
        assert (new[0].name, new[0].address) != (killed.name, killed.address)
        now = sorted([kept.address, new[0].address])
        eventually(lambda: cluster.resolve("web-headless.default.svc.cluster.local") == now, "DNS to follow")
        assert not Path(f"/proc/{killed.pid}").exists()


def test_a_pod_of_a_stateful_set_keeps_its_name_when_it_is_replaced(cluster: OneMachineCluster) -> None:
    with running(cluster, "set", HTTP, replicas=2, stateful=True, readiness=SERVES_HTTP):
        first = cluster.wait_ready("set", 2)[0]
        assert first.name == "set-0"
        name = "set-0.set-headless.default.svc.cluster.local"
        eventually(lambda: cluster.resolve(first.address) == [name], "the address to have the name")
        cluster.kill_pod("set-0")
        replaced = cluster.wait_ready("set", 2)[0]
        assert replaced.name == "set-0"
        assert replaced.address != first.address
        eventually(lambda: cluster.resolve(name) == [replaced.address], "the name to have the new address")


def test_a_websocket_goes_through_nginx_to_any_port_of_a_headless_service(cluster: OneMachineCluster) -> None:
    with running(cluster, "echo", ["python3", "-c", ECHO], readiness={"tcpSocket": {"port": 9000}}):
        pod = cluster.wait_ready("echo", 1)[0]
        url = through_nginx(cluster, "echo-headless", 9000, "/some/path?a=b").replace("http", "ws", 1)
        done = cluster.laptop.run([sys.executable, "-c", ASK, url, "one", "two"])
        assert done.stdout.splitlines() == [f"{pod.name} /some/path?a=b: one", f"{pod.name} /some/path?a=b: two"]


@pytest.mark.parametrize("silent", [False, True], ids=["link down", "packets dropped"])
def test_the_laptop_can_be_cut_off_and_comes_back(cluster: OneMachineCluster, silent: bool) -> None:
    with cluster.outage(silent):
        assert fetched(cluster, f"{cluster.kt_api_url}/health") == "000"
    eventually(lambda: fetched(cluster, f"{cluster.kt_api_url}/health") == "200", "the link to work again")


def test_a_container_that_exits_is_started_again_and_its_pod_says_so(cluster: OneMachineCluster) -> None:
    with running(cluster, "brief", ["sh", "-c", "echo started; exit 3"]):
        eventually(lambda: states(cluster, "brief") == ["CrashLoopBackOff"], "the container's end")
        pod = cluster.pods("brief")[0]
        eventually(lambda: cluster.logs(pod.name).count("started") > 1, "another start")
        assert cluster.pod(pod.name).address == pod.address


def test_a_pod_whose_image_cannot_be_pulled_says_so(cluster: OneMachineCluster) -> None:
    with running(cluster, "unpulled", HTTP, image=UNPULLABLE):
        eventually(lambda: states(cluster, "unpulled") == ["ImagePullBackOff"], "the state")


@pytest.mark.parametrize(
    "kubectl",
    [
        pytest.param("kubectl", id="stand-in"),
        pytest.param(
            real_kubectl(),
            id="real",
            marks=pytest.mark.skipif(real_kubectl() is None, reason="needs kubectl 1.31 or newer"),
        ),
    ],
)
def test_a_port_forward_stays_with_one_pod_and_ends_with_it(cluster: OneMachineCluster, kubectl: str) -> None:
    with running(cluster, "web", HTTP, replicas=2, ports=[8000], readiness=SERVES_HTTP):
        cluster.wait_ready("web", 2)
        command = [kubectl, "port-forward", "service/web", "18000:8000", "-n", "default"]
        forward = cluster.laptop.popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert forward.stdout is not None
        assert forward.stdout.readline() == "Forwarding from 127.0.0.1:18000 -> 8000\n"
        assert fetched(cluster, "http://127.0.0.1:18000/") == "200"
        cluster.kill_pod(next(pod.name for pod in cluster.pods("web") if "GET" in cluster.logs(pod.name)))
        _, error = forward.communicate(timeout=20.0)
        assert forward.returncode == 1
        assert "lost connection to pod" in error


def test_a_pod_cannot_change_the_installation_that_it_runs_from(cluster: OneMachineCluster) -> None:
    with running(cluster, "web", HTTP, readiness=SERVES_HTTP):
        pod = cluster.wait_ready("web", 1)[0]
        cluster.execute(pod.name, ["uv", "pip", "install", "--system", "httpx>=0.20"])
        with pytest.raises(RuntimeError, match="nowhere is not installed, and there is no network"):
            cluster.execute(pod.name, ["uv", "pip", "install", "nowhere"])
        with pytest.raises(RuntimeError, match="Read-only file system"):
            cluster.execute(pod.name, ["touch", f"{sys.prefix}/touched"])


def test_a_host_that_is_removed_while_it_is_given_its_rules_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def filtered(network: Network, host: str, rules: str) -> None:
        if host == "going":
            raise subprocess.CalledProcessError(-signal.SIGKILL, "nft")

    monkeypatch.setattr(Network, "filter", filtered)
    monkeypatch.setattr(Network, "can_enter", lambda network, host: True)
    assert load_rules(Network("kube-"), {"staying": "", "going": ""}) == {"staying"}


def test_a_controller_that_has_ended_is_named_with_its_last_words() -> None:
    with OneMachineCluster() as cluster:
        ended = subprocess.run(
            ["pgrep", "-f", f"tests.support.cluster.controller --prefix {cluster.prefix}"], capture_output=True
        )
        os.kill(int(ended.stdout), signal.SIGKILL)
        eventually(
            lambda: not processes_in("tests.support.cluster.controller --prefix " + cluster.prefix), "its end"
        )
        with pytest.raises(RuntimeError, match=r"(?s)the controller has ended:.*listening"):
            cluster.pods()


def namespaces_of(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"kube-{pid}-")]


def processes_in(folder: str) -> list[str]:
    """The command lines on this machine that name a cluster's folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes().decode(errors="replace").replace("\0", " ")
            if folder in line:
                found.append(line)
    return found


def test_nothing_is_left_of_a_cluster() -> None:
    with OneMachineCluster() as cluster:
        prefix, folder = cluster.prefix, cluster.folder
        cluster.run_container("web", HTTP)
        cluster.wait_ready("web", 1)
        assert processes_in(str(folder))
    assert not [name for name in namespaces_of(os.getpid()) if name.startswith(prefix)]
    assert not processes_in(str(folder))
    assert not folder.exists()


def test_nothing_is_left_of_a_cluster_whose_owner_was_killed() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-m", "tests.support.cluster"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert owner.stdout is not None
    lines = iter(owner.stdout.readline, "")
    folder = next(line.split()[-1] for line in lines if line.startswith("files and logs"))
    assert namespaces_of(owner.pid)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    eventually(lambda: not processes_in(folder), "its processes to die with it")
    remove_stale()
    assert not namespaces_of(owner.pid)
    assert not Path(folder).exists()


def test_a_wait_that_fails_says_what_the_pods_do(cluster: OneMachineCluster) -> None:
    with running(cluster, "brief", ["sh", "-c", "echo the reason; exit 3"]):
        eventually(lambda: states(cluster, "brief") == ["CrashLoopBackOff"], "the container's end")
        started = time.monotonic()
        with pytest.raises(TimeoutError, match=r"(?s)1 ready pods of brief.*CrashLoopBackOff.*the reason"):
            cluster.wait_ready("brief", 1, timeout=0.3)
        assert time.monotonic() - started < 5.0
