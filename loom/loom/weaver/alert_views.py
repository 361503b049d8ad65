"""The weaver's view of alerts, for users: JSON objects as in `loom.weaver.views`.

The guide's page about alerts says when a rule fires, and what is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from loom.weaver.views import View


class AlertKind(str, Enum):
    """The condition of a rule."""

    NOT_A_NUMBER = "not_a_number"
    """A metric of a run is NaN or infinite."""
    DIVERGED = "diverged"
    """A loss stays far above its best value."""
    NO_PROGRESS = "no_progress"
    """A living run makes no step for too long."""
    CRASHED = "crashed"
    """A run has crashed, was lost or was evicted."""
    FINISHED = "finished"
    """A run has ended in another way."""
    DEVICE = "device"
    """A device has failed, or is not healthy."""
    DISK = "disk"
    """A disk is nearly full: that of the weaver's store, or of a run's checkpoints."""
    GOODPUT = "goodput"
    """The goodput of a run's job is under a bound."""

    def __str__(self) -> str:
        return self.value


WebhookForm = Literal["json", "slack"]


class DeliveryState(str, Enum):
    """The state of a delivery."""

    WAITING = "waiting"
    """It was not answered yet, and is tried again."""
    SENT = "sent"
    """The webhook has answered with 2xx, or the e-mail command has ended with 0."""
    GIVEN_UP = "given up"
    """It was tried for as long as an alert is, or too many alerts waited."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class AlertRule(View):
    """A rule. Options that its condition does not use are None."""

    id: str
    rule: AlertKind
    run: str | None = None
    """The id or the name of runs, or a glob over both; None for all."""
    group: str | None = None
    """The group of runs, or a glob; None for all."""
    metric: str | None = None
    """A glob over metrics."""
    factor: float | None = None
    """How far above its best value a loss has diverged, as a multiple of the best value."""
    window: float | None = None
    """Seconds for which the condition has to hold."""
    seconds: float | None = None
    """Seconds without a step."""
    steps: float | None = None
    """Median step times without a step."""
    below: float | None = None
    """The least goodput, from 0 to 1."""
    above: float | None = None
    """The part of a disk that may be used, from 0 to 1."""
    rearm: float = 60.0
    """Seconds for which the condition must not hold before the rule fires again about the same run or device."""
    webhook: str | None = None
    """The scheme and the host of the webhook. The rest of the address is a secret, which is never shown."""
    form: WebhookForm = "json"
    email: tuple[str, ...] = ()
    quiet: bool = False
    """True if the page shows no notice."""
    by: str = ""
    """The name of the token that set the rule."""
    set: float = 0.0
    """When it was set, in seconds since the epoch."""
    user: str = ""

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> AlertRule:
        return super().from_body({**body, "rule": AlertKind(body["rule"]), "email": tuple(body.get("email", ()))})


@dataclass(frozen=True)
class AlertDelivery(View):
    """What became of an alert at one place."""

    to: str
    """The scheme and host of a webhook, or ``e-mail``."""
    state: DeliveryState = DeliveryState.WAITING
    attempts: int = 0
    status: int | None = None
    """The HTTP status of the last answer."""
    error: str | None = None
    """Why the last attempt failed."""
    time: float | None = None
    """When the last attempt ended, in seconds since the epoch."""

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> AlertDelivery:
        return super().from_body({**body, "state": DeliveryState(body["state"])})


@dataclass(frozen=True)
class Alert(View):
    """An alert that a rule has made, with what became of it."""

    id: str
    """The idempotency key: each delivery of the alert has it."""
    rule: AlertKind
    message: str
    time: float
    """Seconds since the epoch."""
    of: str = ""
    """The id of the rule."""
    run: str | None = None
    run_name: str | None = None
    replica: str | None = None
    metric: str | None = None
    step: int | None = None
    value: float | str | None = None
    """What was measured; ``NaN``, ``Infinity`` and ``-Infinity`` are texts."""
    url: str | None = None
    """The run on the page."""
    test: bool = False
    user: str = ""
    deliveries: tuple[AlertDelivery, ...] = field(default=())

    def to_body(self) -> dict[str, object]:
        return {**super().to_body(), "deliveries": [one.to_body() for one in self.deliveries]}

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Alert:
        deliveries = tuple(map(AlertDelivery.from_body, body.get("deliveries", ())))
        return super().from_body({**body, "rule": AlertKind(body["rule"]), "deliveries": deliveries})
