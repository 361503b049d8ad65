"""Failures on purpose: kinds of faults, their injection, and plans of them.

`loom.chaos.faults` has the list. `loom.chaos.training` has the faults inside a training process. Processes, hosts,
networks and disks have a module each, which works on the machine that it runs on. `loom.chaos.host.agent` is the
process that holds such a fault until its time is over. `loom.chaos.plans` reads a plan; `loom.chaos.runs` carries
it out through a gateway and reports the outcome.

Faults strike only targets that are marked as injectable: processes spawned on ``job.hosts.as_injectable()``, a
threadlet made with ``injectable=True``, or a process with ``LOOM_INJECTABLE=1`` in its environment.
"""

from __future__ import annotations

from loom.chaos.faults import FAULTS, FaultKind, Place, check_fault
from loom.chaos.injected import Injected, InjectedFault

__all__ = ["FAULTS", "FaultKind", "Injected", "InjectedFault", "Place", "check_fault"]
