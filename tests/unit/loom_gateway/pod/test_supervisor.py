"""What a pod's processes are told, and what its keeper says of them. Nothing is started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loom.process.child import ProcessState
from loom.token_file import TokenFile
from loom_gateway.pod.settings_and_peers import MeshPods, PodSettings
from loom_gateway.pod.supervisor import PodSupervisor, SupervisedProcess

SHA256 = "0123456789abcdef" * 4


def supervisor(folder: Path, mesh: str = "workers", name: str = "pod-0", sha256: str = SHA256) -> PodSupervisor:
    settings = PodSettings(mesh, (MeshPods("workers", "w.ns", 3), MeshPods("loaders", "l.ns", 1)), sha256)
    folder.mkdir(exist_ok=True)
    made = PodSupervisor(settings, folder, "10.0.0.7", name)
    made._write_secrets()
    return made


def option(process: SupervisedProcess, word: str) -> str:
    arguments = list(process._arguments())
    return arguments[arguments.index(word) + 1]


def secrets_in(pod: PodSupervisor) -> Sequence[str]:
    return [path.read_text() for path in (pod._host_key, pod._weaver_secret)]


def test_gateways_find_the_session_hosts_and_all_the_weaver_by_the_pods_name(tmp_path: Path) -> None:
    pod = supervisor(tmp_path)

    assert option(pod.session_host, "--listen") == "10.0.0.7:8472"
    assert option(pod.gateway, "--session-host") == "dns://w.ns:8472?count=3"
    assert option(pod.gateway, "--gateways-listen") == "10.0.0.7:8473"
    assert option(pod.weaver, "--listen") == "10.0.0.7:8471"
    assert option(pod.weaver, "--advertise") == "w.ns"
    for process in (pod.gateway, pod.session_host):
        assert option(process, "--weaver") == "w.ns:8471"


def test_all_pods_of_a_job_have_the_same_secrets_and_those_of_another_job_others(tmp_path: Path) -> None:
    first, second = supervisor(tmp_path / "0"), supervisor(tmp_path / "1", name="pod-1")
    other = supervisor(tmp_path / "2", sha256="f" * 64)

    assert secrets_in(first) == secrets_in(second)
    found = {*secrets_in(first), *secrets_in(other)}
    assert len(found) == 4
    assert not any(SHA256 in one for one in found)
    assert {path.stat().st_mode & 0o777 for path in (first._host_key, first._weaver_secret)} == {0o600}


def test_a_session_that_one_gateway_opened_has_a_token_that_the_others_know(tmp_path: Path) -> None:
    pods = [supervisor(tmp_path / str(number)) for number in range(2)]

    ((first,), (second,)) = (TokenFile(pod._tokens).read() for pod in pods)

    assert (first.id, first.sha256) == (second.id, second.sha256) == (SHA256[:8], SHA256)


async def test_a_pod_says_what_does_not_run_yet(tmp_path: Path) -> None:
    pod = supervisor(tmp_path)
    pod.session_host.keep()
    pod.gateway.keep()
    try:
        problem = pod.state()["gateway_problem"]
        assert problem.startswith(
            "its session host: it is starting; its gateway: it is starting; it has not looked"
        )
        assert not pod.state()["gateway_listening"]
        for process in (pod.session_host, pod.gateway):
            process.state, process.problem = ProcessState.LISTENING, ""
        pod._problem = ""
        assert pod.state()["gateway_problem"] == ""
        assert pod.state()["gateway_listening"]
        assert not pod.state()["weaver"]
    finally:
        for process in (pod.session_host, pod.gateway):
            await process.end()


def test_a_pod_of_another_mesh_serves_nobody(tmp_path: Path) -> None:
    pod = supervisor(tmp_path, mesh="loaders")

    assert (pod.state()["gateway"], pod.state()["gateway_problem"], pod.state()["weaver"]) == (False, "", False)
