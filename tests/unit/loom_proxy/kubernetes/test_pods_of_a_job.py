"""What a job on a `kt.Compute` asks Kubetorch for, and what its pods are told: the workers of their sessions.

Kubetorch's client is real; nothing is deployed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import loom
from loom_gateway.pod.settings_and_peers import MeshPods, PodSettings
from loom_gateway.pod.supervisor import PodSupervisor
from loom_gateway.workers.sources import parse_source
from loom_proxy.kubernetes.job import KubernetesJob

kt = pytest.importorskip("kubetorch")


def supervisor(job: KubernetesJob, folder: Path) -> PodSupervisor:
    """The supervisor of a pod of the first mesh, with the settings that the job gives it."""
    args = job._init_args(job._meshes[0])
    meshes = tuple(MeshPods(*one) for one in args["meshes"])
    settings = PodSettings(args["mesh"], meshes, args["token_sha256"], args["monarch_port"], args["gateway_port"])
    return PodSupervisor(settings, folder, "10.0.0.7", "pod-0")


def sources(job: KubernetesJob, folder: Path) -> list[str]:
    arguments = list(supervisor(job, folder).session_host._arguments())
    return [arguments[number + 1] for number, one in enumerate(arguments) if one == "--workers"]


def test_a_job_deploys_looms_class_in_each_pod_of_its_compute() -> None:
    job = loom.KubernetesJob(compute=kt.Compute(cpus=1, replicas=3), name="mine")
    (mesh,) = job._meshes

    remote = mesh.remote

    assert remote.compute is mesh.compute
    assert (remote._import_path, remote._callable_name) == ("loom_gateway.pod.loom_pod", "LoomPod")
    assert mesh.pods_wanted == 3
    assert mesh.service_name.endswith("mine")


def test_a_compute_gets_a_headless_service_by_a_local_distribution() -> None:
    job = loom.KubernetesJob(compute=kt.Compute(cpus=1, replicas=3))
    (mesh,) = job._meshes

    mesh.complete_compute()

    asked = mesh.compute.distributed_config
    assert (asked["distribution_type"], asked["quorum_workers"]) == ("local", 3)
    assert mesh.headless == f"{mesh.service_name}-headless"


def test_sessions_of_a_job_have_the_workers_of_all_its_pods_as_one_mesh(tmp_path: Path) -> None:
    job = loom.KubernetesJob(
        compute=kt.Compute(cpus=1, replicas=3, namespace="ours"), namespace="ours", name="mine"
    )
    (mesh,) = job._meshes

    (source,) = sources(job, tmp_path)

    name = f"{mesh.service_name}-headless.ours.svc.cluster.local"
    assert source == f"workers=dns://{name}:26600?count=3"
    assert parse_source(source)[0] == "workers"


def test_each_pod_has_a_worker_at_its_own_address_and_the_jobs_port(tmp_path: Path) -> None:
    job = loom.KubernetesJob(compute=kt.Compute(cpus=1))

    worker = supervisor(job, tmp_path).worker

    assert "tcp://10.0.0.7:26600" in list(worker._arguments())


def test_several_meshes_keep_their_names_in_the_sessions(tmp_path: Path) -> None:
    computes = {"trainers": kt.Compute(cpus=1, replicas=2), "loaders": kt.Compute(cpus=1)}
    job = loom.KubernetesJob(meshes=computes)

    found = sources(job, tmp_path)

    assert [one.partition("=")[0] for one in found] == ["trainers", "loaders"]
    assert [one.rpartition("=")[2] for one in found] == ["2", "1"]


def test_state_opens_a_session_on_the_pods_once_and_names_their_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    class Session:
        closed = False

        def state(self) -> Any:
            return {"workers": "three hosts"}

    def connect(url: str, token: str, *args: Any, **options: Any) -> Session:
        opened.append((url, token))
        return Session()

    job = loom.KubernetesJob(compute=kt.Compute(cpus=1, replicas=3), token="t0ken", network_policy=False)
    (mesh,) = job._meshes
    deployed: list[Any] = []
    monkeypatch.setattr(mesh, "exists", lambda: True)
    monkeypatch.setattr(mesh, "deploy", deployed.append)
    monkeypatch.setattr("loom_proxy.kubernetes.job.PodStart.wait", lambda start: None)
    monkeypatch.setattr("loom_proxy.kubernetes.job.connect", connect)
    monkeypatch.setattr("loom_proxy.kubernetes.job.look_after_pods", lambda *args: None)

    before = list(opened)
    states: list[Any] = [job.state(), job.state()]

    assert before == []
    assert states == [{"workers": "three hosts"}] * 2
    assert [one["mesh"] for one in deployed] == ["workers"]
    assert opened == [(job.service_url, "t0ken")]
