"""The taints by which Kubernetes' nodes are announced to go away, as a worker's pod reads them from its node.

A reclaimed spot machine, the cluster's autoscaler and ``kubectl drain`` put a taint on the node before its pods get
SIGTERM. While the node has such a taint, the worker's draining file is there, with the taint's name. The pod's
service account needs the right to get nodes.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import ssl
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

from loom.process.state_file import replace_file

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""The folder in which Kubernetes puts the token of a pod's service account, if the pod asks for it."""

LEAVING = (
    "ToBeDeletedByClusterAutoscaler",
    "aws-node-termination-handler/asg-lifecycle-termination",
    "aws-node-termination-handler/rebalance-recommendation",
    "aws-node-termination-handler/scheduled-maintenance",
    "aws-node-termination-handler/spot-itn",
    "cloud.google.com/impending-node-termination",
    "karpenter.sh/disrupted",
    "karpenter.sh/disruption",
    "node.kubernetes.io/out-of-service",
    "node.kubernetes.io/unschedulable",
    "remediator.kubernetes.azure.com/unschedulable",
)
"""The keys of the taints, by the names that their projects give them."""

LOOK_EVERY = 5.0  # seconds between two looks; Google's notice comes 30 s before the end, Amazon's 120 s
ANSWER_WITHIN = 10.0  # seconds that the API of Kubernetes may take
MAX_ANSWER = 4 << 20  # bytes of its answer that are read; a node lists its images

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OwnNode:
    """The node of this pod, and the API of Kubernetes as the pod sees it."""

    name: str
    host: str
    """The address of the API."""
    port: int
    folder: Path = SERVICE_ACCOUNT
    """The folder with the token of the pod's service account."""

    @classmethod
    def of(cls, name: str, environment: Mapping[str, str]) -> OwnNode | None:
        """Return the node of a name; None outside of a pod, or in one without the token of a service account."""
        host = environment.get("KUBERNETES_SERVICE_HOST")
        if not host or not (SERVICE_ACCOUNT / "token").exists():
            return None
        return cls(name, host, int(environment.get("KUBERNETES_SERVICE_PORT") or 443), SERVICE_ACCOUNT)

    def leaving_taint(self) -> str:
        """Return the first of the node's taints that is one of `LEAVING`; empty if none is.

        Raises:
            OSError: the API does not answer, or refuses.
        """
        token = (self.folder / "token").read_text().strip()  # Kubernetes replaces it before it expires
        context = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
        connection = http.client.HTTPSConnection(self.host, self.port, timeout=ANSWER_WITHIN, context=context)
        path = f"/api/v1/nodes/{quote(self.name)}?resourceVersion=0"  # out of the API server's cache
        with contextlib.closing(connection):
            connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
            answer = connection.getresponse()
            said: Any = json.loads(answer.read(MAX_ANSWER) or b"{}")
        if answer.status != 200:
            raise OSError(f"status {answer.status}: {str(said.get('message'))[:300]}")
        return _leaving(said["spec"].get("taints") or ())


def _leaving(taints: Iterable[Mapping[str, Any]]) -> str:
    return next((str(taint["key"]) for taint in taints if taint["key"] in LEAVING), "")


class DrainingFile:
    """The worker's draining file, which is there while its node has a taint of `LEAVING`."""

    def __init__(self, node: OwnNode, path: str) -> None:
        self._node = node
        self._path = path
        self._taint = ""  # for which the file is there
        self._error = ""  # of the last look

    def keep(self) -> NoReturn:
        """Look at the node again and again."""
        while True:
            self.look()
            time.sleep(LOOK_EVERY)

    def look(self) -> None:
        """Make the file, or remove it, if the node's taints ask for that. Without an answer nothing changes."""
        try:
            taint, error = self._node.leaving_taint(), ""
            if taint and taint != self._taint:
                replace_file(self._path, f"its node {self._node.name} has the taint {taint}\n")
            elif self._taint and not taint:
                os.unlink(self._path)
            self._taint = taint
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError) as problem:
            error = str(problem) or type(problem).__name__
        if error and error != self._error:
            logger.warning(
                "the taints of the node %s are not known: %s. The pod's service account needs the right to get "
                "nodes, and a network policy may be in the way",
                self._node.name,
                error,
            )
        self._error = error
