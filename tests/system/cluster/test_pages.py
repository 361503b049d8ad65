"""The pages about Kubernetes: each command in them does what they say, with the real kubectl."""

from __future__ import annotations

import base64
import functools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import OneMachineCluster, missing
from tests.support.cluster.kubelet.image import Image
from tests.support.cluster.laptop import real_kubectl
from tests.support.docs import Page
from tests.support.needs import skipped_if
from tests.support.paths import ROOT

pytestmark = [
    skipped_if(missing()),
    pytest.mark.skipif(real_kubectl() is None, reason="needs kubectl 1.31 or newer"),
    pytest.mark.timeout(300),
    pytest.mark.slow,
]

PATH = f"{ROOT / 'images'}:{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
OURS = Image({"PATH": PATH}, working_dir="/home/loom", user=10001)
IMAGES = {f"{name}:{tag}": OURS for name in ("loom", "loom-gpu") for tag in ("0.2.0", "0.2.1")}
PAGE = Page.of("docs/deploy/kubernetes.md")

FOLLOW = """
import sys, loom
job = loom.connect({target})
print("open", job.session, flush=True)
for event in job.events(timeout=90):
    print(event.name, event.details, flush=True)
"""

CONNECT = """
import sys, loom
try:
    loom.connect(sys.argv[1], "secret")
except loom.PortForwardFailed as error:
    print(error)
"""

COUNT = """
import sys, loom
class Counter(loom.Actor):
    def __init__(self):
        self.n = 0
    @loom.endpoint
    def add(self):
        self.n += 1
        return self.n
job = {connect}
counters = job.hosts.spawn_procs().spawn("counters", Counter)
for line in sys.stdin:
    print(sorted(set(counters.add.call().get(90).values())), flush=True)
job.close()
print("closed", flush=True)
"""


@pytest.fixture
def cluster() -> Iterator[OneMachineCluster]:
    with OneMachineCluster(namespaces=["default", "research"], images=IMAGES, kubectl=real_kubectl()) as cluster:
        shutil.copytree(ROOT / "images" / "kubernetes", cluster.laptop.home / "images" / "kubernetes")
        yield cluster


def typed(lines: list[str]) -> str:
    """Lines as somebody types them: who starts a port-forward goes on when it has said that it forwards."""
    script = ["set -e"]
    for line in lines:
        if line.endswith("&"):
            script += [f"{line.removesuffix('&')} > forward.log &", "forward=$!"]
            script += ['until grep -q "^Forwarding" forward.log; do kill -0 "$forward"; sleep 0.05; done']
        else:
            script.append(line)
    return "\n".join(script)


def ran(cluster: OneMachineCluster, lines: list[str]) -> str:
    """Type lines in a shell on the laptop; what they print. What they leave running ends with the shell."""
    end = '\nif [ -n "${forward-}" ]; then kill "$forward"; wait "$forward" || true; fi'
    done = cluster.laptop.run(["bash", "-c", typed(lines) + end], timeout=200.0)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


def deploy() -> list[str]:
    """The page's commands that make the token and deploy."""
    return _block("kubectl apply")


def connect() -> list[str]:
    return _block("port-forward")


def _block(words: str) -> list[str]:
    """The only block of the page with a command that has these words."""
    (found,) = [block for block in PAGE.blocks("sh") if any(words in line for line in block.lines)]
    return list(found.lines)


def token(cluster: OneMachineCluster) -> str:
    (line,) = [line for line in connect() if "LOOM_TOKEN" in line]
    return ran(cluster, [line, 'echo "$LOOM_TOKEN"']).strip()


def quicker_drain(cluster: OneMachineCluster, seconds: int) -> None:
    """Edit the manifest, so that a test does not wait for a minute."""
    path = cluster.laptop.home / "images" / "kubernetes" / "base" / "gateway.yaml"
    path.write_text(path.read_text().replace("--drain=60", f"--drain={seconds}"))


