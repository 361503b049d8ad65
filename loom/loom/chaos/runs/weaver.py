"""What a run asks of a weaver: a laptop's `WeaverProxy` answers it, and in a gateway the weaver's own client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from loom.control.commands import Acknowledgement
    from loom.weaver.views import GoodputRecord, MetricPoint, ReplicaInfo, WeaverEvent


class RunInjection(Protocol):
    """An injected fault."""

    id: str

    def done(self) -> bool:
        """Return whether every replica has answered, as far as is known; send no request."""

    def outcomes(self) -> Mapping[str, Acknowledgement]:
        """Return each replica's acknowledgement."""

    @property
    def evidence(self) -> Mapping[str, Mapping[str, Any]]:
        """The evidence that the fault is in place, by replica; for a process of Loom, under the empty name."""


class RunWeaver(Protocol):
    """The weaver of the user whose replicas a plan strikes. Its methods wait for the answer."""

    def status(self) -> Mapping[str, Any]:
        """Return the weaver's id, its time and its newest event."""

    def replicas(self) -> Mapping[str, ReplicaInfo]:
        """Return every known replica by its id."""

    def events(self, after: int) -> Iterable[WeaverEvent]:
        """Return the events after one, the oldest first."""

    def history(self, replica: str, metric: str, *, since: float, points: int) -> list[MetricPoint]:
        """Return the points of a metric since a time."""

    def goodput(self) -> Mapping[str, GoodputRecord]:
        """Return the time accounting of each job."""

    def inject(
        self,
        fault: str,
        target: str | list[str],
        duration: float | None,
        params: dict[str, Any],
        id: str | None = None,
    ) -> RunInjection:
        """Inject a fault, with an id of the caller's choice."""

    def remove_injection(self, id: str) -> object:
        """Remove a fault before its time is over."""
