"""Why a pod is not ready, from what Kubernetes says of it."""

from __future__ import annotations

from typing import Any

import pytest

from loom_proxy.kubernetes.deployment import pod_states


def pod(name: str = "loom-0", **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, "status": status}


def waiting(reason: str, message: str | None = None, **more: Any) -> dict[str, Any]:
    return {"state": {"waiting": {"reason": reason, "message": message}}, **more}


@pytest.mark.parametrize(
    ("status", "why"),
    [
        ({"containerStatuses": [waiting("ImagePullBackOff", "no such image")]}, "ImagePullBackOff: no such image"),
        (
            {"containerStatuses": [waiting("CrashLoopBackOff", lastState={"terminated": {"exitCode": 3}})]},
            "CrashLoopBackOff, exit code 3 before",
        ),
        (
            {"containerStatuses": [{"state": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}]},
            "OOMKilled, exit code 137",
        ),
        (
            {
                "phase": "Pending",
                "conditions": [
                    {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
                ],
            },
            "Unschedulable: 0/3 nodes",
        ),
        ({"phase": "Pending", "containerStatuses": [waiting("ContainerCreating")]}, "Pending"),
        ({"phase": "Running"}, "its container runs, but is not ready"),
        ({"phase": "Failed", "reason": "Evicted", "message": "disk"}, "Evicted: disk"),
        ({}, "Unknown"),
    ],
)
def test_the_reason_is_the_most_telling_one(status: dict[str, Any], why: str) -> None:
    (state,) = pod_states([pod(**status)])

    assert not state.ready
    assert state.why == why
    assert str(state) == f"loom-0: {why}"


def test_pods_that_go_are_left_out_and_the_others_are_in_order() -> None:
    ready = [{"type": "Ready", "status": "True"}]
    going = pod("a")
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"

    states = pod_states([pod("c", conditions=ready, podIP="10.0.0.3"), going, pod("b", conditions=ready)])

    assert [str(state) for state in states] == ["b is ready", "c is ready"]
    assert states[1].address == "10.0.0.3"