def test_each_command_of_the_page_for_plain_manifests(cluster: OneMachineCluster) -> None:
    builds, *rest = PAGE.blocks("sh")
    assert all(line.startswith("buildah build ") for line in builds.lines)  # tests/system/images types these
    assert [list(block.lines) for block in rest] == [deploy(), connect()]
    said = ran(cluster, [*deploy(), *connect()])
    assert "deployment.apps/loom-gateway created" in said
    assert "successfully rolled out" in said
    assert "0 sessions" in said
    assert len(re.findall(r"tcp://10\.\S+:26600 │ yes", said)) == 2
    assert "{hosts: 2}" in said

    sent = base64.b64decode(ran(cluster, ["kubectl -n training get secret loom-token -o jsonpath={.data.token}"]))
    written = cluster.laptop.home / "images" / "kubernetes" / "base" / "token.env"
    assert written.read_text() == f"token={sent.decode()}\n"
    assert "created" not in ran(cluster, ["kubectl apply -n training -k images/kubernetes/base"])

    said = ran(cluster, [PAGE.command("kubectl delete")])
    assert said.count(" deleted") == 9
    assert cluster.pods(namespace="training") == []


def test_workers_with_gpus_are_deployed_in_the_same_way(cluster: OneMachineCluster) -> None:
    gpu = [line.replace("-k images/kubernetes/base", "-k images/kubernetes/gpu") for line in deploy()]
    assert gpu != deploy()
    said = ran(cluster, [*gpu, *connect(), "kubectl -n training get statefulset loom-worker -o json"])
    assert "{hosts: 2}" in said
    assert '"image": "loom-gpu:0.2.0"' in said
    ran(cluster, [PAGE.command("kubectl delete").replace("base", "gpu")])


def test_a_mistake_in_a_manifest_is_refused(cluster: OneMachineCluster) -> None:
    path = cluster.laptop.home / "images" / "kubernetes" / "base" / "workers.yaml"
    path.write_text(path.read_text().replace("  replicas: 2", "  replica: 2"))
    done = cluster.laptop.run(["bash", "-c", typed(deploy())])
    assert done.returncode != 0
    assert 'StatefulSet "loom-worker" is invalid' in done.stderr
    assert "'replica' was unexpected" in done.stderr
    assert cluster.pods("loom-worker", "training") == []


