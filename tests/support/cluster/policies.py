"""NetworkPolicies: the nftables rules of each pod, as a network plugin that enforces them would load.

What a policy does not let through is dropped, in both directions: who is refused waits. As everywhere in
Kubernetes, a node reaches its own pods (probes, port-forwards), a pod reaches itself, and answers pass.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support.cluster.kubelet.probes import port_number
from tests.support.cluster.network import NODE

__all__ = ["Peer", "policy_rules", "selects"]

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Peer:
    """A pod, as policies see it.

    Args:
        container: whose ports may be named.
    """

    namespace: str
    address: str
    labels: Mapping[str, str]
    container: dict[str, Any] = field(default_factory=dict)


def policy_rules(pod: Peer, policies: Iterable[Json], peers: Iterable[Peer], namespaces: Mapping[str, Any]) -> str:
    """The rules of a pod's host.

    Args:
        policies: all of the cluster.
        peers: all pods of the cluster.
        namespaces: their labels.
    """
    peers = list(peers)
    applied = [
        policy
        for policy in policies
        if policy["metadata"]["namespace"] == pod.namespace and selects(policy["spec"]["podSelector"], pod.labels)
    ]
    chains = []
    for direction, hook, word, side in (("Ingress", "input", "from", "saddr"), ("Egress", "output", "to", "daddr")):
        of_it = [policy for policy in applied if direction in _types(policy["spec"])]
        if not of_it:
            continue
        lines = ["ct state established,related accept", f'{"iif" if hook == "input" else "oif"} "lo" accept']
        named = {"name": "of another pod"}
        if hook == "input":
            named = pod.container
            lines.append(f"ip saddr {NODE} accept")
        for policy in of_it:
            of = policy["metadata"]["namespace"]
            for rule in policy["spec"].get(direction.lower()) or []:
                sources = _addresses(rule.get(word) or [], side, of, peers, namespaces)
                lines += [
                    f"{source} {port} accept" for source in sources for port in _ports(rule.get("ports"), named)
                ]
        # After the translation of Services' addresses.
        chains.append(
            f"chain {direction.lower()} {{\n type filter hook {hook} priority 10\n "
            + "\n ".join([*lines, "drop"])
            + "\n}\n"
        )
    return "table inet policies { }\ndelete table inet policies\ntable inet policies {\n" + "".join(chains) + "}\n"


def selects(selector: Json, labels: Mapping[str, str]) -> bool:
    """Whether a label selector selects labels. An empty one selects all."""
    found = (selector.get("matchLabels") or {}).items() <= labels.items()
    return found and all(_matches(one, labels) for one in selector.get("matchExpressions") or [])


def _matches(expression: Json, labels: Mapping[str, str]) -> bool:
    value = labels.get(expression["key"])
    within = value is not None and value in expression.get("values", ())
    known = {"In": within, "NotIn": not within, "Exists": value is not None, "DoesNotExist": value is None}
    return known[expression["operator"]]


def _types(spec: Json) -> list[str]:
    """The directions that a policy restricts."""
    return list(spec.get("policyTypes") or ["Ingress", *(["Egress"] if "egress" in spec else [])])


def _addresses(
    allowed: list[Json], side: str, namespace: str, peers: list[Peer], namespaces: Mapping[str, Any]
) -> list[str]:
    """What matches the addresses of a rule's peers; without any, everybody's."""
    if not allowed:
        return [""]
    found = []
    selected = set()
    for one in allowed:
        if "ipBlock" in one:
            family = f"ip{'6' if ':' in one['ipBlock']['cidr'] else ''} {side}"
            left_out = one["ipBlock"].get("except") or []
            unless = f" {family} != {{ {', '.join(left_out)} }}" if left_out else ""
            block = ipaddress.ip_network(one["ipBlock"]["cidr"])
            # nft has no words for every address of a family but its name
            within = f"{family} {block}" if block.prefixlen else f"meta nfproto ipv{block.version}"
            found.append(within + unless)
            continue
        for peer in peers:
            of = one.get("namespaceSelector")
            here = peer.namespace == namespace if of is None else selects(of, namespaces.get(peer.namespace, {}))
            if here and selects(one.get("podSelector") or {}, peer.labels):
                selected.add(peer.address)
    if selected:
        found.append(f"ip {side} {{ {', '.join(sorted(selected))} }}")
    return found


def _ports(allowed: list[Json] | None, container: dict[str, Any]) -> list[str]:
    """What matches a rule's ports; without any, all. Only ports of the pod itself may be named here."""
    if not allowed:
        return [""]
    found = []
    for one in allowed:
        protocol = one.get("protocol", "TCP").lower()
        if "port" not in one:
            found.append(f"meta l4proto {protocol}")
            continue
        first = port_number(one["port"], container)
        found.append(f"{protocol} dport {first}" + (f"-{one['endPort']}" if "endPort" in one else ""))
    return found
