"""NetworkPolicies of the cluster on one machine are enforced: what they do not let through does not arrive."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.cluster import OneMachineCluster, missing
from tests.support.cluster.network import METADATA
from tests.support.cluster.policies import Peer, policy_rules, selects
from tests.support.needs import skipped_if

HTTP = ["python3", "-m", "http.server", "8000"]
TWO_PORTS = ["sh", "-c", "python3 -m http.server 8100 & exec python3 -m http.server 8000"]
SERVES_HTTP = {"httpGet": {"path": "/", "port": 8000}}

pytestmark = pytest.mark.guarantees("workers", "The cluster in which this is tested enforces what manifests say")
needs_cluster = [skipped_if(missing()), pytest.mark.timeout(200), pytest.mark.slow]


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ({}, True),
        ({"matchLabels": {"app": "web"}}, True),
        ({"matchLabels": {"app": "web", "tier": "back"}}, False),
        ({"matchExpressions": [{"key": "app", "operator": "In", "values": ["web", "db"]}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["web"]}]}, False),
        ({"matchExpressions": [{"key": "tier", "operator": "NotIn", "values": ["back"]}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "Exists"}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "DoesNotExist"}]}, False),
    ],
)
def test_a_selector_selects_as_kubernetes_says(selector: dict[str, Any], expected: bool) -> None:
    assert selects(selector, {"app": "web", "zone": "1"}) is expected


def test_a_pod_that_no_policy_selects_is_open_and_a_policy_restricts_its_directions_only() -> None:
    pod = Peer("default", "10.244.1.1", {"app": "web"})

    def chains(spec: dict[str, Any]) -> list[str]:
        policy = {"metadata": {"namespace": "default"}, "spec": spec}
        rules = policy_rules(pod, [policy], [pod], {"default": {}})
        return [word for word in ("hook input", "hook output") if word in rules]

    assert chains({"podSelector": {"matchLabels": {"app": "other"}}}) == []
    assert chains({"podSelector": {}}) == ["hook input"]
    assert chains({"podSelector": {}, "policyTypes": ["Egress"]}) == ["hook output"]
    assert chains({"podSelector": {}, "egress": []}) == ["hook input", "hook output"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[OneMachineCluster]:
    with OneMachineCluster(namespaces=["default", "other"]) as cluster:
        for name, command in (("web", TWO_PORTS), ("friend", HTTP), ("stranger", HTTP)):
            cluster.run_container(name, command, readiness=SERVES_HTTP, ports=[8000])
        cluster.run_container("friend", HTTP, readiness=SERVES_HTTP, namespace="other")
        for name in ("web", "friend", "stranger"):
            cluster.wait_ready(name, 1)
        cluster.wait_ready("friend", 1, namespace="other")
        yield cluster


@contextlib.contextmanager
def policy(cluster: OneMachineCluster, **spec: Any) -> Iterator[None]:
    """A policy for the pod of ``web``. It is in force when its pod has its rules."""
    name = {"name": "one", "namespace": "default"}
    selected = {"podSelector": {"matchLabels": {"app": "web"}}}
    cluster.apply({"kind": "NetworkPolicy", "metadata": name, "spec": {**selected, **spec}})
    try:
        yield
    finally:
        # One that restricts nothing: the next test's takes its place.
        cluster.apply({"kind": "NetworkPolicy", "metadata": name, "spec": {**selected, "policyTypes": ["Egress"],
                                                                           "egress": [{}]}})  # fmt: skip


def reaches(cluster: OneMachineCluster, source: str, url: str, namespace: str = "default") -> bool:
    (pod,) = cluster.pods(source, namespace)
    script = f"curl -s -m 1 -o /dev/null {url} && echo reached || [ $? = 28 ]"  # dropped, not refused
    return cluster.execute(pod.name, ["sh", "-c", script], namespace) == "reached\n"


def who_reaches(cluster: OneMachineCluster, port: int = 8000) -> set[str]:
    """Who reaches a port of ``web``."""
    (pod,) = cluster.pods("web")
    url = f"http://{pod.address}:{port}/"
    found = {name for name in ("friend", "stranger", "web") if reaches(cluster, name, url)}
    if reaches(cluster, "friend", url, "other"):
        found.add("friend elsewhere")
    if through(cluster, cluster.ingress_url, port):
        found.add("ingress")
    return found


def through(cluster: OneMachineCluster, base: str, port: int) -> bool:
    url = f"{base}/default/web-headless:{port}/"
    command = ["curl", "-s", "-m", "1", "-o", "/dev/null", "-w", "%{http_code}", url]
    return cluster.laptop.run(command).stdout == "200"


EVERYBODY = {"friend", "stranger", "web", "friend elsewhere", "ingress"}


class TestInTheCluster:
    pytestmark = needs_cluster

    def test_without_a_policy_everybody_reaches_a_pod(self, cluster: OneMachineCluster) -> None:
        assert who_reaches(cluster) == EVERYBODY

    def test_who_is_named_comes_in_and_nobody_else(self, cluster: OneMachineCluster) -> None:
        friends = {"podSelector": {"matchLabels": {"app": "friend"}}}
        with policy(cluster, ingress=[{"from": [friends]}]):
            cluster.wait_until(lambda: who_reaches(cluster) == {"friend", "web"}, 20.0, "the policy")
            assert cluster.pods("web")[0].ready  # a node's probes pass

    def test_friends_of_another_namespace_and_an_ingress(self, cluster: OneMachineCluster) -> None:
        elsewhere = {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "other"}},
            "podSelector": {"matchLabels": {"app": "friend"}},
        }
        ingress = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress-nginx"}}}
        with policy(cluster, ingress=[{"from": [elsewhere, ingress]}]):
            expected = {"friend elsewhere", "ingress", "web"}
            cluster.wait_until(lambda: who_reaches(cluster) == expected, 20.0, "the policy")
            assert not through(cluster, cluster.kt_api_url, 8000)  # Kubetorch's nginx is no ingress

    def test_ports_and_ranges_of_ports(self, cluster: OneMachineCluster) -> None:
        with policy(cluster, ingress=[{"ports": [{"port": 8001, "endPort": 8200}]}]):
            cluster.wait_until(lambda: who_reaches(cluster) == {"web"}, 20.0, "the policy")
            assert who_reaches(cluster, 8100) == EVERYBODY

    def test_what_is_left_out_of_a_block_of_addresses(self, cluster: OneMachineCluster) -> None:
        (friend,) = cluster.pods("friend")
        block = {"cidr": "10.244.0.0/16", "except": [f"{friend.address}/32"]}
        with policy(cluster, ingress=[{"from": [{"ipBlock": block}]}]):
            expected = EVERYBODY - {"friend"}
            cluster.wait_until(lambda: who_reaches(cluster) == expected, 20.0, "the policy")

    def test_a_pod_reaches_only_what_its_egress_allows_also_by_the_name_of_a_service(
        self, cluster: OneMachineCluster
    ) -> None:
        credentials = f"http://{METADATA}/"
        assert reaches(cluster, "web", credentials)
        dns = {"ports": [{"protocol": "UDP", "port": 53}]}
        friends = {"to": [{"podSelector": {"matchLabels": {"app": "friend"}}}]}
        with policy(cluster, policyTypes=["Egress"], egress=[dns, friends]):
            cluster.wait_until(lambda: not reaches(cluster, "web", credentials), 20.0, "the policy")
            assert reaches(cluster, "web", "http://friend:8000/")
            assert not reaches(cluster, "web", "http://stranger:8000/")
            assert who_reaches(cluster) == EVERYBODY
        everywhere = {"cidr": "0.0.0.0/0", "except": [f"{METADATA}/32"]}
        with policy(cluster, policyTypes=["Egress"], egress=[dns, {"to": [{"ipBlock": everywhere}]}]):
            # Between the two policies everything is reached.
            cluster.wait_until(
                lambda: (
                    reaches(cluster, "web", "http://stranger:8000/") and not reaches(cluster, "web", credentials)
                ),
                20.0,
                "the policy",
            )
