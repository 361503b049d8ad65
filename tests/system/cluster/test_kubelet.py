"""The cluster on one machine enforces what a pod's manifest says: who violates it fails."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.cluster import OneMachineCluster, missing
from tests.support.cluster.kubelet.image import Image
from tests.support.cluster.kubelet.memory import can_limit
from tests.support.cluster.kubelet.rights import Rights
from tests.support.needs import skipped_if

pytestmark = pytest.mark.guarantees("workers", "The cluster in which this is tested enforces what manifests say")
needs_cluster = [skipped_if(missing()), pytest.mark.timeout(200), pytest.mark.slow]

FOR_EVER = ["sleep", "infinity"]

LOCKED = {
    "runAsUser": 10001,
    "runAsGroup": 10001,
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


VOLUMES = [{"name": "tmp", "emptyDir": {}}]


def test_a_container_that_must_not_be_root_and_is_does_not_start() -> None:
    with pytest.raises(ValueError, match="runAsNonRoot"):
        Rights.of({"securityContext": {"runAsNonRoot": True}}, {}, Image())
    assert Rights.of({"securityContext": {"runAsNonRoot": True}}, {}, Image(user=7)).user == 7


@pytest.fixture(scope="module")
def cluster() -> Iterator[OneMachineCluster]:
    with OneMachineCluster(images={"ours": Image(working_dir="/home/loom", user=10001)}) as cluster:
        yield cluster


@contextlib.contextmanager
def pod(
    cluster: OneMachineCluster, command: list[str], container: dict[str, Any] | None = None, **spec: Any
) -> Iterator[str]:
    """A pod of one container named ``one``; its name, when it is there."""
    containers = [{"name": "main", "image": "local", "command": command, **(container or {})}]
    template = {"metadata": {"labels": {"app": "one"}}, "spec": {"containers": containers, **spec}}
    cluster.apply(
        {
            "kind": "StatefulSet",
            "metadata": {"name": "one", "namespace": "default"},
            "spec": {"replicas": 1, "selector": {"matchLabels": {"app": "one"}}, "template": template},
        }
    )
    try:
        cluster.wait_until(lambda: bool(cluster.pods("one")), 20.0, "the pod")
        yield "one-0"
    finally:
        cluster.remove("one")


def eventually(true: Any, what: str, timeout: float = 20.0) -> None:
    OneMachineCluster.wait_until(true, timeout, what)


def status(cluster: OneMachineCluster, name: str = "one-0") -> dict[str, Any]:
    """The status of a pod's container, as Kubernetes' API has it."""
    found: dict[str, Any] = cluster.described(name)["status"]["containerStatuses"][0]
    return found


def fails(cluster: OneMachineCluster, name: str, script: str, match: str) -> None:
    with pytest.raises(RuntimeError, match=match):
        cluster.execute(name, ["sh", "-c", script])


class TestFiles:
    pytestmark = needs_cluster

    def test_a_read_only_root_is_read_only_and_volumes_are_not(self, cluster: OneMachineCluster) -> None:
        container = {
            "image": "ours",
            "securityContext": {**LOCKED, "runAsUser": 0, "runAsGroup": 0},
            "volumeMounts": [{"name": "state", "mountPath": "/var/lib/loom"}],
        }
        with pod(cluster, FOR_EVER, container, volumes=[{"name": "state", "emptyDir": {}}]) as name:
            cluster.wait_ready("one", 1)
            for place in ("/", "/tmp", "/var/tmp", "/home/loom", "/root", "/var/lib", "/etc", "/usr/local"):
                fails(cluster, name, f"touch {place}/touched", "Read-only file system")
            said = cluster.execute(
                name, ["sh", "-c", "touch /var/lib/loom/touched /dev/shm/touched; pwd; echo $HOME"]
            )
            assert said.split() == ["/home/loom", "/root"]

    def test_a_container_has_the_ids_and_the_capabilities_of_its_manifest(self, cluster: OneMachineCluster) -> None:
        own = "id -u; id -G; echo $HOME; grep -E 'CapEff|CapBnd|NoNewPrivs' /proc/self/status"
        mounts = [{"name": "home", "mountPath": "/home/loom"}]
        volumes = [{"name": "home", "emptyDir": {}}]
        container = {"image": "ours", "securityContext": LOCKED, "volumeMounts": mounts}
        command = ["sh", "-c", f"{own}; exec sleep infinity"]
        with pod(cluster, command, container, volumes=volumes, securityContext={"fsGroup": 777}) as name:
            cluster.wait_ready("one", 1)
            said = cluster.execute(name, ["sh", "-c", own])
            expected = "10001 10001 777 /home/loom NoNewPrivs: 1 CapEff: 0000000000000000 CapBnd: 0000000000000000"
            assert sorted(said.split()) == sorted(expected.split())
            assert said in cluster.logs(name)
            cluster.execute(name, ["touch", "/home/loom/touched"])
            assert cluster.execute(name, ["stat", "-c", "%u:%g", "/home/loom/touched"]) == "10001:777\n"

    def test_a_volume_in_memory_and_one_on_the_disk_have_limits(self, cluster: OneMachineCluster) -> None:
        mounts = [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "data", "mountPath": "/srv/data"}]
        volumes = [
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
            {"name": "data", "emptyDir": {"sizeLimit": "2Mi"}},
        ]
        with pod(cluster, FOR_EVER, {"volumeMounts": mounts}, volumes=volumes) as name:
            cluster.wait_ready("one", 1)
            fails(cluster, name, "dd if=/dev/zero of=/dev/shm/much bs=1M count=2", "No space left")
            before = cluster.pod(name).address
            cluster.execute(name, ["dd", "if=/dev/zero", "of=/srv/data/much", "bs=1M", "count=3"])
            eventually(lambda: before not in [one.address for one in cluster.pods("one")], "the eviction")
            eventually(lambda: len(cluster.wait_ready("one", 1)) == 1, "the next pod")
            assert 'Usage of EmptyDir volume "data" exceeds the limit "2Mi"' in cluster.logs(name)

    def test_a_pod_that_writes_too_much_beside_its_volumes_is_evicted(self, cluster: OneMachineCluster) -> None:
        container = {"image": "ours", "resources": {"limits": {"ephemeral-storage": "2Mi"}}}
        with pod(cluster, FOR_EVER, container) as name:
            cluster.wait_ready("one", 1)
            before = cluster.pod(name).address
            cluster.execute(name, ["dd", "if=/dev/zero", "of=/home/loom/much", "bs=1M", "count=3"])
            eventually(lambda: before not in [one.address for one in cluster.pods("one")], "the eviction")

    def test_a_pod_waits_for_its_secret_and_gets_the_next_one(self, cluster: OneMachineCluster) -> None:
        def secret(**data: str) -> dict[str, Any]:
            encoded = {name: base64.b64encode(text.encode()).decode() for name, text in data.items()}
            return {"kind": "Secret", "metadata": {"name": "keys", "namespace": "default"}, "data": encoded}

        mounts = [{"name": "keys", "mountPath": "/etc/keys"}, {"name": "more", "mountPath": "/etc/more"}]
        volumes = [
            {"name": "keys", "secret": {"secretName": "keys", "defaultMode": 0o400}},
            {"name": "more", "secret": {"secretName": "nothing", "optional": True}},
        ]
        with pod(cluster, FOR_EVER, {"volumeMounts": mounts}, volumes=volumes) as name:
            eventually(
                lambda: cluster.pod(name).state == "CreateContainerConfigError", "the pod to say what it lacks"
            )
            cluster.apply(secret(one="1", two="2"))
            cluster.wait_ready("one", 1)
            assert cluster.execute(
                name, ["sh", "-c", "cd /etc/keys; ls; stat -Lc %a one; ls /etc/more"]
            ).split() == [
                "one",
                "two",
                "400",
            ]
            fails(cluster, name, "touch /etc/keys/touched", "Read-only file system")
            cluster.apply(secret(one="changed"))
            eventually(lambda: cluster.execute(name, ["cat", "/etc/keys/one"]) == "changed", "the next Secret")
            assert cluster.execute(name, ["ls", "/etc/keys"]) == "one\n"

    def test_a_claim_outlives_its_pod(self, cluster: OneMachineCluster) -> None:
        claimed = {"name": "kept", "persistentVolumeClaim": {"claimName": "kept"}}
        container = {"volumeMounts": [{"name": "kept", "mountPath": "/srv/kept"}]}
        with pod(cluster, FOR_EVER, container, volumes=[claimed]) as name:
            eventually(
                lambda: cluster.pod(name).state == "CreateContainerConfigError", "the pod to say what it lacks"
            )
            cluster.apply({"kind": "PersistentVolumeClaim", "metadata": {"name": "kept", "namespace": "default"}})
            cluster.wait_ready("one", 1)
            cluster.execute(name, ["touch", "/srv/kept/file"])
            cluster.delete_pod(name)
            cluster.wait_ready("one", 1)
            assert cluster.execute(name, ["ls", "/srv/kept"]) == "file\n"


@pytest.mark.skipif(not can_limit(), reason="this machine has no control groups of version 1 for memory")
class TestMemory:
    pytestmark = needs_cluster

    def test_a_container_that_needs_more_memory_than_it_may_is_killed_whole(
        self, cluster: OneMachineCluster
    ) -> None:
        # The first process needs little: it is what it has started that needs too much.
        script = "[ -e /tmp/again ] && exec sleep infinity; touch /tmp/again; "
        script += "python3 -c 'import time; a = bytearray(200 << 20); time.sleep(60)'; sleep infinity"
        container = {
            "resources": {"limits": {"memory": "64Mi"}},
            "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        }
        with pod(cluster, ["sh", "-c", script], container, volumes=VOLUMES) as name:
            eventually(lambda: bool(status(cluster)["restartCount"]), "the kernel to kill it")
            assert status(cluster)["lastState"]["terminated"] == {"exitCode": 137, "reason": "OOMKilled"}
            cluster.wait_ready("one", 1)
            limit = cluster.execute(name, ["cat", "/sys/fs/cgroup/memory/memory.limit_in_bytes"])
            assert int(limit) == 64 << 20


class TestProbes:
    pytestmark = needs_cluster

    def probed(self, **probes: Any) -> dict[str, Any]:
        return {"volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}], **probes}

    def file(self, name: str, **more: Any) -> dict[str, Any]:
        return {"exec": {"command": ["test", "-e", f"/tmp/{name}"]}, "periodSeconds": 1, **more}

    def test_a_pod_that_is_not_ready_is_no_endpoint_and_keeps_running(self, cluster: OneMachineCluster) -> None:
        container = self.probed(readinessProbe=self.file("ready", failureThreshold=2))
        cluster.apply(
            {
                "kind": "Service",
                "metadata": {"name": "one", "namespace": "default"},
                "spec": {"clusterIP": "None", "selector": {"app": "one"}, "ports": [{"port": 1}]},
            }
        )
        with pod(cluster, FOR_EVER, container, volumes=VOLUMES) as name:
            (address,) = [cluster.pod(name).address]
            endpoints = lambda: cluster.resolve("one.default.svc.cluster.local")  # noqa: E731
            eventually(lambda: cluster.pod(name).state == "Running", "the container to run")
            assert endpoints() == []
            cluster.execute(name, ["touch", "/tmp/ready"])
            eventually(lambda: endpoints() == [address], "the endpoint")
            cluster.execute(name, ["rm", "/tmp/ready"])
            eventually(lambda: endpoints() == [], "no endpoint")
            assert status(cluster)["restartCount"] == 0

    def test_a_container_that_fails_its_liveness_probe_is_started_again(self, cluster: OneMachineCluster) -> None:
        alive = self.file("alive", failureThreshold=2)
        container = self.probed(startupProbe=self.file("alive", failureThreshold=60), livenessProbe=alive)
        command = ["sh", "-c", "trap 'echo told; exit 3' TERM; touch /tmp/alive; while :; do sleep 0.1; done"]
        with pod(cluster, command, container, volumes=VOLUMES) as name:
            cluster.wait_ready("one", 1)
            cluster.execute(name, ["rm", "/tmp/alive"])
            eventually(lambda: status(cluster)["restartCount"] == 1, "another start")
            assert "told" in cluster.logs(name)
            assert status(cluster)["lastState"]["terminated"]["exitCode"] == 3

    def test_a_container_that_does_not_start_in_time_is_started_again(self, cluster: OneMachineCluster) -> None:
        container = self.probed(
            startupProbe=self.file("nothing", failureThreshold=2), readinessProbe=self.file("ready")
        )
        with pod(cluster, ["sh", "-c", "touch /tmp/ready; exec sleep infinity"], container, volumes=VOLUMES):
            eventually(lambda: status(cluster)["restartCount"] == 1, "another start")
            assert not cluster.pod("one-0").ready  # as long as it has not started


class TestEnds:
    pytestmark = needs_cluster

    def ended(self, cluster: OneMachineCluster, script: str, hook: dict[str, Any], grace: int) -> str:
        """What a container says that is deleted."""
        said = cluster.logs("one-0")  # of the pods before, which had its name
        container = {"lifecycle": {"preStop": hook}}
        command = ["sh", "-c", script]
        with pod(cluster, command, container, terminationGracePeriodSeconds=grace) as name:
            cluster.wait_ready("one", 1)
            eventually(lambda: "started" in cluster.logs(name).removeprefix(said), "its start")
            cluster.delete_pod(name)
            return cluster.logs(name).removeprefix(said).partition("started")[2]

    def test_the_hook_runs_before_the_signal(self, cluster: OneMachineCluster) -> None:
        script = "trap 'echo told; exit 0' TERM; echo started; while :; do sleep 0.05; done"
        hook = {"exec": {"command": ["sh", "-c", "echo stopping >> /proc/1/fd/1"]}}
        assert self.ended(cluster, script, hook, 20).split()[:2] == ["stopping", "told"]

    def test_what_does_not_end_in_the_grace_period_is_killed_and_the_hook_counts(
        self, cluster: OneMachineCluster
    ) -> None:
        script = "trap 'echo told' TERM; echo started; while :; do sleep 0.05; done"
        assert self.ended(cluster, script, {"sleep": {"seconds": 60}}, 1).split()[:1] == ["told"]
