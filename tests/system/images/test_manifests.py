"""``images/kubernetes``: every manifest is valid, and they agree with each other and with Loom's command line."""

from __future__ import annotations

import ipaddress
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import typer.main
import yaml

from loom.cli.app import app
from loom_gateway.sessions.driver_ids import NEEDED
from tests.support.cluster.laptop import real_kubectl
from tests.system.images.dockerfiles import FILES, ROOT, only, read

KUBERNETES = ROOT / "images" / "kubernetes"
NEWEST, OLDEST = "1.34", "1.27"

SERVICE_MONITOR = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "monitoring.coreos.com/v1"},
        "spec": {
            "type": "object",
            "required": ["selector", "endpoints"],
            "additionalProperties": False,
            "properties": {
                "selector": {"type": "object"},
                "endpoints": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "properties": {
                            "port": {"type": "string"},
                            "path": {"type": "string"},
                            "interval": {"type": "string", "pattern": r"^\d+s$"},
                            "authorization": {
                                "type": "object",
                                "additionalProperties": False,
                                "properties": {
                                    "type": {"type": "string"},
                                    "credentials": {
                                        "type": "object",
                                        "required": ["key"],
                                        "additionalProperties": False,
                                        "properties": {"name": {"type": "string"}, "key": {"type": "string"}},
                                    },
                                },
                            },
                        },
                    },
                },
            },
        },
    },
}
"""What is used here of the operator's definition, which is not among Kubernetes' own schemas."""

Manifest = dict[str, Any]

PATCHED = {"chaos": "base", "autoscaling": "hosted"}
"""What components patch."""


def built(folder: Path) -> list[Manifest]:
    """What kustomize makes of a folder. A component's patches are of `PATCHED`."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    made: list[Manifest] = []
    for name in kustomization.get("resources", []):
        path = folder / name
        made += built(path.resolve()) if path.is_dir() else list(yaml.safe_load_all(path.read_text()))
    for secret in kustomization.get("secretGenerator", []):
        metadata = {"name": secret["name"]}
        data = dict.fromkeys(secret.get("files", ["token"]), "c2VjcmV0")
        assert "files" in secret or secret["envs"] == ["token.env"]
        made.append({"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata, "data": data})
    patches = kustomization.get("patches", [])
    is_component = patches and kustomization["kind"] == "Component"
    of_base = built(KUBERNETES / PATCHED[folder.name]) if is_component else []
    for patch in patches:
        wanted = patch["target"]
        target = one(wanted["kind"], wanted["name"], made + of_base)
        if target not in made:
            made.append(target)
        text = patch["patch"] if "patch" in patch else (folder / patch["path"]).read_text()
        for operation in yaml.safe_load(text):
            apply(operation, target)
    for image in kustomization.get("images", []):
        for container in containers(made):
            if container["image"].partition(":")[0] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"
    return made


def containers(made: list[Manifest]) -> list[Manifest]:
    """All containers of all pods."""
    owners = [one["spec"]["template"] for one in made if one["kind"] in ("Deployment", "StatefulSet")]
    return [container for owner in owners for container in owner["spec"]["containers"]]


def one(kind: str, name: str, made: list[Manifest] | None = None) -> Manifest:
    """The manifest of a kind with a name, of the base if no others are given."""
    known = BASE if made is None else made
    (found,) = [manifest for manifest in known if (manifest["kind"], manifest["metadata"]["name"]) == (kind, name)]
    return found


def apply(operation: dict[str, Any], target: Any) -> None:
    """One operation of a JSON patch, `add`, `replace` or `remove`."""
    *parents, last = [part.replace("~1", "/") for part in operation["path"].strip("/").split("/")]
    for part in parents:
        target = target[int(part) if isinstance(target, list) else part]
    if last == "-":
        assert operation["op"] == "add"
        target.append(operation["value"])
        return
    if operation["op"] == "remove":
        del target[int(last) if isinstance(target, list) else last]
        return
    if operation["op"] == "replace":
        assert last in target
    else:
        assert operation["op"] == "add"
        assert last not in target
    target[last] = operation["value"]


FOLDERS = sorted(path.parent for path in KUBERNETES.glob("*/kustomization.yaml"))
ALL = [
    pytest.param(manifest, id=f"{folder.name}-{manifest['kind']}-{manifest['metadata']['name']}")
    for folder in FOLDERS
    for manifest in built(folder)
]
BASE = built(KUBERNETES / "base")


GATEWAY, WORKER = one("Deployment", "loom-gateway"), one("StatefulSet", "loom-worker")
PODS = [GATEWAY, WORKER]
by_pod = pytest.mark.parametrize("owner", PODS, ids=["gateway", "worker"])


def pod(owner: Manifest) -> Manifest:
    return dict(owner["spec"]["template"])


def container(owner: Manifest) -> Manifest:
    (only_one,) = pod(owner)["spec"]["containers"]
    return dict(only_one)


def selected_by(labels: dict[str, str]) -> list[str]:
    """The pods that labels select."""
    return [
        owner["metadata"]["name"] for owner in PODS if labels.items() <= pod(owner)["metadata"]["labels"].items()
    ]


@pytest.mark.parametrize("manifest", ALL)
def test_a_manifest_is_valid(manifest: Manifest) -> None:
    if manifest["kind"] == "ServiceMonitor":
        jsonschema.validate(manifest, SERVICE_MONITOR)
        return
    for version in (OLDEST, NEWEST):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_a_mistake_is_seen() -> None:
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**WORKER, "spec": {**WORKER["spec"], "replica": 2}}, NEWEST, strict=True)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"apiVersion": "monitoring.coreos.com/v1"}, SERVICE_MONITOR)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The manifests as somebody has them who has made a token and deploys."""
    kubernetes = tmp_path / "kubernetes"
    shutil.copytree(KUBERNETES, kubernetes)
    for folder in ("base", "monitoring"):
        (kubernetes / folder / "token.env").write_text("token=secret\n")
    for name in ("host-key", "weaver-secret"):
        (kubernetes / "hosted" / name).write_text("secret")
    return kubernetes


