"""The network policies of a job's pods: what they close, and what is said if this user may not apply them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import loom
from loom_proxy.kubernetes.network_policy import PortPolicies

kt = pytest.importorskip("kubetorch")

FORBIDDEN = (
    'Error from server (Forbidden): error when creating "STDIN": networkpolicies.networking.k8s.io is forbidden: '
    'User "someone" cannot create resource "networkpolicies" in API group "networking.k8s.io" in the namespace "ml"'
)


class Kubectl:
    """In the place of kubectl: it writes down what it is given, and says what it is told to say."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        script = 'cd "$(dirname "$0")"; echo "$@" >> said; cat > given; cat error >&2; exit $(cat code)'
        (folder / "kubectl").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "kubectl").chmod(0o755)
        self.fails("", 0)

    def fails(self, error: str, code: int = 1) -> None:
        (self._folder / "error").write_text(error)
        (self._folder / "code").write_text(str(code))

    @property
    def said(self) -> list[str]:
        return (self._folder / "said").read_text().splitlines()

    @property
    def given(self) -> list[Any]:
        given = (self._folder / "given").read_text()
        assert not given.lstrip().startswith("{"), "kubectl would take it for JSON, which has one document"
        return list(yaml.safe_load_all(given))


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kubectl:
    kubectl = Kubectl(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return kubectl


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KT_USERNAME", "ada")


def policies(**options: Any) -> PortPolicies:
    meshes = {"workers": {"app": "mine"}, "loaders": kt.Compute(cpus=1, namespace="ml")}
    job = loom.KubernetesJob(meshes=meshes, name="digits", namespace="ml", **options)
    assert job._policies is not None
    return job._policies


def opens(manifest: dict[str, Any], port: int, **labels: str) -> bool:
    """Whether a pod with labels, in the namespace of the policy, reaches a port by TCP."""
    for rule in manifest["spec"]["ingress"]:
        ports = [one for one in rule.get("ports", []) if one["protocol"] == "TCP"]
        matches = "ports" not in rule or any(
            one["port"] <= port <= one.get("endPort", one["port"]) for one in ports
        )
        peers = [one["podSelector"]["matchLabels"] for one in rule.get("from", []) if "podSelector" in one]
        if matches and ("from" not in rule or any(peer.items() <= labels.items() for peer in peers)):
            return True
    return False


def test_the_policies_are_valid_and_select_the_pods_of_each_mesh() -> None:
    first, second = policies().manifests()

    for manifest in (first, second):
        kubernetes_validate.validate(manifest, "1.32", strict=True)
    assert first["spec"]["podSelector"] == {"matchLabels": {"app": "mine"}}
    assert second["spec"]["podSelector"] == {
        "matchLabels": {"kubetorch.com/service": second["metadata"]["name"][:-6]}
    }


@pytest.mark.guarantees(
    "ports",
    "A `KubernetesJob` closes 26600, 26599, 8470 to 8473 and the ephemeral ports to all but its pods, and "
    "leaves the others open",
)
@pytest.mark.parametrize("port", [26600, 26599, 8470, 8471, 8472, 8473, 32768, 43210, 65535])
def test_what_asks_for_no_token_is_for_the_jobs_pods_only(port: int) -> None:
    for manifest in policies().manifests():
        assert opens(manifest, port, app="mine")
        assert not opens(manifest, port, app="other")


@pytest.mark.parametrize("port", [1, 80, 8469, 8474, 26598, 26601, 32300, 32767])
def test_all_other_ports_stay_open(port: int) -> None:
    for manifest in policies().manifests():
        assert opens(manifest, port, app="other")


def test_the_ports_are_the_jobs() -> None:
    manifest = policies(monarch_port=30000).manifests()[0]

    assert not opens(manifest, 30000)
    assert not opens(manifest, 29999)
    assert opens(manifest, 26600)


def test_clients_come_to_the_gateway_through_kubetorchs_namespace() -> None:
    rule = policies().manifests()[0]["spec"]["ingress"][1]

    assert rule["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kubetorch"}}}]
    assert rule["ports"] == [{"protocol": "TCP", "port": 8470}]


def test_they_are_applied_and_removed_by_kubectl(kubectl: Kubectl, caplog: pytest.LogCaptureFixture) -> None:
    made = policies()

    made.apply()
    assert kubectl.given == made.manifests()
    made.remove()
    names = [manifest["metadata"]["name"] for manifest in made.manifests()]
    assert kubectl.said == [
        "--namespace ml apply -f -",
        f"--namespace ml delete networkpolicy --ignore-not-found {' '.join(names)}",
    ]
    assert caplog.text == ""


@pytest.mark.guarantees("ports", "If this user may not do that, a warning names the right")
def test_a_warning_names_the_right_that_is_missing(kubectl: Kubectl, caplog: pytest.LogCaptureFixture) -> None:
    kubectl.fails(FORBIDDEN)

    policies().apply()

    assert (
        "the ports 8470, 8471, 8472, 8473, 26599, 26600 and those from 32768 on of this job's pods are open"
        in caplog.text
    )
    assert "the right to create networkpolicies of networking.k8s.io in the namespace ml is missing" in caplog.text
    assert "a Role with the verbs get, create, patch and delete of networkpolicies in ml" in caplog.text


def test_a_warning_says_that_kubectl_is_missing_or_what_it_says(
    kubectl: Kubectl, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubectl.fails("The connection to the server was refused")
    policies().apply()
    assert "The connection to the server was refused. Ask for a Role" in caplog.text

    monkeypatch.setenv("PATH", "")
    policies().apply()
    assert "kubectl is not installed here" in caplog.text


def test_a_job_may_be_told_to_leave_them_out() -> None:
    assert loom.KubernetesJob(selector={"app": "mine"}, network_policy=False)._policies is None
