"""The weaver's core, without sockets and without a clock of its own.

Methods take ``now``, in seconds since the epoch. They put their output into the outbox, and `Weaver.commit` returns
it, so that no output leaves before the state that it reports is stored. The cost of a message does not grow with
the number of replicas, except if a caller asks for all of them.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from loom.control.commands import Acknowledged
from loom.control.frame import Frame, unpack
from loom.control.handshake import Bye, CohortPlace, ExitCode, GoodbyeStored, Leaving, Silent, TrainingEnding
from loom.control.operations import ReportEnded, ReportSpawned
from loom.control.process_end import ProcessEnd
from loom.control.profiles import Profile
from loom.control.reports import DeviceFailed, FailureNoted, Stack
from loom.control.run_start import StartFacts
from loom.errors import ProtocolMismatch
from loom.weaver.commit_output import CommittedOutput, Outbox, OutboxPeer
from loom.weaver.dispatcher import CommandDispatcher
from loom.weaver.inspection import Profiles, Stacks
from loom.weaver.liveness import Liveness, LivenessTimeouts, PeerNotices
from loom.weaver.persistent_state import Registry
from loom.weaver.registration import ThreadletRegistration
from loom.weaver.replicas import Cause, End, Replica
from loom.weaver.reports import Reports, Taker, reading
from loom.weaver.states import LIVING, ReplicaEnding
from loom.weaver.storage.store import Commit
from loom.weaver.storage.writer import Undurable
from loom.weaver.views import WeaverEvent

EXIT_WITHIN = 60.0
"""Seconds that a process has between its goodbye and its end. Other programs' `atexit` functions may take long."""

_UNTOLD = (ReplicaEnding.COMPLETED, ReplicaEnding.ENDED_EARLY, ReplicaEnding.UNKNOWN)
"""The ends in order that nobody else has brought about."""


def _place(report: ReportSpawned | ReportEnded) -> dict[str, Any]:
    """Return what an event repeats of a driver's report about processes."""
    return {name: getattr(report, name) for name in ("session", "procs", "mesh", "rank", "host", "what")}