def kustomized(folder: Path) -> str:
    command = [str(real_kubectl()), "kustomize", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


with_kustomize = pytest.mark.skipif(
    real_kubectl() is None, reason="needs kubectl 1.31 or newer, with its kustomize"
)


@with_kustomize
@pytest.mark.parametrize("name", ["base", "gpu", "hosted"])
def test_kustomize_makes_the_same_of_them(name: str, copied: Path) -> None:
    made = list(yaml.safe_load_all(kustomized(copied / name)))
    expected = built(copied / name)
    assert len(made) == len(expected)
    for manifest in made:
        assert one(manifest["kind"], manifest["metadata"]["name"], expected) == manifest


@with_kustomize
def test_images_have_the_names_that_they_are_given(copied: Path) -> None:
    for folder, image in (("base", "loom"), ("gpu", "loom-gpu")):
        path = copied / folder / "kustomization.yaml"
        text = path.read_text().replace(f"newName: {image} #", f"newName: registry/{image} #")
        path.write_text(text.replace("newTag: 0.2.0", "newTag: 0.3.0"))
    made = kustomized(copied / "gpu")
    assert made.count("image: registry/loom:0.3.0\n") == 1
    assert made.count("image: registry/loom-gpu:0.3.0\n") == 1
    assert made.count("image:") == 2


@with_kustomize
def test_the_tag_of_hosted_is_not_the_workers(copied: Path) -> None:
    path = copied / "hosted" / "kustomization.yaml"
    path.write_text(path.read_text().replace("newTag: 0.2.0", "newTag: 0.3.0"))
    found = containers(list(yaml.safe_load_all(kustomized(copied / "hosted"))))
    images = {container["name"]: container["image"] for container in found}
    assert images.pop("worker") == "loom:0.2.0"
    assert set(images.values()) == {"loom:0.3.0"}


@with_kustomize
def test_monitoring_is_listed_in_a_kustomization_of_ones_own(copied: Path) -> None:
    (copied / "mine").mkdir()
    mine = {"resources": ["../base"], "components": ["../monitoring"]}
    (copied / "mine" / "kustomization.yaml").write_text(yaml.safe_dump(mine))
    made = list(yaml.safe_load_all(kustomized(copied / "mine")))
    monitoring = built(copied / "monitoring")
    assert [manifest["kind"] for manifest in monitoring] == ["ServiceMonitor", "NetworkPolicy", "Secret"]
    assert all(manifest in made for manifest in monitoring)
    assert len(made) == len(BASE) + len(monitoring)


CHAOS = built(KUBERNETES / "chaos")


@with_kustomize
def test_what_faults_need_is_listed_in_a_kustomization_of_ones_own(copied: Path) -> None:
    (copied / "mine").mkdir()
    mine = {"namespace": "mine", "resources": ["../base"], "components": ["../chaos"]}
    (copied / "mine" / "kustomization.yaml").write_text(yaml.safe_dump(mine))
    made = list(yaml.safe_load_all(kustomized(copied / "mine")))
    assert len(made) == len(BASE) + 3
    for manifest in CHAOS:
        found = one(manifest["kind"], manifest["metadata"]["name"], made)
        assert found["metadata"].pop("namespace") == "mine"
        for subject in found.get("subjects", ()):
            assert subject.pop("namespace") == "mine"
        assert found == manifest


def test_faults_need_one_capability_and_one_right() -> None:
    worker = one("StatefulSet", "loom-worker", CHAOS)
    assert container(worker)["securityContext"] == {
        **container(WORKER)["securityContext"],
        "capabilities": {"drop": ["ALL"], "add": ["NET_ADMIN"]},
    }
    account = one("ServiceAccount", "loom-worker", CHAOS)
    assert pod(worker)["spec"]["serviceAccountName"] == account["metadata"]["name"]
    (rule,) = one("Role", "loom-lost-host", CHAOS)["rules"]
    names = [f"loom-worker-{number}" for number in range(WORKER["spec"]["replicas"])]
    assert rule == {"apiGroups": [""], "resources": ["pods"], "resourceNames": names, "verbs": ["delete"]}
    gateway = one("Deployment", "loom-gateway", CHAOS)
    assert pod(gateway)["spec"]["automountServiceAccountToken"] is False
    assert container(gateway)["securityContext"] == container(GATEWAY)["securityContext"]
    for owner in (worker, gateway):
        assert {"name": "LOOM_INJECTABLE", "value": "1"} in container(owner)["env"]


def test_every_file_belongs_to_a_kustomization() -> None:
    for folder in FOLDERS:
        kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
        files = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
        patches = {patch["path"] for patch in kustomization.get("patches", []) if "path" in patch}
        assert files == {name for name in kustomization["resources"] if name.endswith(".yaml")} | patches


@by_pod
def test_a_pod_carries_the_labels_that_its_owner_selects(owner: Manifest) -> None:
    assert selected_by(owner["spec"]["selector"]["matchLabels"]) == [owner["metadata"]["name"]]


@pytest.mark.parametrize(
    ("kind", "name", "labels", "expected"),
    [
        ("Service", "loom-gateway", ["selector"], "loom-gateway"),
        ("Service", "loom-workers", ["selector"], "loom-worker"),
        ("PodDisruptionBudget", "loom-gateway", ["selector", "matchLabels"], "loom-gateway"),
        ("PodDisruptionBudget", "loom-worker", ["selector", "matchLabels"], "loom-worker"),
        ("NetworkPolicy", "loom-gateway", ["podSelector", "matchLabels"], "loom-gateway"),
        ("NetworkPolicy", "loom-workers", ["podSelector", "matchLabels"], "loom-worker"),
    ],
)
def test_what_selects_pods_selects_the_right_ones(kind: str, name: str, labels: list[str], expected: str) -> None:
    found = one(kind, name)["spec"]
    for key in labels:
        found = found[key]
    assert selected_by(found) == [expected]


def test_services_and_probes_name_ports_of_the_container() -> None:
    for service, owner in (("loom-gateway", GATEWAY), ("loom-workers", WORKER)):
        ports = {port["name"]: port["containerPort"] for port in container(owner)["ports"]}
        for port in one("Service", service)["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            found = container(owner)[probe]
            if owner is WORKER:  # the kernel accepts connections for a worker that is stuck, too
                assert found["exec"]["command"] == only(read(FILES[0]), "HEALTHCHECK").command
            else:
                assert found["httpGet"]["port"] in ports
    assert container(GATEWAY)["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_only_the_jobs_pods_reach_the_workers() -> None:
    policy = one("NetworkPolicy", "loom-workers")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    (rule,) = policy["ingress"]
    peers = [selected_by(peer["podSelector"]["matchLabels"]) for peer in rule["from"]]
    assert sorted(peers) == [["loom-gateway"], ["loom-worker"]]
    assert all(set(peer) == {"podSelector"} for peer in rule["from"])  # of this namespace
    assert 26600 in {port["port"] for port in rule["ports"]}


@pytest.mark.guarantees("workers", "The audit is on, and Prometheus has a token of its own")
def test_secrets_that_are_named_exist() -> None:
    volumes = {volume["name"]: volume for volume in pod(GATEWAY)["spec"]["volumes"]}
    token = volumes["own-token"]["secret"]["secretName"]
    assert "--token-file=/etc/loom/own/token" in container(GATEWAY)["args"]
    assert "token" in one("Secret", token)["data"]
    monitoring = built(KUBERNETES / "monitoring")
    (endpoint,) = one("ServiceMonitor", "loom-gateway", monitoring)["spec"]["endpoints"]
    wanted = endpoint["authorization"]["credentials"]
    assert wanted["key"] in one("Secret", wanted["name"], monitoring)["data"]
    assert wanted["name"] != token  # Prometheus needs a token of scope view, not the gateway's own
    assert endpoint["port"] in {port["name"] for port in one("Service", "loom-gateway")["spec"]["ports"]}


def test_no_secret_is_in_a_file_of_the_repository() -> None:
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    for name in ("*/token.env", "hosted/host-key", "hosted/weaver-secret"):
        assert f"images/kubernetes/{name}" in ignored


@pytest.mark.guarantees(
    "drivers", "The manifests' gateway may do nothing but change user ids, and only it can read the tokens"
)
@by_pod
def test_a_pod_may_do_nothing_that_it_need_not(owner: Manifest) -> None:
    spec = pod(owner)["spec"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    own = container(owner)["securityContext"]
    # The gateway gives drivers user ids of their own, and may do nothing else that its user could not.
    needed = [capability.name for capability in NEEDED]
    assert own == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]} | ({"add": needed} if owner is GATEWAY else {}),
    }
    writable = {mount["mountPath"] for mount in container(owner)["volumeMounts"] if not mount.get("readOnly")}
    if owner is GATEWAY:
        assert (spec["securityContext"]["runAsUser"], spec["securityContext"]["runAsGroup"]) == (0, 0)
        assert writable == {"/tmp", "/var/lib/loom"}
    else:
        user, group = only(read(FILES[0]), "USER").text.split(":")
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == int(user)
        assert spec["securityContext"]["runAsGroup"] == int(group)
        assert {"/tmp", only(read(FILES[0]), "WORKDIR").text} <= writable
    assert {mount["name"] for mount in container(owner)["volumeMounts"]} == {one["name"] for one in spec["volumes"]}


@pytest.mark.guarantees(
    "drivers", "The manifests' gateway may do nothing but change user ids, and only it can read the tokens"
)
def test_only_the_gateway_can_read_the_tokens() -> None:
    secrets = [volume["secret"] for volume in pod(GATEWAY)["spec"]["volumes"] if "secret" in volume]
    assert [secret["defaultMode"] for secret in secrets] == [0o400, 0o400]
    assert not any("secretKeyRef" in str(variable) for variable in container(GATEWAY)["env"])
    assert any(argument.startswith("--driver-uids=") for argument in container(GATEWAY)["args"])


@pytest.mark.guarantees("workers", "A pod's storage and volumes are bounded")
@by_pod
def test_resources_are_asked_for_and_storage_is_bounded(owner: Manifest) -> None:
    resources = container(owner)["resources"]
    assert set(resources["requests"]) == {"cpu", "memory", "ephemeral-storage"}
    assert set(resources["limits"]) == {"memory", "ephemeral-storage"}
    volumes = [volume["emptyDir"] for volume in pod(owner)["spec"]["volumes"] if "emptyDir" in volume]
    on_disk = [gibibytes(volume["sizeLimit"]) for volume in volumes if volume.get("medium") != "Memory"]
    assert sum(on_disk) < gibibytes(resources["limits"]["ephemeral-storage"])


def gibibytes(quantity: str) -> int:
    assert quantity.endswith("Gi")
    return int(quantity.removesuffix("Gi"))


CREDENTIALS = """
169.254.169.254 169.254.170.2 169.254.170.23 169.254.169.252 168.63.129.16 192.0.0.192 100.100.100.200
fd00:ec2::254 fd00:ec2::23 fd20:ce::254
"""
"""Addresses at which clouds answer with credentials of a node or of a pod."""


@pytest.mark.guarantees("workers", "No pod reaches the address of a cloud's credentials")
@pytest.mark.parametrize("name", ["loom-gateway", "loom-workers"])
def test_no_pod_reaches_the_address_of_a_clouds_credentials(name: str) -> None:
    policy = one("NetworkPolicy", name)["spec"]
    assert "Egress" in policy["policyTypes"]
    assert not any(reaches(policy, address) for address in CREDENTIALS.split())


def reaches(policy: dict[str, Any], address: str) -> bool:
    """Whether a policy lets a pod reach an address, on other ports than DNS's."""
    everywhere = [rule for rule in policy["egress"] if not rule.get("to")]  # an empty list is everywhere, too
    if any(port["port"] != 53 or port.get("endPort", 53) != 53 for rule in everywhere for port in rule["ports"]):
        return True
    blocks = [peer["ipBlock"] for rule in policy["egress"] for peer in rule.get("to", ()) if "ipBlock" in peer]
    return any(
        ipaddress.ip_address(address) in ipaddress.ip_network(block["cidr"])
        and not any(
            ipaddress.ip_address(address) in ipaddress.ip_network(left_out) for left_out in block.get("except", ())
        )
        for block in blocks
    )


@pytest.mark.guarantees("workers", "Workers reach the drivers and not the gateway")
def test_workers_reach_the_drivers_and_not_the_gateway() -> None:
    rules = one("NetworkPolicy", "loom-gateway")["spec"]["ingress"]
    (of_workers,) = [
        rule
        for rule in rules
        for peer in rule["from"]
        if "podSelector" in peer and "loom-worker" in selected_by(peer["podSelector"]["matchLabels"])
    ]
    spans = [(port["port"], port.get("endPort", port["port"])) for port in of_workers["ports"]]
    assert [port for port in range(1024, 65536) if not any(a <= port <= b for a, b in spans)] == [8470]


@pytest.mark.guarantees("workers", "A worker has ended before its pod is killed")
def test_a_worker_has_ended_before_its_pod_is_killed() -> None:
    grace = options(WORKER, "worker", container(WORKER)["args"])["grace"]
    assert 0 < grace < pod(WORKER)["spec"]["terminationGracePeriodSeconds"]


@pytest.mark.guarantees("workers", "The audit is on, and Prometheus has a token of its own")
def test_the_audit_is_on() -> None:
    audit = options(GATEWAY, "gateway", container(GATEWAY)["args"])["audit"]
    mounts = {mount["mountPath"] for mount in container(GATEWAY)["volumeMounts"]}
    assert str(Path(audit).parent) in mounts


@by_pod
def test_images_are_pinned(owner: Manifest) -> None:
    assert re.fullmatch(r"loom:\d+\.\d+\.\d+", container(owner)["image"])


def options(owner: Manifest, face: str, words: list[str]) -> dict[str, Any]:
    """A container's arguments, as Loom's own command line reads them, with the pod's environment put in."""
    env = {"POD_IP": "10.0.0.7", "POD_NAMESPACE": "training"}
    named = {env["name"] for env in container(owner)["env"]}
    for name, value in env.items():
        if f"$({name})" in " ".join(words):
            assert name in named
        words = [word.replace(f"$({name})", value) for word in words]
    assert "$(" not in " ".join(words)
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    command = serve.commands[face]
    known = {name for parameter in command.params for name in parameter.opts}
    unknown = {word.partition("=")[0] for word in words} - known
    assert not unknown
    return dict(command.make_context(face, list(words)).params)


def test_the_workers_command_is_loom_serve_worker() -> None:
    command = container(WORKER)["command"]
    assert command == [*only(read(FILES[0]), "ENTRYPOINT").words, "loom", "serve", "worker"]
    assert options(WORKER, "worker", container(WORKER)["args"])["address"] == "tcp://10.0.0.7:26600"


def test_the_gateways_command_is_keep_gateway() -> None:
    command = container(GATEWAY)["command"]
    assert command == [*only(read(FILES[0]), "ENTRYPOINT").words, "keep-gateway"]
    given = options(GATEWAY, "gateway", container(GATEWAY)["args"])
    assert (given["host"], given["port"]) == ("0.0.0.0", 8470)
    (_, pause) = container(GATEWAY)["lifecycle"]["preStop"]["exec"]["command"]
    assert int(pause) + given["drain"] + 20 < pod(GATEWAY)["spec"]["terminationGracePeriodSeconds"]


def test_the_gateway_waits_for_as_many_workers_as_there_are() -> None:
    (workers,) = [word for word in container(GATEWAY)["args"] if word.startswith("--workers=")]
    service = one("Service", "loom-workers")
    name, port = service["metadata"]["name"], service["spec"]["ports"][0]["port"]
    count = WORKER["spec"]["replicas"]
    assert workers == f"--workers=dns://{name}.$(POD_NAMESPACE).svc.cluster.local:{port}?count={count}"
    assert WORKER["spec"]["serviceName"] == name
    assert service["spec"]["clusterIP"] == "None"


def test_workers_with_gpus_differ_in_what_gpus_need() -> None:
    gpu = built(KUBERNETES / "gpu")
    assert container(one("StatefulSet", "loom-worker", gpu))["image"] == "loom-gpu:0.2.0"
    assert container(one("StatefulSet", "loom-worker", gpu))["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert one("Deployment", "loom-gateway", gpu) == GATEWAY
