"""Failures on purpose: kinds of faults, their injection, and plans of them.

`run` carries a `Plan` out into a training and returns a `Report`::

    from loom.chaos import Plan, PlannedFault, Target, When, run

    plan = Plan(faults=(PlannedFault("sigkill", When(step=100), Target(mesh="train", random=1)),), seed=7)
    run(plan, job.weaver).raise_for_failures()

`read_plan` reads a plan from a file. In a test, the fixture ``loom_chaos`` of `loom.chaos.pytest_plugin` runs one.

`loom.control.fault_kinds` has the list. `loom.chaos.training_faults` has the faults inside a training process.
Processes, hosts, networks and disks have a module each, which works on the machine that it runs on.
`loom.chaos.host.agent` is the process that holds such a fault until its time is over. `loom.chaos.plans` reads a
plan; `loom.chaos.runs` carries it out through a gateway and reports the outcome.

Faults strike only targets that are marked as injectable: processes spawned on ``job.hosts.as_injectable()``, a
threadlet made with ``injectable=True``, or a process with ``LOOM_INJECTABLE=1`` in its environment.

Names are imported on first use, as ``__init__.pyi`` lists them: only plans need pydantic, which training has not.
"""

from __future__ import annotations

from loom._lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__, __file__)