class Weaver:
    """The core of one user's weaver: it knows and commands the user's replicas."""

    def __init__(self, known: Registry, now: float, timing: LivenessTimeouts | None = None) -> None:
        self.known = known
        self.instance = uuid.uuid4().hex
        self.started = now
        self.timing = timing or LivenessTimeouts()
        self.undurable: Undurable | None = None
        """Why nothing is stored now; None if it is. Requests that would be acknowledged as stored are refused
        meanwhile."""
        self.outbox = Outbox()
        self.stacks = Stacks(known, self.outbox)
        self.profiles = Profiles(self.outbox)
        self.reports = Reports(known, self.outbox)
        self.dispatcher = CommandDispatcher(known, self.outbox)
        self._peers = PeerNotices(known, self.outbox)
        self._liveness = Liveness(
            known, self.outbox, self.timing, now, self.dispatcher, self.stacks, self._peers, self._left
        )
        self.registration = ThreadletRegistration(
            known,
            self.outbox,
            self.timing,
            self.instance,
            self.dispatcher,
            self.profiles,
            self.reports,
            self._peers,
            self._liveness,
            now,
        )
        takers: dict[type[Frame], Taker] = {
            **self.reports.takers,
            CohortPlace: self.dispatcher.join,
            DeviceFailed: self._device_failed,
            StartFacts: known.runs.take_facts,
            Stack: self.stacks.take_from,
            Profile: self.profiles.take_from,
            Bye: self._bye,
            Leaving: self._leaving,
            ExitCode: self._exited,
            Silent: self._silent,
        }
        self._takers = {kind.KIND: reading(kind, take) for kind, take in takers.items()} | self.reports.frequent
        self._takers[Acknowledged.KIND] = self.dispatcher.read
        known.alerts.hurry = self.outbox.hurry
        for replica in known.replicas.values():
            if replica.state in LIVING:
                replica.link_lost = now
                self._liveness.schedule(replica, now + self.timing.grace)
        known.events.append(now, "weaver_started", None, instance=self.instance, replicas=len(known.replicas))

    def receive(self, peer: OutboxPeer, packed: bytes, now: float) -> None:
        """Take a frame from a threadlet after its hello; the caller refuses it after a `ProtocolMismatch`."""
        frame = unpack(packed)
        replica = peer.replica
        if replica is None:  # the threadlet was refused, or has said goodbye
            return
        replica.heard = now
        take = self._takers.get(frame[0])
        if take is None:
            raise ProtocolMismatch(f"there is no frame of kind {frame[0]!r:.40} from a threadlet")
        take(replica, frame, packed, now)

    def lost(self, peer: OutboxPeer, now: float) -> None:
        replica, peer.replica = peer.replica, None
        if replica is not None and replica.link is peer:
            replica.heard = now  # the end of its connection is the last sign of a process
            self.profiles.lost(replica)
            self._liveness.unlink(replica, now)

    def died(
        self, replica: Replica, instance: str, reason: str, now: float, seen: ProcessEnd | None = None
    ) -> None:
        """Record that a replica's process is dead, unless another process has become the replica meanwhile.

        Args:
            reason: what is told if the machine does not tell how the process ended.
            seen: how it ended, if the machine tells.
        """
        if replica.instance != instance or replica.state not in LIVING:
            return
        if replica.leaving is not None:
            return self._left(replica, now, seen)
        if seen is not None and seen.code == 0 and not replica.session:
            ending = TrainingEnding.EARLY if replica.phase == "step" else TrainingEnding.FINISHED
            bye = Bye("its process exited with code 0, without a goodbye", ending)
            return self._liveness.finish(replica, self._orderly_end(replica, bye, seen), now)
        exit = None if seen is None or replica.session else seen.to_body()
        end = End(ReplicaEnding.CRASHED, (seen and seen.cause) or reason, exit=exit, guessed=True)
        self._liveness.fail(replica, Cause.DIED, end, now)

    def note(self, kind: str, replica: str | None, data: Mapping[str, Any], now: float) -> WeaverEvent:
        self.outbox.urgent = True
        return self.known.events.append(now, kind, replica, **data)

    def durable_again(self, since: float, reason: str, now: float) -> None:
        """Log that for a time nothing was stored, and have the reports sent again for which there was no room."""
        held = self.reports.release()
        self.known.events.append(
            now, "undurable", None, since=since, reason=reason, replicas=[one.id for one in held]
        )
        for replica in held:
            if (link := replica.link) is not None:
                self.lost(link, now)
                self.outbox.close(link)  # the next hello tells the threadlet which reports are stored
        self.outbox.urgent = True

    def set_policy(self, group: str, action: str, by: str, now: float) -> None:
        self.known.set_policy(group, action, by, now)
        self.outbox.urgent = True

    def supervision(self, report: ReportEnded, now: float) -> list[str]:
        """Take a driver's report that processes of its meshes have ended; return the ids of their replicas."""
        reason = report.reason or report.what or "its process is dead"
        there = self.known.in_procs(report.session, str(report.procs))
        found = [replica for replica in there if report.rank is None or replica.rank == report.rank]
        ended = [replica for replica in found if replica.state in LIVING]
        seen = ProcessEnd.from_body(report.exit).to_body() if isinstance(report.exit, Mapping) else None
        event = self.known.events.append(
            now, "supervision", None, **_place(report), reason=reason, exit=seen, replicas=[one.id for one in ended]
        )
        ending = ReplicaEnding.LOST if report.lost else ReplicaEnding.CRASHED
        if report.what == "stopped":
            ending = ReplicaEnding.CANCELLED
        for replica in found:
            end = End(ending, reason, exit=seen)
            if replica.state not in LIVING:
                self._explain(replica, end, now)
            elif report.what == "stopped":
                done = replica.max_step is not None and replica.made_its_steps
                finished = End(ReplicaEnding.COMPLETED, "it made its last step", exit=seen)
                self._liveness.finish(replica, finished if done else end, now, event.id)
            else:
                self._liveness.fail(replica, Cause.DIED, end, now, event.id)
        self.outbox.urgent = True
        return [replica.id for replica in ended]

    def _explain(self, replica: Replica, end: End, now: float) -> None:
        """Take a session's word for the end of a process that was noticed otherwise, and not explained, before.

        A process says goodbye as it ends, but not why; and its end is seen before its session reports it.
        """
        known = replica.known_end
        if known is None or known.exit is not None:
            return
        silence = self.timing.beat * self.timing.missed_beats
        if end.ending is ReplicaEnding.CANCELLED and known.closed and now > replica.changed + silence:
            return  # it had ended long before its processes were stopped
        exited = end.ending is ReplicaEnding.CRASHED and end.exit is not None and end.exit["code"] == 0
        if known.guessed and not (exited and known.ending is ReplicaEnding.ENDED_EARLY):
            self._liveness.explain(replica, end, now)
        elif known.ending is ReplicaEnding.CRASHED and end.exit is not None:
            self._liveness.explain(replica, replace(known, exit=end.exit), now)

    def spawned(self, report: ReportSpawned, now: float) -> None:
        """Log a driver's report that it has started processes, whose threadlets will say hello."""
        self.known.events.append(now, "spawned", None, **_place(report))

    def note_held_up(self, seconds: float, now: float) -> None:
        """Note that the weaver's process listened to nobody for some seconds until now."""
        self._liveness.note_held_up(seconds, now)

    def tick(self, now: float) -> None:
        self.known.goodput.tick(now)
        self._liveness.tick(now)
        self.known.alerts.tick(now)
        self.dispatcher.cohort_commands.tick(now)

    @property
    def settled(self) -> bool:
        """True if nothing happens until something is received."""
        return (
            not self.urgent
            and self.known.settled
            and self._liveness.settled
            and self.dispatcher.cohort_commands.settled
        )

    @property
    def urgent(self) -> bool:
        return self.outbox.urgent

    def begin_commit(self, now: float) -> tuple[Commit | None, CommittedOutput]:
        """Return the changes to store, None if there are none, and the output for when they are stored.

        The commit before it has to be stored.
        """
        commit, self.outbox.output.events = self.known.begin_commit(now)
        self.reports.tell_stored(now)
        self._peers.tell()
        return commit, self.outbox.take()

    def commit(self, now: float) -> CommittedOutput:
        """Store the changes; return the output about them. After a `sqlite3.Error` the weaver has to end."""
        commit, output = self.begin_commit(now)
        if commit is not None:
            self.known.store.write(commit)
            commit.stored()
        return output

    def _device_failed(self, replica: Replica, failed: DeviceFailed, now: float) -> None:
        if failed.device in self.known.devices.devices_of(replica.id):
            self.dispatcher.fail_device(failed.device, failed.reason, replica.id, now)
        self.outbox.send(replica, FailureNoted(failed.id))
        self.outbox.urgent = True

    def _bye(self, replica: Replica, bye: Bye, now: float) -> None:
        self.outbox.send(replica, GoodbyeStored())
        self.outbox.close(replica.link)
        replica.link = None
        self.profiles.lost(replica)
        if bye.ending is TrainingEnding.FAILED:
            self._liveness.fail(replica, Cause.SAID_FAILED, End(ReplicaEnding.CRASHED, bye.reason), now)
        else:
            self._liveness.finish(replica, self._orderly_end(replica, bye), now)

    def _leaving(self, replica: Replica, leaving: Leaving, now: float) -> None:
        replica.leaving = leaving
        self.known.save(replica)
        self.outbox.send(replica, GoodbyeStored())
        self.outbox.urgent = True
        self.profiles.lost(replica)
        self._liveness.schedule(replica, now + EXIT_WITHIN)

    def _exited(self, replica: Replica, exited: ExitCode, now: float) -> None:
        if replica.leaving is not None:
            self._left(replica, now, ProcessEnd(code=exited.number))

    def _left(self, replica: Replica, now: float, seen: ProcessEnd | None = None) -> None:
        """Record the end of a replica that has said goodbye, as its process was seen to end if it was."""
        assert replica.leaving is not None
        if replica.link is not None:
            self.outbox.close(replica.link)
            replica.link = None
        end = self._orderly_end(replica, replica.leaving, seen)
        if seen is not None and (seen.signal or seen.code) and end.ending in _UNTOLD:
            end = End(ReplicaEnding.CRASHED, seen.cause, exit=end.exit)
            return self._liveness.fail(replica, Cause.SAID_FAILED, end, now)
        self._liveness.finish(replica, end, now)

    def _silent(self, replica: Replica, silent: Silent, now: float) -> None:
        replica.heard = now - max(0.0, silent.seconds)
        self.outbox.close(replica.link)
        self._liveness.unlink(replica, now)

    def _orderly_end(self, replica: Replica, bye: Bye | Leaving, seen: ProcessEnd | None = None) -> End:
        """Return how a replica has ended whose process says that it was not by a failure."""
        unsaid = isinstance(bye, Leaving) and (seen is None or not seen.cause)
        exit = None if seen is None or unsaid else seen.to_body()
        if bye.ending is TrainingEnding.EVICTED:
            return End(ReplicaEnding.EVICTED, bye.reason, exit=exit)
        if bye.ending is TrainingEnding.STOPPED:
            told = self.known.commands.that_stopped(replica)
            by = None if told is None else told.by
            ending = ReplicaEnding.ENDED_EARLY if told is None else ReplicaEnding.STOPPED
            return End(ending, bye.reason, by, exit)
        named = replica.max_step is not None
        if replica.made_its_steps and (named or (bye.ending is TrainingEnding.FINISHED and not unsaid)):
            reason = "it made its last step, and ended without saying how" if unsaid else bye.reason
            return End(ReplicaEnding.COMPLETED, reason, exit=exit)
        at = "before its first step" if replica.step is None else f"at step {replica.step:,}"
        of = f" of {replica.max_step:,}" if named else ""
        early = ReplicaEnding.ENDED_EARLY
        if unsaid and not named and bye.ending is TrainingEnding.FINISHED:
            early = ReplicaEnding.UNKNOWN
        how = ", without saying how" if unsaid else ""
        closed = isinstance(bye, Bye) and bye.ending is TrainingEnding.FINISHED
        return End(early, f"its program ended {at}{of}{how}", exit=exit, guessed=True, closed=closed)
