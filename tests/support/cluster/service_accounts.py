"""Service accounts of pods: their tokens, and what Roles let them do at the API of Kubernetes. A test tool.

Pods reach the API as in a cluster, at its Service's address, with TLS and the certificate that their token comes
with. Only from there are tokens asked for: the laptop and Kubetorch may do everything.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trustme
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.support.cluster.network import CONTROL

__all__ = ["API_PORT", "API_SERVICE", "MOUNTED", "OnlyPermitted", "ServiceAccounts", "make_certificates", "mounted"]

API_SERVICE = "10.96.0.1"
"""The address of the API's Service. Its port is 443."""

API_PORT = 6443
"""Where nginx takes what comes to it."""

FROM_POD = "x-from-a-pod"
"""The header that nginx adds to what comes over TLS."""

MOUNTED = "kube-api-access"
"""The name of the volume with a token."""

PLACE = "/var/run/secrets/kubernetes.io/serviceaccount"

Json = Mapping[str, Any]

_PATH = re.compile(
    r"/apis?(/(?P<group>[^/]*\.?[^/]*))?/v1/namespaces/(?P<namespace>[^/]+)/(?P<resource>[^/]+)(/(?P<name>[^/]+))?(?P<more>/.*)?"
)
_VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


def make_certificates(folder: Path) -> None:
    """Write the API's certificate and key for nginx, and that of who has signed it for pods."""
    authority = trustme.CA()
    issued = authority.issue_cert(API_SERVICE, CONTROL)
    authority.cert_pem.write_to_path(folder / "api-ca.crt")
    issued.private_key_and_cert_chain_pem.write_to_path(folder / "api.pem")


def mounted(spec: dict[str, Any]) -> dict[str, Any]:
    """A pod's spec with the volume that Kubernetes adds to a pod that asks for the token of its account."""
    if spec.get("automountServiceAccountToken") is not True:
        return spec
    mount = {"name": MOUNTED, "mountPath": PLACE, "readOnly": True}
    containers = [{**one, "volumeMounts": [*(one.get("volumeMounts") or []), mount]} for one in spec["containers"]]
    volume = {"name": MOUNTED, "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}
    return {**spec, "containers": containers, "volumes": [*(spec.get("volumes") or []), volume]}


@dataclass(frozen=True)
class _Request:
    namespace: str
    verb: str
    group: str
    resource: str
    name: str


class ServiceAccounts:
    """The tokens of a cluster's accounts.

    Args:
        manifests: all objects, by kind, namespace and name.
        folder: of the cluster's files, with the certificates.
    """

    def __init__(self, manifests: Mapping[tuple[str, str, str], Json], folder: Path) -> None:
        self._manifests = manifests
        self._folder = folder
        self._tokens: dict[tuple[str, str], str] = {}

    def files(self, namespace: str, account: str) -> dict[str, bytes] | None:
        """What a pod of an account finds in its volume; None if there is no such account."""
        if account != "default" and ("ServiceAccount", namespace, account) not in self._manifests:
            return None
        token = self._tokens.setdefault((namespace, account), secrets.token_urlsafe(32))
        certificate = (self._folder / "api-ca.crt").read_bytes()
        return {"token": token.encode(), "namespace": namespace.encode(), "ca.crt": certificate}

    def refused(self, bearer: str, method: str, path: str) -> tuple[int, str] | None:
        """The status and the sentence with which a request is refused; None if it is not."""
        account = next((one for one, token in self._tokens.items() if token == bearer), None)
        if account is None:
            return 401, "Unauthorized"
        found = _PATH.fullmatch(path)
        who = f'User "system:serviceaccount:{account[0]}:{account[1]}"'
        if found is None:
            return 403, f'forbidden: {who} cannot {_VERBS.get(method, method)} path "{path}"'
        resource = found["resource"] + (found["more"] or "")
        verb = _VERBS.get(method, method)
        verb = "list" if verb == "get" and not found["name"] else verb
        asked = _Request(found["namespace"], verb, found["group"] or "", resource, found["name"] or "")
        if any(_allows(rule, asked) for rule in self._rules(account, asked.namespace)):
            return None
        name = f' "{asked.name}"' if asked.name else ""
        return 403, (
            f'{asked.resource}{name} is forbidden: {who} cannot {asked.verb} resource "{asked.resource}" in API '
            f'group "{asked.group}" in the namespace "{asked.namespace}"'
        )

    def _rules(self, account: tuple[str, str], namespace: str) -> list[Json]:
        rules = []
        for (kind, of, _), binding in self._manifests.items():
            if (kind, of) != ("RoleBinding", namespace):
                continue
            subjects = [
                (one.get("namespace"), one["name"])
                for one in binding.get("subjects") or []
                if one["kind"] == "ServiceAccount"
            ]
            role = self._manifests.get((binding["roleRef"]["kind"], namespace, binding["roleRef"]["name"]))
            if account in subjects and role is not None:
                rules += role.get("rules") or []
        return rules


def _allows(rule: Json, asked: _Request) -> bool:
    wanted = (("apiGroups", asked.group), ("resources", asked.resource), ("verbs", asked.verb))
    named = rule.get("resourceNames")
    return all(value in rule[key] or "*" in rule[key] for key, value in wanted) and (
        not named or asked.name in named
    )


class OnlyPermitted:
    """Lets requests of pods to the API through that their account may make."""

    def __init__(self, app: ASGIApp, accounts: ServiceAccounts) -> None:
        self._app = app
        self._accounts = accounts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers") or ())
        if scope["type"] != "http" or FROM_POD.encode() not in headers:
            await self._app(scope, receive, send)
            return
        bearer = headers.get(b"authorization", b"").decode().removeprefix("Bearer ")
        refused = self._accounts.refused(bearer, scope["method"], scope["path"])
        if refused is None:
            await self._app(scope, receive, send)
            return
        code, message = refused
        reason = {401: "Unauthorized", 403: "Forbidden"}[code]
        answer = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason}
        body = json.dumps({**answer, "message": message, "code": code}).encode()
        kind = (b"content-type", b"application/json")
        await send({"type": "http.response.start", "status": code, "headers": [kind]})
        await send({"type": "http.response.body", "body": body})
