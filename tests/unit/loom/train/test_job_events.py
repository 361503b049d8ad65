"""A job's own events."""

from __future__ import annotations

import queue
from typing import Any

import pytest

from loom.train.controller import job_events
from loom.train.controller.job_events import JobEvents

BOUND = 30.0


class Session:
    """Stands for the session of a driver, whose weaver takes every event and has some of its own."""

    def __init__(self, *events: dict[str, Any], policies: dict[str, str] | None = None) -> None:
        self._events = [{"id": number, **event} for number, event in enumerate(events, 1)]
        self._policies = policies or {}

    def ask_weaver(self, operation: str, arguments: Any, timeout: float = 2.0) -> Any:
        if operation == "events":
            after, kind = arguments["after"], arguments["kind"]
            return [event for event in self._events if event["id"] > after and event["kind"] == kind]
        return {"status": {"event": 0}, "policies": self._policies, "devices": []}.get(operation)


def respawned(session: Session, until: str) -> list[tuple[str, str]]:
    """What a job is told to respawn, up to a replica."""
    told: queue.Queue[tuple[str, str]] = queue.Queue()
    here: Any = session
    events = JobEvents(
        "train", here, lambda replica, reason: told.put((replica, reason)), lambda usable: None, False
    )
    found = []
    while not found or found[-1][0] != until:
        found.append(told.get(timeout=BOUND))
    events.close()
    assert told.empty()
    return found


def failed(reason: str, **actions: str | None) -> dict[str, Any]:
    replicas = [{"replica": name, "group": name[:-2], "action": action} for name, action in actions.items()]
    return {"kind": "device_failed", "reason": reason, "replicas": replicas}


WANTED = {"kind": "respawn_wanted", "replica": "last_0", "reason": "asked for"}


def test_a_failed_device_is_recovered_from_without_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_events, "ASK_EVERY", 0.01)
    session = Session(WANTED, failed("Xid 79", train_0="notify", train_1="notify", ended_0=None))

    assert respawned(session, "train_1") == [("last_0", "asked for"), ("train_0", "Xid 79"), ("train_1", "Xid 79")]


@pytest.mark.parametrize("pattern", ["train", "tr*", "*"])
def test_a_policy_that_a_user_has_set_is_left_to_the_weaver(monkeypatch: pytest.MonkeyPatch, pattern: str) -> None:
    monkeypatch.setattr(job_events, "ASK_EVERY", 0.01)
    one = failed("Xid 79", train_0="notify", other_0="notify" if pattern != "*" else "pause", paused_0="pause")
    session = Session(one, failed("Xid 80", last_0="notify"), policies={pattern: "notify"})
    if pattern == "*":
        session = Session(one, WANTED, policies={pattern: "notify"})

    expected = {"*": [("last_0", "asked for")]}
    assert respawned(session, "last_0") == expected.get(pattern, [("other_0", "Xid 79"), ("last_0", "Xid 80")])


@pytest.mark.guarantees("nothing lost", "A job of days keeps its newest events only")
def test_a_job_of_days_keeps_its_newest_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_events, "KEPT", 100)
    here: Any = Session()
    events = JobEvents("days", here, lambda replica, reason: None, lambda usable: None, False)
    for number in range(250):
        events.record("group_lost", number=number)
    events.close()
    assert [event.data["number"] for event in events.recorded] == list(range(150, 250))
