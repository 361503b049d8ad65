"""The weaver's core, without sockets and without a clock of its own.

Methods take ``now``, in seconds since the epoch. They put their output into the outbox, and `Weaver.commit` returns
it, so that no output leaves before the state that it reports is stored. The cost of a message does not grow with
the number of replicas, except if a caller asks for all of them.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from loom.control.commands import Acknowledged
from loom.control.introduction import Bye, ThreadletHello
from loom.control.reports import Stack
from loom.errors import ProtocolMismatch
from loom.weaver.device_failures import DeviceFailures
from loom.weaver.dispatcher import Dispatcher
from loom.weaver.liveness import Liveness, LivenessTimeouts
from loom.weaver.outbox import Outbox, Output, Peer
from loom.weaver.registration import Registration
from loom.weaver.registry import Registry
from loom.weaver.replicas import Cause, Replica
from loom.weaver.reports import Reports
from loom.weaver.stacks import Stacks
from loom.weaver.states import LIVING
from loom.weaver.views import WeaverEvent


class Weaver:
    """The core of the weaver: it knows replicas and devices, and commands them.

    Threadlets have to show the ``key``.
    """

    def __init__(self, known: Registry, key: str, now: float, timing: LivenessTimeouts | None = None) -> None:
        self.known = known
        self.instance = uuid.uuid4().hex
        self.started = now
        self.timing = timing or LivenessTimeouts()
        self._outbox = Outbox()
        self.stacks = Stacks(known, self._outbox)
        self.reports = Reports(known, self._outbox)
        self.dispatcher = Dispatcher(known, self._outbox)
        self.failures = DeviceFailures(known, self._outbox, self.dispatcher)
        self._liveness = Liveness(known, self._outbox, self.timing, now, self.dispatcher, self.stacks)
        self.registration = Registration(
            known, self._outbox, self.timing, key, self.instance, self.dispatcher, self._liveness, self.reports
        )
        self._takers: dict[str, Callable[[Replica, list[Any], float], None]] = {
            **self.reports.takers,
            Acknowledged.KIND: self.dispatcher.take,
            Stack.KIND: self.stacks.take_from,
            Bye.KIND: self.registration.bye,
        }
        """The method for each kind of frame from a threadlet that has said hello."""
        for replica in known.replicas.values():
            if replica.state in LIVING:
                replica.link_lost = now
                self._liveness.schedule(replica, now + self.timing.grace)
        known.events.append(now, "weaver_started", None, instance=self.instance, replicas=len(known.replicas))

    def receive(self, peer: Peer, frames: list[list[Any]], now: float) -> None:
        """Take frames from a threadlet; after a `ProtocolMismatch` the caller refuses the connection."""
        for frame in frames:
            replica = peer.replica
            if replica is None:
                self.registration.hello(peer, ThreadletHello.from_body(frame), now)
            else:
                replica.heard = now
                take = self._takers.get(frame[0])
                if take is None:
                    raise ProtocolMismatch(f"there is no frame of kind {frame[0]!r:.40} from a threadlet")
                take(replica, frame, now)
            if peer.replica is None:  # the threadlet was refused, or has said goodbye
                return

    def refuse(self, peer: Peer, code: str, text: str) -> None:
        self._outbox.refuse(peer, code, text)

    def lost(self, peer: Peer, now: float) -> None:
        replica, peer.replica = peer.replica, None
        if replica is not None and replica.link is peer:
            replica.heard = now  # the end of its connection is the last sign of a process
            self._liveness.unlink(replica, now)

    def died(self, replica: Replica, instance: str, reason: str, now: float) -> None:
        """Record that a replica's process is dead, unless another process has become the replica meanwhile."""
        if replica.instance == instance and replica.state in LIVING:
            self._liveness.fail(replica, Cause.DIED, reason, now)

    def note(self, kind: str, replica: str | None, data: dict[str, Any], now: float) -> WeaverEvent:
        self._outbox.urgent = True
        return self.known.events.append(now, kind, replica, **data)

    def set_policy(self, group: str, action: str, by: str, now: float) -> None:
        self.known.set_policy(group, action, by, now)
        self._outbox.urgent = True

    def tick(self, now: float) -> None:
        """Do the periodic work that is due."""
        self.known.goodput.tick(now)
        self._liveness.tick(now)

    @property
    def urgent(self) -> bool:
        return self._outbox.urgent

    def commit(self, now: float) -> Output:
        """Store the changes; return the output about them. After a `sqlite3.Error` the weaver has to end."""
        self._outbox.output.events = self.known.commit(now)
        self.reports.tell_stored(now)
        return self._outbox.take()
