"""A job's own events."""

from __future__ import annotations

from typing import Any

import pytest

from loom.train.controller import job_events
from loom.train.controller.job_events import JobEvents


class Session:
    """Stands for the session of a driver, whose weaver takes every event."""

    def ask_weaver(self, operation: str, arguments: Any, timeout: float = 2.0) -> Any:
        return {"status": {"event": 0}, "events": []}.get(operation)


def test_a_job_of_days_keeps_its_newest_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_events, "KEPT", 100)
    events = JobEvents("days", Session(), lambda replica, reason: None)  # type: ignore[arg-type]
    for number in range(250):
        events.record("group_lost", number=number)
    events.close()
    assert [event.data["number"] for event in events.recorded] == list(range(150, 250))
