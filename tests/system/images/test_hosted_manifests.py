"""``images/kubernetes/hosted``: its pods agree with each other and with Loom's command line."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from loom_gateway.sessions.driver_ids import NEEDED
from tests.support.cluster.policies import selects
from tests.support.paths import ROOT
from tests.system.images.test_manifests import (
    BASE,
    CREDENTIALS,
    KUBERNETES,
    NEWEST,
    built,
    container,
    gibibytes,
    kustomized,
    one,
    options,
    pod,
    reaches,
    with_kustomize,
)

HOSTED = built(KUBERNETES / "hosted")
GATEWAY = one("Deployment", "loom-gateway", HOSTED)
HOST = one("StatefulSet", "loom-session-host", HOSTED)
WEAVER = one("StatefulSet", "loom-weaver", HOSTED)
WORKER = one("StatefulSet", "loom-worker", HOSTED)
PODS = {"gateway": GATEWAY, "session-host": HOST, "weaver": WEAVER, "worker": WORKER}
ours = pytest.mark.parametrize("owner", [GATEWAY, HOST, WEAVER], ids=["gateway", "session-host", "weaver"])

SINGLE = pytest.mark.guarantees(
    "workers", "`images/kubernetes/hosted` is the base with two gateways, two session hosts and a weaver of its own"
)


def selected_by(selector: dict[str, Any]) -> list[str]:
    return [name for name, owner in PODS.items() if selects(selector, pod(owner)["metadata"]["labels"])]


def given(owner: dict[str, Any]) -> dict[str, Any]:
    face = {"loom-gateway": "gateway", "loom-session-host": "sessions", "loom-weaver": "weaver"}
    return options(owner, face[owner["metadata"]["name"]], container(owner)["args"])


@SINGLE
def test_it_is_the_base_but_for_the_gateway_and_who_reaches_what() -> None:
    changed = {
        ("Deployment", "loom-gateway"),
        ("Service", "loom-gateway"),
        ("PodDisruptionBudget", "loom-gateway"),
        ("NetworkPolicy", "loom-gateway"),
        ("NetworkPolicy", "loom-workers"),
    }
    for manifest in BASE:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        assert (one(kind, name, HOSTED) == manifest) is ((kind, name) not in changed)


@pytest.mark.parametrize(("name", "owner"), PODS.items(), ids=PODS)
def test_each_pod_is_selected_by_its_owner_its_budget_and_one_policy(name: str, owner: dict[str, Any]) -> None:
    assert selected_by(owner["spec"]["selector"]) == [name]
    for kind, key in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        selectors = [manifest["spec"][key] for manifest in HOSTED if manifest["kind"] == kind]
        assert [selected_by(one) for one in selectors].count([name]) == 1
    assert all(len(selected_by(one)) == 1 for one in selectors)


@pytest.mark.guarantees("workers", "No budget of `images/kubernetes/hosted` blocks a drain for ever")
def test_no_budget_blocks_a_drain_for_ever() -> None:
    budgets = [manifest["spec"] for manifest in HOSTED if manifest["kind"] == "PodDisruptionBudget"]
    for budget in budgets:
        (name,) = selected_by(budget["selector"])
        replicas = PODS[name]["spec"]["replicas"]
        assert budget.get("maxUnavailable", 0) >= 1 or budget["minAvailable"] < replicas
        assert name == "worker" or budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_one_gateway_more_is_there_before_one_goes() -> None:
    assert GATEWAY["spec"]["replicas"] == 2
    assert GATEWAY["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    assert one("Service", "loom-gateway", HOSTED)["spec"]["sessionAffinity"] == "ClientIP"
    assert container(GATEWAY)["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "5"]
    assert pod(GATEWAY)["spec"]["terminationGracePeriodSeconds"] >= 5 + 20


def test_a_session_host_is_emptied_by_who_deletes_it() -> None:
    assert HOST["spec"]["updateStrategy"] == {"type": "OnDelete"}
    assert given(HOST)["drain"] + 20 < pod(HOST)["spec"]["terminationGracePeriodSeconds"]
    assert given(HOST)["end_sessions"] is False  # what is left starts again from the volume
    assert "livenessProbe" not in container(HOST)
    assert (ROOT / "images" / container(HOST)["command"][-1]).exists()


@SINGLE
def test_all_find_each_other_under_names_that_stay() -> None:
    hosts, weaver = one("Service", "loom-session-hosts", HOSTED), one("Service", "loom-weaver", HOSTED)
    for service, owner in ((hosts, HOST), (weaver, WEAVER)):
        assert owner["spec"]["serviceName"] == service["metadata"]["name"]
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"] is True
        (port,), (named,) = service["spec"]["ports"], container(owner)["ports"]
        assert (port["targetPort"], port["port"]) == (named["name"], named["containerPort"])
        for probe in ("startupProbe", "readinessProbe"):
            assert container(owner)[probe]["tcpSocket"]["port"] == named["name"]
    assert given(GATEWAY)["session_host"] == [
        f"tcp://{HOST['metadata']['name']}-{number}.{hosts['metadata']['name']}.training.svc.cluster.local:8472"
        for number in range(HOST["spec"]["replicas"])
    ]
    assert given(HOST)["listen"] == "0.0.0.0:8472"
    address = f"{weaver['metadata']['name']}.training.svc.cluster.local"
    assert (given(WEAVER)["listen"], given(WEAVER)["advertise"]) == ("0.0.0.0:8471", address)
    for owner in (GATEWAY, HOST):
        assert given(owner)["weaver"] == f"{address}:8471"
    assert given(HOST)["workers"] == [
        f"dns://loom-workers.training.svc.cluster.local:26600?count={WORKER['spec']['replicas']}"
    ]


def test_each_has_the_secrets_that_it_needs_and_no_other() -> None:
    named = {
        "gateway": {"loom-token", "loom-tokens", "loom-host-key", "loom-weaver-secret"},
        "session-host": {"loom-host-key", "loom-weaver-secret"},
        "weaver": {"loom-weaver-secret"},
        "worker": set(),
    }
    for name, owner in PODS.items():
        volumes = {one["name"]: one["secret"] for one in pod(owner)["spec"]["volumes"] if "secret" in one}
        assert {one["secretName"] for one in volumes.values()} == named[name]
        mode = 0o400 if owner is HOST else 0o440
        assert all(one["defaultMode"] == mode for one in volumes.values())
        assert "secretKeyRef" not in str(owner)
        if owner is WORKER:
            continue
        mounts = {
            one["mountPath"]: volumes[one["name"]]
            for one in container(owner)["volumeMounts"]
            if one["name"] in volumes
        }
        files = [given(owner).get(key) for key in ("host_key", "weaver_secret", "secret_file")]
        for path in map(Path, filter(None, files)):
            secret = mounts[str(path.parent)]["secretName"]
            assert path.name in one("Secret", secret, HOSTED)["data"]


@pytest.mark.guarantees("drivers", "Gateways and the weaver of `images/kubernetes/hosted` need no right at all")
@ours
def test_a_pod_may_do_nothing_that_it_need_not(owner: dict[str, Any]) -> None:
    spec, own = pod(owner)["spec"], container(owner)["securityContext"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    needed = {"add": [capability.name for capability in NEEDED]} if owner is HOST else {}
    assert own == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]} | needed,
    }
    user = {key: spec["securityContext"].get(key) for key in ("runAsNonRoot", "runAsUser", "runAsGroup", "fsGroup")}
    assert list(user.values()) == ([None, 0, 0, None] if owner is HOST else [True, 10001, 10001, 10001])
    writable = {mount["mountPath"] for mount in container(owner)["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/tmp", "/var/lib/loom"}
    names = {mount["name"] for mount in container(owner)["volumeMounts"]}
    claims = [claim["metadata"]["name"] for claim in owner["spec"].get("volumeClaimTemplates", ())]
    assert names == {*claims, *(one["name"] for one in spec["volumes"])}
    # With any other policy the kubelet opens the weaver's state to a group, and the weaver refuses it.
    assert owner is not WEAVER or spec["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


@ours
def test_storage_is_bounded_and_what_has_to_stay_is_on_a_volume(owner: dict[str, Any]) -> None:
    limits = container(owner)["resources"]["limits"]
    sizes = [gibibytes(one["emptyDir"]["sizeLimit"]) for one in pod(owner)["spec"]["volumes"] if "emptyDir" in one]
    assert sum(sizes) < gibibytes(limits["ephemeral-storage"])
    claims = owner["spec"].get("volumeClaimTemplates", ())
    assert [claim["metadata"]["name"] for claim in claims] == ([] if owner is GATEWAY else ["state"])
    if claims:
        (mount,) = [one for one in container(owner)["volumeMounts"] if one["name"] == "state"]
        folder = Path(given(owner)["state_dir"] if owner is HOST else given(owner)["state"])
        assert Path(mount["mountPath"]) in (folder, folder.parent)


EVERY = frozenset(range(1024, 65536))

REACHED = {
    ("gateway", "session-host"): {8472},
    ("gateway", "weaver"): {8471},
    ("gateway", "worker"): {26600},
    ("session-host", "weaver"): {8471},
    ("session-host", "worker"): EVERY,
    ("worker", "session-host"): EVERY - {8472},
    ("worker", "weaver"): {8471},
    ("worker", "worker"): EVERY,
}
"""The ports on which one pod reaches another."""


@pytest.mark.guarantees(
    "workers",
    "In it gateways reach no driver, workers reach drivers and the weaver and nothing else, and nobody from "
    "outside reaches session hosts or the weaver",
)
def test_each_reaches_what_it_has_to_and_nothing_else() -> None:
    for client in PODS:
        for server in PODS:
            policy = next(
                one["spec"] for one in HOSTED
                if one["kind"] == "NetworkPolicy" and selected_by(one["spec"]["podSelector"]) == [server]
            )  # fmt: skip
            rules = [
                rule for rule in policy["ingress"]
                if any(client in selected_by(peer["podSelector"]) for peer in rule["from"] if "podSelector" in peer)
            ]  # fmt: skip
            spans = [(one["port"], one.get("endPort", one["port"])) for rule in rules for one in rule["ports"]]
            reached = {port for low, high in spans for port in range(low, high + 1)}
            assert reached == REACHED.get((client, server), set()), (client, server)
            outside = [peer for rule in policy["ingress"] for peer in rule["from"] if "podSelector" not in peer]
            assert bool(outside) is (server == "gateway")


@pytest.mark.parametrize("name", ["loom-gateway", "loom-session-hosts", "loom-weaver", "loom-workers"])
def test_no_pod_reaches_the_address_of_a_clouds_credentials(name: str) -> None:
    policy = one("NetworkPolicy", name, HOSTED)["spec"]
    assert "Egress" in policy["policyTypes"]
    assert not any(reaches(policy, address) for address in CREDENTIALS.split())


AUTOSCALED = built(KUBERNETES / "autoscaling")


@with_kustomize
def test_gateways_scale_by_a_number_that_they_export(tmp_path: Path) -> None:
    shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    for name in ("base/token.env", "hosted/host-key", "hosted/weaver-secret"):
        (tmp_path / "kubernetes" / name).write_text("token=secret\n")
    (tmp_path / "kubernetes" / "mine").mkdir()
    mine = {"resources": ["../hosted"], "components": ["../autoscaling"]}
    (tmp_path / "kubernetes" / "mine" / "kustomization.yaml").write_text(yaml.safe_dump(mine))
    made = list(yaml.safe_load_all(kustomized(tmp_path / "kubernetes" / "mine")))
    assert len(made) == len(HOSTED) + 1
    deployment = one("Deployment", "loom-gateway", made)
    assert "replicas" not in deployment["spec"]
    scaler = one("HorizontalPodAutoscaler", "loom-gateway", made)["spec"]
    assert scaler["scaleTargetRef"] == {
        "apiVersion": deployment["apiVersion"], "kind": "Deployment", "name": deployment["metadata"]["name"]
    }  # fmt: skip
    assert scaler["minReplicas"] == GATEWAY["spec"]["replicas"]
    (metric,) = scaler["metrics"]
    source = (ROOT / "gateway" / "loom_gateway" / "rest" / "metrics.py").read_text()
    assert f'"{metric["pods"]["metric"]["name"]}"' in source
    kubernetes_validate.validate(one("HorizontalPodAutoscaler", "loom-gateway", AUTOSCALED), NEWEST, strict=True)
