"""The plain manifests, unmodified, in a cluster that enforces them: sessions work, and reach nothing else."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.support.cluster import OneMachineCluster, PodInfo, missing
from tests.support.cluster.kubelet.memory import can_limit
from tests.support.cluster.laptop import real_kubectl
from tests.support.cluster.network import METADATA
from tests.support.docs import Page
from tests.support.needs import skipped_if
from tests.support.paths import ROOT
from tests.support.processes import tree
from tests.system.cluster.test_pages import IMAGES, deploy, ran, token

pytestmark = [
    skipped_if(missing()),
    pytest.mark.skipif(real_kubectl() is None, reason="needs kubectl 1.31 or newer"),
    pytest.mark.timeout(300),
    pytest.mark.slow,
]

NAMESPACE = "training"

LOOK = """
import json, subprocess, sys
import loom

def look(command):
    import subprocess
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True).stdout

class Looks(loom.Actor):
    @loom.endpoint
    def at(self, command):
        import subprocess
        return subprocess.run(["sh", "-c", command], capture_output=True, text=True).stdout

in_driver, on_workers = sys.argv[1:]
with loom.connect() as job:
    said = [job.run(look, in_driver)]
    procs = job.hosts.spawn_procs(per_host={"gpus": 2})
    said += procs.spawn("looks", Looks).at.call(on_workers).get(90).values()
print(json.dumps(said))
"""
"""What a shell says in the driver, and in each process on the workers."""

HOLD = """
import sys, loom
job = loom.connect()
print("open", flush=True)
for line in sys.stdin:
    print(job.run(lambda: "works"), flush=True)
job.close()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[OneMachineCluster]:
    with OneMachineCluster(images=IMAGES, kubectl=real_kubectl()) as cluster:
        shutil.copytree(ROOT / "images" / "kubernetes", cluster.laptop.home / "images" / "kubernetes")
        ran(cluster, deploy())
        cluster.run_container("stranger", ["sleep", "infinity"], namespace=NAMESPACE)
        cluster.wait_ready("stranger", 1, namespace=NAMESPACE)
        yield cluster


@pytest.fixture
def client(cluster: OneMachineCluster) -> dict[str, str]:
    """What a client has in its environment that comes through the ingress."""
    url = f"{cluster.ingress_url}/{NAMESPACE}/loom-gateway:8470".replace("http", "ws", 1)
    return {"LOOM_URL": url, "LOOM_TOKEN": token(cluster), "LOOM_INSECURE": "1"}


def the_gateway(cluster: OneMachineCluster) -> PodInfo:
    (pod,) = cluster.pods("loom-gateway", NAMESPACE)
    return pod


def looked(
    cluster: OneMachineCluster, client: dict[str, str], in_driver: str = "true", on_workers: str = "true"
) -> list[str]:
    """What a shell says in a session's driver, and then what it says in each of its processes on the workers."""
    done = cluster.laptop.run([sys.executable, "-c", LOOK, in_driver, on_workers], env=client, timeout=150.0)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


@pytest.mark.guarantees(
    "workers",
    "The plain manifests work unmodified in a cluster that enforces them: what runs in a session writes "
    "to its own places and volumes only",
)
def test_a_session_writes_to_its_places_only_with_ids_of_its_own(
    cluster: OneMachineCluster, client: dict[str, str]
) -> None:
    folders = "/ /etc /usr /root ~ $TMPDIR /tmp /dev/shm"
    places = f"for at in {folders}; do touch $at/x$$ && rm $at/x$$ && echo $at; done; id -u"
    first, *others = looked(cluster, client, places, places.replace("$TMPDIR", "/var/tmp"))
    *written, user = first.split()
    home, tmp, *shared = written
    assert home.startswith("/var/lib/loom/driver-")
    assert tmp == home.removesuffix("home") + "tmp"
    assert shared == ["/tmp", "/dev/shm"]
    assert 20000 <= int(user) <= 29999
    assert [said.split() for said in others] == [["/home/loom", "/tmp", "/dev/shm", "10001"]] * 4


