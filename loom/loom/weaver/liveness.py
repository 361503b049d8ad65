"""The liveness of replicas: lost connections, silence, stalls and ends; and the notices of failures."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from operator import itemgetter

from loom.control.handshake import COMES_BACK_WITHIN
from loom.control.reports import MAX_REASON, PeerFailure, PeerFailures
from loom.process.identity import has_ended
from loom.weaver.commit_output import Outbox
from loom.weaver.device_failures import Action
from loom.weaver.dispatcher import CommandDispatcher
from loom.weaver.inspection import Stacks
from loom.weaver.persistent_state import Registry
from loom.weaver.replicas import Cause, End, Replica
from loom.weaver.states import LIVING, ReplicaEnding, ReplicaState


class PeerNotices:
    """The part of the weaver that tells the replicas of a job about failed ones."""

    def __init__(self, known: Registry, outbox: Outbox) -> None:
        self._known = known
        self._outbox = outbox
        self._failed: dict[str, list[PeerFailure]] = {}
        """The failures since the last commit, by job."""

    def failed(self, replica: Replica) -> None:
        """Note that a replica has failed. The others hear of it with the next commit, in one frame for all."""
        self._failed.setdefault(replica.job, []).append(_failure(replica))

    def tell(self) -> None:
        """Tell the connected replicas of each job the failures since the last call."""
        if not self._failed:
            return
        frames = {job: PeerFailures(tuple(failures)) for job, failures in self._failed.items()}
        self._failed.clear()
        for replica in self._known.replicas.values():
            if replica.link is not None and replica.state in LIVING and replica.job in frames:
                self._outbox.send(replica, frames[replica.job])

    def tell_again(self, replica: Replica) -> None:
        """Tell a replica that has reconnected all failures in its time: it may have missed some."""
        failures = tuple(
            _failure(peer)
            for peer in self._known.replicas.values()
            if peer.state is ReplicaState.FAILED and peer.job == replica.job and peer.changed >= replica.registered
        )
        if failures:
            self._outbox.send(replica, PeerFailures(failures))


def _failure(replica: Replica) -> PeerFailure:
    return PeerFailure(replica.id, replica.instance, (replica.died_of or "")[:MAX_REASON])


SUCCESSOR_WITHIN = 15.0
"""Seconds that a process has to take the place of a dead one for which it waited, and the commands given then."""

_MAX_STALL_STACKS = 16
"""Stacks of stalled replicas at a time: when a collective hangs, every replica stalls, and a few stacks say why."""


_REMEMBERED_HOLDS = 100


@dataclass(frozen=True)
class LivenessTimeouts:
    """The times that the weaver waits for replicas, in seconds."""

    beat: float = 1.0
    """Seconds between two heartbeats of a replica."""
    missed_beats: int = 3
    """Heartbeats after which a replica without a connection has failed, and a silent connection is closed."""
    grace: float = 1.0
    """Seconds in which a replica may reconnect before its state changes."""
    restart_grace: float = 10.0
    """Seconds after the weaver's start in which no replica fails for want of a connection."""
    stall_factor: float = 10.0
    """A running replica counts as stalled after this many median step times without a step."""
    stall_least: float = 2.0
    """Seconds without a step before which no replica counts as stalled."""


