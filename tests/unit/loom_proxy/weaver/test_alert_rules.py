"""`loom.alerts` on the laptop: what it asks for, and what it shows of the answers."""

from __future__ import annotations

from typing import Any

from loom.weaver.alert_views import AlertKind, DeliveryState
from loom_proxy.weaver.methods import WeaverMethods

RULE = {
    "id": "abc123",
    "rule": "crashed",
    "email": ["ann@example.com"],
    "webhook": "https://h/…",
    "of_a_newer_weaver": 1,
}
SENT = {"to": "https://h/…", "state": "given up", "attempts": 1, "status": None, "error": "HTTP 404", "time": 2.0}
ALERT = {"id": "x", "rule": "crashed", "message": "it crashed", "time": 1.0, "deliveries": [SENT]}


def test_rules_are_added_tested_and_removed_by_what_was_listed() -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    def ask(operation: str, **arguments: Any) -> Any:
        asked.append((operation, {name: value for name, value in arguments.items() if value is not None}))
        made = {**RULE, "id": "new456", "rule": "no_progress"}
        return {
            "alerts": [RULE],
            "set_alert": made,
            "test_alert": ALERT,
            "alert_log": [ALERT],
            "remove_alert": RULE,
        }[operation]

    rules = WeaverMethods(ask).alerts()
    (first,) = rules
    assert (first.rule, first.email, first.rearm) == (AlertKind.CRASHED, ("ann@example.com",), 60.0)

    made = rules.add("no_progress", run="sft*", seconds=90.0, webhook="https://h/secret")
    assert [one.id for one in rules] == ["abc123", "new456"]
    (delivery,) = rules.test(made, wait=3.0).deliveries
    assert (delivery.state, delivery.error) == (DeliveryState.GIVEN_UP, "HTTP 404")
    assert rules.log(made, run="sft")[0].message == "it crashed"
    rules.remove("abc")
    assert [one.id for one in rules] == ["new456"]

    assert asked[1:] == [
        (
            "set_alert",
            {"rule": "no_progress", "run": "sft*", "seconds": 90.0, "webhook": "https://h/secret", "email": []},
        ),
        ("test_alert", {"alert": "new456", "wait": 3.0}),
        ("alert_log", {"alert": "new456", "run": "sft", "limit": 100}),
        ("remove_alert", {"alert": "abc"}),
    ]
