"""Plans of faults: what they are made of, how they are read, and what they expect."""

from loom.chaos.plans.plan import Mark, Plan, PlannedFault, Target, When

__all__ = ["Mark", "Plan", "PlannedFault", "Target", "When"]
