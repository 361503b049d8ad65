"""Replicas for the tests of pages' feeds, as the weaver describes and reports them."""

from __future__ import annotations

from typing import Any

REPORTED: dict[str, Any] = {
    "state": "running",
    "step": 1,
    "epoch": 0,
    "max_step": 100,
    "metrics": {"loss": 0.5},
    "phase": "step",
    "reported": 10.0,
    "connected": True,
}


def info(id: str, **given: Any) -> dict[str, Any]:
    """A `ReplicaInfo` as JSON."""
    about = {"id": id, "group": "train", "session": None, "user": "ann", "instance": f"of {id}", "step_time": None}
    return {**about, "handlers": {}, "config": {}, "devices": [], **REPORTED, **given}


def reports(**replicas: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Changes of replicas by id, each with its values that differ from `REPORTED`."""
    return {id: {**REPORTED, **given} for id, given in replicas.items()}
