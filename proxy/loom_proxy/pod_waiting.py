"""Waits until the pods of a job can be used."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from loom.errors import DeploymentFailed
from loom_proxy.pod_answers import check_versions, fails_again, is_final, what_a_pod_says, what_is_wrong
from loom_proxy.pod_mesh import PodMesh

__all__ = ["await_gateway"]

ASK_EVERY = 1.0
"""Seconds between two questions to the pods."""


def await_gateway(meshes: Sequence[PodMesh], timeout: float) -> None:
    """Wait until the workers of all pods and the gateway listen.

    Args:
        meshes: of the job; a pod of the first has the gateway.
        timeout: in seconds.

    Raises:
        DeploymentFailed: a pod cannot, or they take longer; says which, and why.
        PythonVersionMismatch, ProtocolMismatch: a pod has other versions than this program.
    """
    first = meshes[0]
    expected = sum(mesh.pods_wanted for mesh in meshes)
    deadline = time.monotonic() + timeout
    while True:
        status: dict[str, Any]
        try:
            status = first.status()
        except Exception as error:
            status = {"pods": [], "gateway": None}
            problem = f"{type(error).__name__}: {error}"
            if is_final(error):
                raise DeploymentFailed(what_a_pod_says(error)) from error
        else:
            problem = what_is_wrong(status, expected)
            for pod in status["pods"]:
                check_versions(pod)
        if not problem:
            return
        if time.monotonic() > deadline or fails_again(status):
            raise DeploymentFailed(f"{first.service_name} in namespace {first.namespace} does not start: {problem}")
        time.sleep(ASK_EVERY)
