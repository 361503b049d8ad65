"""What a `loom.KubernetesJob` cannot be made of. What it does is tested in tests/cluster."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest

import loom
from loom_gateway.pod.loom_pod import LoomPod
from loom_gateway.pod.settings_and_peers import MeshPods, PodSettings
from loom_gateway.pod.supervisor import PodSupervisor
from loom_proxy.kubernetes.rollout import check_versions
from loom_proxy.kubernetes.service_lookup import token_for

kt = pytest.importorskip("kubetorch")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    "given",
    [{}, {"compute": "both", "selector": {"app": "mine"}}, {"selector": {}}, {"meshes": {}}],
    ids=["neither", "both", "no labels", "no meshes"],
)
def test_exactly_one_source_of_pods_is_needed(given: dict[str, Any]) -> None:
    with pytest.raises(loom.WrongArguments, match=r"exactly one of compute=kt\.Compute"):
        loom.KubernetesJob(**given)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"selector": {"app": "mine"}, "name": "My Job"}, "'My Job' cannot name a job in Kubernetes"),
        ({"selector": {"app": "mine"}, "monarch_port": 0}, "monarch_port is 0"),
        ({"selector": {"app": "mine"}, "monarch_port": 32300}, "port 32300 of a pod is for Kubetorch's server"),
        ({"selector": {"app": "mine"}, "monarch_port": 8470}, "port 8470 of a pod is for the gateway"),
        ({"selector": {"app": "mine"}, "monarch_port": 8474}, "port 8473 of a pod is for other gateways"),
        (
            {"selector": {"app": "mine"}, "injectable": True},
            "those of workers run already: deploy them with LOOM_INJ",
        ),
        ({"compute": 3}, r"the pods of workers are 3: give a kt\.Compute"),
        ({"meshes": {"my-mesh": {"app": "mine"}}}, "'my-mesh' cannot name a mesh"),
    ],
)
def test_what_makes_no_sense_is_named(given: dict[str, Any], why: str) -> None:
    with pytest.raises(loom.WrongArguments, match=why):
        loom.KubernetesJob(**given)


def test_a_job_has_one_namespace() -> None:
    with pytest.raises(loom.WrongArguments, match="in namespace 'theirs', and the job in 'ours'"):
        loom.KubernetesJob(compute=kt.Compute(cpus=1, namespace="theirs"), namespace="ours")


def test_without_kubetorch_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubetorch", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(loom.MissingDependency, match=r"pip install 'monarch-loom\[kubetorch\]'"):
        loom.KubernetesJob(selector={"app": "mine"})


def test_before_it_is_applied_it_has_no_session() -> None:
    job = loom.KubernetesJob(selector={"app": "mine"}, name="digits")

    with pytest.raises(AttributeError, match="no 'hosts' before it has a session: call apply"):
        job.hosts
    with pytest.raises(loom.LoomError, match="call apply"):
        job.job
    assert "digits" in repr(job)


def test_a_jobs_token_is_kept_where_only_its_user_reads_it(home: Path) -> None:
    first, again, other = token_for("ns", "loom"), token_for("ns", "loom"), token_for("ns", "other")

    (path, _) = sorted((home / ".local/state/loom/kubernetes").iterdir())
    assert first == again != other
    assert path.stat().st_mode & 0o077 == 0


def pod(**versions: str) -> dict[str, Any]:
    here = ".".join(map(str, sys.version_info[:3]))
    return {"name": "loom-1", "versions": {"python": here, "monarch-loom": loom.__version__, **versions}}


def test_pods_may_have_another_minor_version_of_loom() -> None:
    check_versions(pod(**{"monarch-loom": loom.__version__.split(".")[0] + ".99.0"}))


def test_pods_of_another_python_or_another_major_version_are_refused() -> None:
    with pytest.raises(loom.PythonVersionMismatch, match=r"pod loom-1 has Python 3\.1 and this is Python 3\."):
        check_versions(pod(python="3.1.4"))
    with pytest.raises(
        loom.ProtocolMismatch, match=rf"pod loom-1 has Loom 99\.0\.0 and this is Loom {loom.__version__}"
    ):
        check_versions(pod(**{"monarch-loom": "99.0.0"}))


def test_without_an_address_of_nginx_a_port_is_forwarded_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kt.config, "_api_url", None)
    monkeypatch.delenv("KT_API_URL", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    job = loom.KubernetesJob(selector={"app": "mine"}, service="mine", namespace="ours")

    assert job.service_url == "kube://kubetorch/kubetorch-controller:8080/ours/mine:8470"


@pytest.mark.parametrize(
    ("given", "scheme"), [("https://kt.example/prefix/", "wss"), ("http://kt.example/prefix", "ws")]
)
def test_an_address_of_nginx_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch, given: str, scheme: str) -> None:
    monkeypatch.setattr(kt.config, "_api_url", given)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    job = loom.KubernetesJob(selector={"app": "mine"}, service="mine", namespace="ours")

    assert job.service_url == f"{scheme}://kt.example/prefix/ours/mine:8470"


def test_the_most_that_a_session_lives_reaches_the_session_hosts(tmp_path: Path) -> None:
    job = loom.KubernetesJob(compute=kt.Compute(cpus=1), session_max=7200)

    args = job._init_args(job._meshes[0])

    assert args["session_max"] == 7200
    assert set(args) <= set(inspect.signature(LoomPod).parameters)
    settings = PodSettings("workers", (MeshPods("workers", "w", 2),), "digest", session_max=args["session_max"])
    arguments = list(PodSupervisor(settings, tmp_path, "127.0.0.1", "pod-0").session_host._arguments())
    assert float(arguments[arguments.index("--session-max") + 1]) == 7200


def test_pods_of_an_older_image_are_not_told_of_what_is_not_wanted() -> None:
    job = loom.KubernetesJob(compute=kt.Compute(cpus=1))

    assert "session_max" not in job._init_args(job._meshes[0])
