"""The registration of processes as replicas, and their ends: hellos, goodbyes, and reports of drivers."""

from __future__ import annotations

import hmac
from typing import Any

from loom.control.introduction import Activity, Bye, Ending, ThreadletHello, ThreadletWelcome
from loom.weaver.dispatcher import Dispatcher
from loom.weaver.liveness import Liveness, LivenessTimeouts
from loom.weaver.outbox import Outbox, Peer
from loom.weaver.registry import Registry
from loom.weaver.replicas import Cause, Replica
from loom.weaver.reports import Reports
from loom.weaver.states import LIVING

_CAUSES = {
    Activity.RUNNING: Cause.RESUMED,
    Activity.PAUSED: Cause.PAUSED,
    Activity.DRAINING: Cause.DRAINED,
}


class Registration:
    """The part of the weaver that takes hellos and goodbyes."""

    def __init__(
        self,
        known: Registry,
        outbox: Outbox,
        timing: LivenessTimeouts,
        key: str,
        weaver: str,
        dispatcher: Dispatcher,
        liveness: Liveness,
        reports: Reports,
    ) -> None:
        self._known = known
        self._outbox = outbox
        self._timing = timing
        self._key = key.encode()
        self._weaver = weaver
        self._dispatcher = dispatcher
        self._liveness = liveness
        self._reports = reports

    def hello(self, peer: Peer, hello: ThreadletHello, now: float) -> None:
        """Take a threadlet's first frame; welcome or refuse the threadlet."""
        if not hmac.compare_digest(hello.key.encode(), self._key):
            return self._outbox.refuse(
                peer, "authentication", "the key is not this weaver's: LOOM_WEAVER is of another"
            )
        replica = self._known.replicas.get(hello.replica)
        if replica is None:
            replica = self._known.add(hello.replica)
        elif replica.link is not None:
            silence = self._timing.beat * self._timing.missed_beats
            if replica.instance != hello.instance and now - replica.heard < silence:
                who = f"another process (pid {replica.pid} on {replica.host})"
                text = f"{who} is the replica {replica.id!r}: give each process a replica_id of its own"
                return self._outbox.refuse(peer, "replica_taken", text)
            self._outbox.close(replica.link)
            replica.link.replica = None
        again = replica.instance == hello.instance
        if not again:
            self._dispatcher.end_all(
                replica, f"a new process became {replica.id!r} before it had applied this", now
            )
            replica.begin_instance(hello.instance)
            replica.registered = now
        job, last_sign = replica.job, replica.heard
        self._known.describe(replica, hello)
        if replica.job != job:
            self._known.goodput.finished(job, replica.id, now)
        if again:
            self._known.goodput.back(replica.job, replica.id, now)
        else:
            self._known.goodput.registered(replica.job, replica.id, now, last_sign)
        peer.replica, replica.link, replica.heard = replica, peer, now
        about = {"instance": hello.instance, "host": hello.host, "pid": hello.pid, "group": hello.group}
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
        self._outbox.send(replica, ThreadletWelcome(self._timing.beat, self._weaver, replica.seq, spent=True))
        for injection, evidence in hello.removed.items():
            self._reports.note_removed(replica, injection, evidence, now)
        for given in self._known.commands.unacknowledged(replica.id):
            self._outbox.send(replica, given.command)
        self._outbox.urgent = True
        self._liveness.schedule(
            replica, now + min(self._timing.beat * self._timing.missed_beats, self._timing.stall_least)
        )

    def bye(self, replica: Replica, frame: list[Any], now: float) -> None:
        bye = Bye.from_body(frame)
        peer, replica.link = replica.link, None
        peer.replica = None
        self._outbox.close(peer)
        if bye.ending is Ending.FAILED:
            self._liveness.fail(replica, Cause.SAID_FAILED, bye.reason, now)
        else:
            self._liveness.finish(replica, Cause.SAID_FINISHED, bye.reason, now)

    def supervision(self, report: dict[str, Any], now: float) -> list[str]:
        """Take a driver's report that processes of its meshes have ended; return the ids of their replicas.

        The report has ``session``, ``procs``, ``rank`` (None: all ranks), ``what`` (``"stopped"`` if the processes
        were meant to end) and ``reason``.
        """
        session, procs, rank, what = (report.get(name) for name in ("session", "procs", "rank", "what"))
        reason = str(report.get("reason") or what or "its process is dead")
        found = [
            replica for replica in self._known.in_procs(session, str(procs)) if rank is None or replica.rank == rank
        ]
        ended = [replica for replica in found if replica.state in LIVING]
        about = {"session": session, "procs": procs, "rank": rank, "host": report.get("host"), "what": what}
        event = self._known.events.append(
            now, "supervision", None, **about, reason=reason, replicas=[replica.id for replica in ended]
        )
        for replica in ended:
            if what == "stopped":
                self._liveness.finish(replica, Cause.SAID_FINISHED, reason, now, event.id)
            else:
                self._liveness.fail(replica, Cause.DIED, reason, now, event.id)
        self._outbox.urgent = True
        return [replica.id for replica in ended]

    def spawned(self, report: dict[str, Any], now: float) -> None:
        """Log a driver's report that it has started processes, whose threadlets will say hello."""
        about = {name: report.get(name) for name in ("session", "procs", "rank", "host", "what")}
        self._known.events.append(now, "spawned", None, **about)
