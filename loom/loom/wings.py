"""The seam between the core of Loom and its wings.

A wing is a feature that the core runs without, in one folder a side: `loom.rl`, `loom.train`, `loom.chaos`,
`loom.tensors`, `loom.nats` and the like. Wings import the core. The core imports no wing, which contracts in
``pyproject.toml`` check: where it offers a wing's feature, it takes a `Part` of the wing by its name, on first use.
The commands of ``loom`` and the lazy public names are no part of the core.
"""

from __future__ import annotations

from enum import Enum
from importlib import import_module
from typing import Any


class Part(Enum):
    """A part of a wing that the core uses: its module, and its name there."""

    INJECTIONS = "loom.chaos.injections", "Injections"
    """For `loom.threadlet`: carries out the weaver's faults in a training process."""
    ALERTS = "loom.alerting.alerts", "Alerts"
    """For a user's weaver: the rules of alerts, and the alerts that they have made."""
    ALERT_DELIVERIES = "loom.alerting.deliveries", "Deliveries"
    """For a user's weaver: the attempts to deliver them."""
    ALERT_OPERATOR = "loom.alerting.operator", "AlertOperator"
    """For the gateway: what its operator allows alerts to reach."""
    FAULT_SWEEP = "loom.chaos.host.sweep", "sweep"
    """For a worker that starts: repairs the faults that a killed one has left on its host."""
    FAULT_PLANS = "loom_gateway.chaos.routes", "add_plans"
    """For the gateway's application: plans of faults, and their routes."""
    TRACKERS = "loom.exporters.tracker", "TrackerKind"
    """For the gateway's settings: the trackers that there are."""
    CHECK_TRACKER = "loom.exporters.tracker", "check_installed"
    """For the gateway's settings: whether a tracker's package is installed."""
    TENSORS_OF_JOB = "loom.tensors.on_procs", "of_job"
    """For `Job.tensors`."""
    WATCHED_TENSORS = "loom_gateway.watched_tensors", "WatchedView"
    """For a session's description: its watched tensors."""
    KUBERNETES_ADDRESS = "loom_proxy.kubernetes.port_forward", "parse_kube_address"
    """For `loom_proxy.gateway_address`: addresses of gateways in Kubernetes."""
    SLURM_ADDRESS = "loom_proxy.slurm.forward", "gateway_in_slurm"
    """For `loom_proxy.gateway_address`: addresses of gateways in allocations of Slurm."""

    def load(self) -> Any:
        """Import the part's module, and return the part."""
        module, name = self.value
        return getattr(import_module(module), name)
