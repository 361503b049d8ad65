"""Exceptions about pods, the services in them, and `kubectl`."""

from __future__ import annotations

from loom.errors.base import LoomError, Unavailable


class DeploymentFailed(LoomError, code="deployment_failed"):
    """A job's pods were not deployed, or do not become ready; the text says which and why."""


class PodUnreachable(Unavailable, code="pod_unreachable"):
    """A pod of a job does not answer, or is no pod of the job."""


PortForwardFailed = Unavailable
ServiceUnreachable = Unavailable