class Liveness:
    """The part of the weaver that decides which replicas live."""

    def __init__(
        self,
        known: Registry,
        outbox: Outbox,
        timing: LivenessTimeouts,
        started: float,
        dispatcher: CommandDispatcher,
        stacks: Stacks,
        peers: PeerNotices,
        left: Callable[[Replica, float], None],
    ) -> None:
        self._known = known
        self._outbox = outbox
        self._timing = timing
        self._started = started
        self._dispatcher = dispatcher
        self._stacks = stacks
        self._peers = peers
        self._left = left
        """Called for a replica that has said goodbye, when its exit code is not awaited any longer."""
        self._checks: dict[int, list[tuple[float, Replica]]] = {}
        """By tenth of a second the (time, replica) checks in it, which is cheaper than one heap of thousands.

        A check is skipped if a later `schedule` replaced it.
        """
        self._tenths: list[int] = []
        """A heap of these tenths."""
        self._held_up: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED_HOLDS)
        """When the weaver noticed that it had listened to nobody for some seconds, and for how many."""

    @property
    def settled(self) -> bool:
        """True if no check is due, ever."""
        return not self._checks

    def note_held_up(self, seconds: float, now: float) -> None:
        """Note that nobody was listened to for some seconds until now: no silence in them is a replica's."""
        self._held_up.append((now, seconds))

    def _deaf(self, since: float) -> float:
        """Return the seconds since a time in which nobody was listened to."""
        return sum(seconds for _, seconds in takewhile(lambda hold: hold[0] > since, reversed(self._held_up)))

    def tick(self, now: float) -> None:
        later: list[tuple[float, Replica]] = []
        try:
            while self._tenths and self._tenths[0] <= now * 10:
                tenth = self._tenths[0]
                checks = self._checks[tenth]
                checks.sort(key=itemgetter(0))
                checks.reverse()
                while checks:  # a check may add others
                    at, replica = checks.pop()
                    if at > now:
                        later.append((at, replica))
                    elif replica.check_at == at:
                        self._check(replica, now)
                if self._tenths[0] == tenth:
                    del self._checks[heapq.heappop(self._tenths)]
        finally:
            for at, replica in later:
                self._enter(replica, at)

    def _check(self, replica: Replica, now: float) -> None:
        timing = self._timing
        if replica.state not in LIVING:
            return self._dispatcher.end_all(replica, self._dispatcher.why_ended(replica), now)
        if replica.leaving is not None:
            return self._left(replica, now)
        silence = timing.beat * timing.missed_beats
        if replica.link is None:
            if replica.state is not ReplicaState.RECOVERING:
                self._known.move(replica, Cause.LINK_LOST, now)
            due = max(replica.link_lost + silence, self._started + timing.restart_grace)
            if replica.process is not None and has_ended(replica.process):
                return self._missed(replica, now)
            due += self._deaf(replica.link_lost)
            if now < due:
                return self.schedule(replica, due)
            reason = f"not connected for {now - replica.link_lost:.1f} s"
            if 0.0 < replica.heard < replica.link_lost:  # the connection was cut for its silence
                reason = f"nothing heard for {now - replica.heard:.1f} s"
            return self.fail(replica, Cause.SILENT, End(ReplicaEnding.LOST, reason, guessed=True), now)
        if replica.link.has_unheard:  # the weaver is late, and not the replica
            return self.schedule(replica, now + timing.beat)
        due = replica.heard + silence + self._deaf(replica.heard)
        if now >= due:
            self._outbox.close(replica.link)
            self._outbox.urgent = True
            return self.unlink(replica, now)
        if replica.state is ReplicaState.RUNNING and not replica.made_all_steps:
            stalled = replica.progress + timing.stall_least
            if now < stalled:  # the baseline does not matter yet, which takes time to find
                due = min(due, stalled)
            elif (baseline := replica.baseline_step_time()) is not None:
                stalled = max(stalled, replica.progress + timing.stall_factor * baseline)
                stalled += self._deaf(replica.progress)
                if now >= stalled:
                    self._stall(replica, baseline, now)
                else:
                    due = min(due, stalled)
        self.schedule(replica, due)

    def _missed(self, replica: Replica, now: float) -> None:
        """Record that a replica's process ended on this machine without a connection: the weaver was away then."""
        reason = f"its process {replica.pid} is gone"
        if now > (replica.reported or replica.registered) + COMES_BACK_WITHIN:  # for longer than a goodbye waits
            end = End(ReplicaEnding.LOST, f"{reason}, and nobody was there to hear how it ended", guessed=True)
        else:
            end = End(ReplicaEnding.CRASHED, reason, guessed=True)
        self.fail(replica, Cause.DIED, end, now)

    def _stall(self, replica: Replica, baseline: float, now: float) -> None:
        about = {"step": replica.step, "seconds": now - replica.progress, "usual_step_time": baseline}
        event = self._known.move(replica, Cause.NO_STEP, now, about={**about, "phase": replica.phase})
        if len(self._stacks) < _MAX_STALL_STACKS:
            self._stacks.want(replica, event)

    def unlink(self, replica: Replica, now: float) -> None:
        replica.link = None
        self._dispatcher.cohort_commands.unlinked(replica, now)
        if replica.state in LIVING:
            replica.link_lost = now
            self.schedule(replica, now + self._timing.grace)
        self._known.touch(replica)

    def fail(self, replica: Replica, cause: Cause, end: End, now: float, by: int | None = None) -> None:
        """Record that a replica has failed, and carry out its group's policy."""
        reason = end.reason
        action = self._known.policy.action(replica.group)
        devices = self._known.devices.devices_of(replica.id)
        about = {**end.about(), "step": replica.step, "devices": devices, "action": action.value}
        event = self._known.move(replica, cause, now, by, about)
        respawns = replica.respawns or action is Action.RESPAWN
        heard, stepped = replica.heard, replica.progress
        self._known.goodput.failed(replica.job, replica.id, reason, now, heard, stepped, replica.step, respawns)
        replica.end(end)
        replica.end_event = event
        self._peers.failed(replica)
        self._end(replica, now)
        if action is Action.RESPAWN:
            self._dispatcher.want_respawn(replica, reason, event, now)

    def finish(self, replica: Replica, end: End, now: float, by: int | None = None) -> None:
        about = {**end.about(), "step": replica.step}
        event = self._known.move(replica, Cause.SAID_FINISHED, now, by, about)
        replica.end(end)
        replica.end_event = event
        self._known.drain(replica)
        self._known.goodput.finished(replica.job, replica.id, now)
        self._end(replica, now)

    def explain(self, replica: Replica, end: End, now: float) -> None:
        """Replace what is known of a replica's end by what its session has seen of it, in the event, too."""
        about = {**end.about(), "step": replica.step}
        if replica.state is ReplicaState.FINISHED and end.ending in (ReplicaEnding.CRASHED, ReplicaEnding.LOST):
            replica.end_event = self._known.move(replica, Cause.EXPLAINED, now, replica.end_event, about)
        replica.end(end)
        self._known.save(replica)
        self._known.runs.moved(replica, now)
        if replica.end_event is not None:
            self._known.events.amend(replica.end_event, **end.about())

    def _end(self, replica: Replica, now: float) -> None:
        self._outbox.urgent = True
        reason, successor = self._dispatcher.why_ended(replica), replica.successor_since
        if successor is None:
            self._dispatcher.end_all(replica, reason, now)
        else:
            self._dispatcher.end_before(replica, successor, reason, now)
            self.schedule(replica, now + SUCCESSOR_WITHIN)
        self._known.forget_surplus()

    def schedule(self, replica: Replica, at: float) -> None:
        """Check a replica at a time, and not before."""
        replica.check_at = at
        self._enter(replica, at)

    def _enter(self, replica: Replica, at: float) -> None:
        tenth = int(at * 10)
        if tenth not in self._checks:
            self._checks[tenth] = []
            heapq.heappush(self._tenths, tenth)
        self._checks[tenth].append((at, replica))