@pytest.mark.guarantees("workers", "In it a session reads nothing of an earlier one")
def test_the_next_session_reads_nothing_of_the_first(cluster: OneMachineCluster, client: dict[str, str]) -> None:
    looked(cluster, client)
    readable = (
        "find /tmp /var/lib/loom /etc/loom -type f -readable ! -user $(id -u) ! -path '*/kube-*' 2> /dev/null"
    )
    first, *_ = looked(cluster, client, readable)
    # the workers' addresses, and the ports that the gateway has chosen
    assert {path.rpartition("/")[2] for path in first.split()} <= {"workers.json", "ports"}


@pytest.mark.guarantees(
    "workers",
    "In it nobody comes through what policies close: a stranger to workers and gateway, a worker to the "
    "gateway, any pod to a cloud's credentials",
)
def test_what_policies_close_is_closed(cluster: OneMachineCluster, client: dict[str, str]) -> None:
    gateway, workers = the_gateway(cluster), cluster.pods("loom-worker", NAMESPACE)
    credentials = f"curl -s -m 2 http://{METADATA}/; echo $?"
    answers = f"curl -s -m 2 http://{gateway.address}:8470/healthz; echo $?"
    (stranger,) = cluster.pods("stranger", NAMESPACE)
    assert cluster.execute(stranger.name, ["sh", "-c", credentials], NAMESPACE) == "credentials0\n"
    assert cluster.execute(stranger.name, ["sh", "-c", answers], NAMESPACE) == "28\n"
    for worker in workers:
        connects = f"import socket; socket.create_connection(('{worker.address}', 26600), 2)"
        cluster.execute(gateway.name, ["python3", "-c", connects], NAMESPACE)
        with pytest.raises(RuntimeError, match="TimeoutError"):
            cluster.execute(stranger.name, ["python3", "-c", connects], NAMESPACE)
    assert looked(cluster, client, credentials, f"{credentials}; {answers}") == ["28\n", *(["28\n28\n"] * 4)]


@pytest.mark.guarantees("workers", "In it the gateway's largest message follows its pod's limit of memory")
@pytest.mark.skipif(not can_limit(), reason="this machine has no control groups of version 1 for memory")
def test_the_gateway_knows_its_limit_of_memory(cluster: OneMachineCluster) -> None:
    program = "from loom_gateway.starting import *; print(memory_limit() >> 30, largest_message() >> 30)"
    assert cluster.execute(the_gateway(cluster).name, ["python3", "-c", program], NAMESPACE) == "8 2\n"


def status_of(cluster: OneMachineCluster, path: str, bearer: str = "") -> str:
    """The HTTP status with which the gateway answers a client that comes through the ingress."""
    url = f"{cluster.ingress_url}/{NAMESPACE}/loom-gateway:8470/{path}"
    command = ["curl", "-s", "-m", "2", "-o", "/dev/null", "-w", "%{http_code}", url]
    return cluster.laptop.run([*command, "-H", f"Authorization: Bearer {bearer}"]).stdout


@pytest.mark.guarantees(
    "workers",
    "In it tokens that are put into the Secrets come in without a restart, and the gateway's old token is refused",
)
def test_tokens_that_are_put_into_the_secrets_come_in_without_a_restart(cluster: OneMachineCluster) -> None:
    gateway, own = the_gateway(cluster), token(cluster)
    (page,) = [one for one in Page.of("docs/deploy/tokens.md").blocks("sh") if "create secret" in one.lines[-1]]
    anns, *_ = ran(cluster, list(page.lines)).splitlines()
    cluster.wait_until(lambda: status_of(cluster, "api/v1/status", anns) == "200", 60.0, "ann's token to come in")

    written = cluster.laptop.home / "images" / "kubernetes" / "base" / "token.env"
    written.write_text("token=the-next-token-of-the-gateway\n")
    ran(cluster, deploy()[2:])

    cluster.wait_until(
        lambda: status_of(cluster, "api/v1/status", own) == "401", 60.0, "the old token to be refused"
    )
    assert status_of(cluster, "api/v1/status", "the-next-token-of-the-gateway") == "200"
    assert status_of(cluster, "api/v1/status", anns) == "200"
    assert the_gateway(cluster).pid == gateway.pid


def behind_the_service(cluster: OneMachineCluster) -> bool:
    """Whether the Service leads anywhere."""
    return status_of(cluster, "healthz") == "200"