def test_an_upgrade_tells_the_sessions_and_replaces_the_gateway(cluster: OneMachineCluster) -> None:
    quicker_drain(cluster, 3)
    ran(cluster, deploy())
    (before,) = cluster.pods("loom-gateway", "training")
    program = FOLLOW.format(target='"kube://training/loom-gateway", sys.argv[1]')
    follower = cluster.laptop.popen(
        [sys.executable, "-c", program, token(cluster)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        assert follower.stdout is not None
        assert follower.stdout.readline().startswith("open ")
        kustomization = cluster.laptop.home / "images" / "kubernetes" / "base" / "kustomization.yaml"
        kustomization.write_text(kustomization.read_text().replace("newTag: 0.2.0", "newTag: 0.2.1"))
        said = ran(cluster, ["kubectl apply -n training -k images/kubernetes/base", deploy()[-1]])
        assert "deployment.apps/loom-gateway configured" in said
        told = list(follower.stdout)
        # Its workers end first, while the gateway's pod is still in its preStop.
        assert any(said.startswith("gateway_draining {'seconds': 2.9") for said in told), told
        assert told[-1].endswith('the gateway was stopped"}\n'), told
    finally:
        follower.kill()
        follower.communicate()
    (after,) = cluster.pods("loom-gateway", "training")
    assert after.name != before.name
    assert "{hosts: 2}" in ran(cluster, connect())


def test_the_address_of_a_service_outlives_its_port_forward(cluster: OneMachineCluster) -> None:
    (reaching,) = Page.of("docs/deploy/reaching.md").blocks("python")
    ran(cluster, deploy())
    (line,) = [line for line in reaching.lines if "kube://training/loom-gateway" in line]
    expression = line.removeprefix("job = ").partition("  #")[0].replace("…", token(cluster))
    program = cluster.laptop.popen(
        [sys.executable, "-c", COUNT.format(connect=expression)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert program.stdin is not None
        assert program.stdout is not None
        for number in (1, 2, 3):
            program.stdin.write("\n")
            program.stdin.flush()
            assert program.stdout.readline() == f"[{number}]\n"
            forwards = subprocess.run(
                ["pgrep", "-f", "kubectl port-forward --address 127.0.0.1 -n training svc/loom-gateway"],
                capture_output=True,
                text=True,
                check=True,
            )
            for pid in forwards.stdout.split():
                subprocess.run(["kill", "-KILL", pid], check=False)
        program.stdin.close()
        assert program.stdout.readline() == "closed\n"
    finally:
        program.kill()
        program.wait()


def test_what_is_wrong_with_the_name_of_a_service_is_said(cluster: OneMachineCluster) -> None:
    for address, said in (
        ("kube://nowhere/loom-gateway", 'namespaces "nowhere" not found'),
        ("kube://default/nothing", 'services "nothing" not found'),
    ):
        done = cluster.laptop.run([sys.executable, "-c", CONNECT, address])
        assert said in done.stdout


def reached(cluster: OneMachineCluster, gateway: str) -> list[str]:
    """The addresses of the workers that the gateway in a pod reaches, in its order."""
    try:
        answer = json.loads(cluster.execute(gateway, ["loom", "status", "--json"], "research"))
    except RuntimeError:  # it does not listen yet
        return []
    addresses = [worker["address"] for worker in answer["workers"] if worker["reachable"]]
    return [address.removeprefix("tcp://").removesuffix(":26600") for address in addresses]


def test_the_gateways_of_the_page_about_workers_find_them(cluster: OneMachineCluster) -> None:
    (block,) = Page.of("docs/deploy/workers.md").blocks("sh")
    commands = block.lines
    assert len(commands) == 2
    env = {"PATH": PATH, "LOOM_TOKEN": "secret", "LOOM_URL": "ws://127.0.0.1:8470"}
    serve = ["sh", "-c", 'exec loom serve worker --address "tcp://$(hostname -i):26600"']
    listening = {"tcpSocket": {"port": 26600}}
    common = {"env": env, "namespace": "research", "readiness": listening}
    cluster.run_container("gpus", serve, replicas=4, stateful=True, **common)  # type: ignore[arg-type]
    cluster.run_container("loaders", serve, **common)  # type: ignore[arg-type]
    for name in ("loom-workers", "gpu-workers"):
        spec = {"clusterIP": "None", "selector": {"app": "gpus"}, "ports": [{"port": 26600}]}
        cluster.apply({"kind": "Service", "metadata": {"name": name, "namespace": "research"}, "spec": spec})
    (loader,) = cluster.wait_ready("loaders", 1, namespace="research")
    gpus = [pod.address for pod in cluster.wait_ready("gpus", 4, namespace="research")]
    # A pod's home is a folder of the test's, whose name is too long for sockets in it.
    write = f"echo tcp://{loader.address}:26600 > loaders && export XDG_STATE_HOME=$(mktemp -d) && exec "
    for number, (command, expected) in enumerate(zip(commands, (gpus, [*gpus, loader.address]), strict=True)):
        name = f"gateway-{number}"
        command = command.replace("/etc/loom/loaders", "loaders")  # a pod's /etc is this machine's
        cluster.run_container(name, ["sh", "-c", write + command], env=env, namespace="research")
        (pod,) = cluster.wait_ready(name, 1, namespace="research")
        reach = functools.partial(reached, cluster, pod.name)
        cluster.wait_until(
            lambda reach=reach, all=expected: reach() == all, 60.0, f"{command} to reach its workers"
        )
