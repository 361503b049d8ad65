"""The registration of training processes: a threadlet says hello, and its process becomes a replica.

A module of its own, since it joins all parts of `loom.weaver.weaver.Weaver`, and decides who holds a replica's id.
"""

from __future__ import annotations

from dataclasses import replace

from loom.control.handshake import TAKEN_ADVICE, Activity, ThreadletHello, ThreadletWelcome
from loom.errors import AuthenticationError, Conflict
from loom.weaver.commit_output import Outbox, OutboxPeer
from loom.weaver.dispatcher import CommandDispatcher
from loom.weaver.inspection import Profiles
from loom.weaver.liveness import Liveness, LivenessTimeouts, PeerNotices
from loom.weaver.persistent_state import Registry
from loom.weaver.replicas import Cause, Replica
from loom.weaver.reports import Reports
from loom.weaver.states import LIVING

BEGINS_WITHIN = 60.0
"""Seconds in which the processes of one start register, also if the weaver is killed meanwhile."""

_CAUSES = {
    Activity.RUNNING: Cause.RESUMED,
    Activity.PAUSED: Cause.PAUSED,
    Activity.DRAINING: Cause.DRAINED,
}


class ThreadletRegistration:
    """The part of the weaver that registers replicas."""

    def __init__(
        self,
        known: Registry,
        outbox: Outbox,
        timing: LivenessTimeouts,
        instance: str,
        dispatcher: CommandDispatcher,
        profiles: Profiles,
        reports: Reports,
        peers: PeerNotices,
        liveness: Liveness,
        started: float,
    ) -> None:
        self._known = known
        self._outbox = outbox
        self._timing = timing
        self._instance = instance
        self._dispatcher = dispatcher
        self._profiles = profiles
        self._reports = reports
        self._peers = peers
        self._liveness = liveness
        self._started = started

    def register(self, peer: OutboxPeer, hello: ThreadletHello, now: float, session: str | None = None) -> None:
        """Register the replica of a threadlet whose key was checked, and is of one ``session`` if that is given.

        Raises:
            LoomError: the replica, or the session that the threadlet names, is not the key's.
        """
        if hello.asks:
            return self._answer_whether_living(peer, hello.group, now)
        if session is not None:
            hello = self._of_session(hello, session)
        self._known.check_description(hello.replica, hello.config, hello.handlers)
        replica = self._known.replicas.get(hello.replica) or self._known.add(hello.replica)
        if replica.link is not None:
            if replica.instance != hello.instance and now - replica.heard < self._silence:
                replica.await_successor(hello.instance, now)
                who = f"another process (pid {replica.pid} on {replica.host})"
                text = f"{who} is the replica {replica.id!r}: {TAKEN_ADVICE}"
                return self._outbox.refuse(peer, "replica_taken", text)
            self._outbox.close(replica.link)
            self._profiles.lost(replica)
        again = replica.instance == hello.instance
        event = self._enter(replica, peer, hello, again, now)
        self._welcome(replica, now)
        if again:
            self._peers.tell_again(replica)
        for injection, evidence in hello.removed.items():
            self._reports.note_removed(replica, injection, evidence, now)
        self._dispatcher.send_again(replica)
        if not again:
            self._dispatcher.tell_of_devices(replica, event, now)
            self._dispatcher.begin_branch(replica, hello, now)
        self._dispatcher.restore(replica, now)
        self._dispatcher.cohort_commands.tick(now)
        self._outbox.urgent = True
        self._liveness.schedule(replica, now + min(self._silence, self._timing.stall_least))

    @property
    def _silence(self) -> float:
        """Seconds after which a process of which nothing is heard may be dead."""
        return self._timing.beat * self._timing.missed_beats

    def _is_there(self, replica: Replica, hello: ThreadletHello, now: float) -> bool:
        """Return whether a replica lives and was heard lately.

        A process whose start has no id takes one for it, too, that registered just before the weaver was started
        again and could not reconnect yet: they may be of the same start.
        """
        if replica.state not in LIVING:
            return False
        if replica.heard == 0.0:  # it has not come back since the weaver was started
            begins = hello.start is None and replica.registered > self._started - BEGINS_WITHIN
            return begins and now < self._started + self._timing.restart_grace
        return now - replica.heard < self._silence

    def _answer_whether_living(self, peer: OutboxPeer, group: str, now: float) -> None:
        living = [
            replica
            for replica in self._known.replicas.values()
            if replica.group == group and replica.state in LIVING and now - replica.heard < self._silence
        ]
        if not living:
            return self._outbox.refuse(peer, "replica_unknown", f"no replica of {group!r} lives")
        one = living[0]
        where = f"{one.id!r} is process {one.pid} on {one.host}"
        self._outbox.refuse(peer, "replica_taken", f"a training named {group!r} lives ({where})")

    def _of_session(self, hello: ThreadletHello, session: str) -> ThreadletHello:
        """Return the hello of a threadlet of a session, if no other session is in it or has the replica."""
        if hello.session not in (None, session):
            raise AuthenticationError(
                f"the key is of the session {session!r}, and registers no replica of {hello.session!r:.80}"
            )
        known = self._known.replicas.get(hello.replica)
        if known is not None and known.session != session and known.state in LIVING:
            raise Conflict(
                f"the replica {known.id!r} lives outside of the session {session!r}: {TAKEN_ADVICE}",
                code="replica_taken",
            )
        return replace(hello, session=session)

    def _enter(self, replica: Replica, peer: OutboxPeer, hello: ThreadletHello, again: bool, now: float) -> int:
        """Enter a process as a replica, or the same process ``again``; return the id of the event of that."""
        self._known.runs.assign(replica, hello, again, now, lambda one: self._is_there(one, hello, now))
        replica.leaving = None  # its goodbye was not told to be stored, so it has come back to repeat it
        if not again:
            self._dispatcher.overrides.keep(replica, hello)
            since = replica.begin_instance(hello.instance, now)
            reason = f"a new process became {replica.id!r} before it had applied this"
            self._dispatcher.end_before(replica, since, reason, now)
        job, last_sign = replica.job, replica.heard
        self._known.describe(replica, hello)
        replica.join(hello.cohort, now)
        if replica.job != job:
            self._known.goodput.finished(job, replica.id, now)
        if again:
            self._known.goodput.back(replica.job, replica.id, now)
        else:
            self._known.goodput.registered(replica.job, replica.id, now, last_sign, replica.run or "")
        replica.account_pause = 0.0
        self._reports.held.discard(replica)
        peer.replica, replica.link, replica.heard = replica, peer, now
        about = {"instance": hello.instance, "host": hello.host, "pid": hello.pid}
        about |= {"group": hello.group, "rank": hello.rank}
        devices = [device.uuid for device in hello.devices]
        kind = "reconnected" if again else "registered"
        event = self._known.events.append(now, kind, replica.id, **about, devices=devices, step=hello.step)
        if not again or hello.state is None:
            self._known.move(replica, Cause.REGISTERED, now, event.id)
        if hello.state is not None:
            self._known.move(replica, _CAUSES[hello.state], now, event.id)
        replica.progress = now
        if hello.step is not None:
            replica.take_step(hello.step, now, now)
        return event.id

    def _welcome(self, replica: Replica, now: float) -> None:
        self._outbox.send(
            replica,
            ThreadletWelcome(
                self._timing.beat,
                self._instance,
                replica.seq,
                spent=True,
                changes=True,
                health=True,
                endings=True,
                status_types=True,
                exits=True,
                cohorts=True,
                offers=True,
                goodbyes=True,
                start=self._known.runs.wants_facts(replica, now),
            ),
        )