@pytest.mark.guarantees(
    "workers", "A gateway that cannot write its state is taken out of its Service, and its sessions go on"
)
def test_a_gateway_without_its_state_is_taken_out_of_the_service_and_its_sessions_go_on(
    cluster: OneMachineCluster, client: dict[str, str]
) -> None:
    gateway = the_gateway(cluster)
    holder = cluster.laptop.popen(
        [sys.executable, "-c", HOLD], env=client, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdin
    assert holder.stdout
    try:
        assert holder.stdout.readline() == "open\n"
        assert behind_the_service(cluster)
        cluster.execute(gateway.name, ["chmod", "a-w", "/var/lib/loom"], NAMESPACE)
        try:
            cluster.wait_until(lambda: not behind_the_service(cluster), 60.0, "the gateway to be taken out")
            ready = cluster.execute(gateway.name, ["curl", "-s", "http://127.0.0.1:8470/readyz"], NAMESPACE)
            assert json.loads(ready)["status"] == "state_not_writable"
            holder.stdin.write("\n")
            holder.stdin.flush()
            assert holder.stdout.readline() == "works\n"
        finally:
            cluster.execute(gateway.name, ["chmod", "u+w", "/var/lib/loom"], NAMESPACE)
        cluster.wait_until(lambda: behind_the_service(cluster), 60.0, "the gateway to be back")
        assert the_gateway(cluster).address == gateway.address
        holder.stdin.close()
        assert holder.wait(60) == 0
    finally:
        holder.kill()
        holder.wait()


def workers_that_answer(cluster: OneMachineCluster) -> int:
    ready = cluster.execute(the_gateway(cluster).name, ["curl", "-s", "http://127.0.0.1:8470/readyz"], NAMESPACE)
    return int(json.loads(ready)["workers_reachable"])


def knows_the_workers(cluster: OneMachineCluster) -> bool:
    """Whether the gateway has found the pods of the workers that run now."""
    found = cluster.execute(the_gateway(cluster).name, ["cat", "/var/lib/loom/workers.json"], NAMESPACE)
    return all(f"{pod.address}:" in found for pod in cluster.pods("loom-worker", NAMESPACE))


@pytest.mark.guarantees("workers", "A worker that is stuck is not ready, and is started again")
def test_a_worker_that_is_stuck_is_not_ready_and_is_started_again(cluster: OneMachineCluster) -> None:
    def described() -> dict[str, Any]:
        found: dict[str, Any] = cluster.described("loom-worker-1", NAMESPACE)["status"]["containerStatuses"][0]
        return found

    # As they are, it takes 30 s, and 3 minutes.
    impatient = {"periodSeconds": 2, "failureThreshold": 5}
    probes = {"readinessProbe": {"periodSeconds": 1}, "livenessProbe": impatient}
    path = cluster.laptop.home / "images" / "kubernetes" / "base" / "workers.yaml"
    manifests = list(yaml.safe_load_all(path.read_text()))
    pod = manifests[0]["spec"]["template"]["spec"]
    pod["terminationGracePeriodSeconds"] = 2
    for name, changes in probes.items():
        pod["containers"][0][name] |= changes
    path.write_text(yaml.safe_dump_all(manifests))
    ran(cluster, deploy()[2:])
    # Before, its answer may be about the pods that these have replaced.
    cluster.wait_until(lambda: knows_the_workers(cluster), 60.0, "the gateway to know the new workers")
    cluster.wait_until(lambda: workers_that_answer(cluster) == 2, 60.0, "the workers to answer the gateway")
    first = cluster.pod("loom-worker-1", NAMESPACE)
    assert first.pid is not None
    for process in tree(first.pid):
        process.suspend()
    cluster.wait_until(lambda: not described()["ready"], 60.0, "the worker not to be ready")
    assert workers_that_answer(cluster) in (1, 2)  # the gateway's answer may be 5 s old
    cluster.wait_until(lambda: described()["restartCount"] == 1, 90.0, "the worker to be started again")
    assert described()["lastState"]["terminated"]["exitCode"] == 128 + signal.SIGKILL
    cluster.wait_until(lambda: workers_that_answer(cluster) == 2, 60.0, "the worker to answer again")
