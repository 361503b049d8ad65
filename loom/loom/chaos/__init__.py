"""Failures on purpose: what there is to inject, how it is done, and plans of it.

`loom.chaos.faults` has the list. What strikes a training process from within is in `loom.chaos.training`;
processes, hosts, networks and disks have a module each, which works on the machine that it runs on, and
`loom.chaos.host.agent` is the process that holds such a fault until its time is over. `loom.chaos.plans` reads a
plan, `loom.chaos.runs` carries it out through a gateway and says what became of it.

Only what was marked as injectable is struck: processes that were spawned on ``job.hosts.as_injectable()``, a
threadlet that was made with ``injectable=True``, what has ``LOOM_INJECTABLE=1`` in its environment.
"""

from __future__ import annotations

from loom.chaos.faults import FAULTS, FaultKind, Place, check_fault
from loom.chaos.injected import Injected, InjectedFault

__all__ = ["FAULTS", "FaultKind", "Injected", "InjectedFault", "Place", "check_fault"]
