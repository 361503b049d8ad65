"""The weaver's core: what it makes of what it hears, without sockets and without a clock of its own.

Methods take ``now``, in seconds since the epoch. Nothing that they have to say leaves before what it is about is
stored: they put it aside, and `Weaver.commit` returns it. The cost of a message does not grow with the number of
replicas; what grows with it happens when somebody asks for all of them.
"""

from __future__ import annotations

import heapq
import hmac
import itertools
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from loom.control.commands import (
    FAULT_COMMANDS,
    Acknowledged,
    Acknowledgement,
    Command,
    CommandKind,
    FaultRemoved,
)
from loom.control.frame import MAX_COUNT, Frame
from loom.control.introduction import Activity, Bye, Ending, Handlers, Hello, Refusal, Welcome
from loom.control.reports import DeviceReport, Heartbeat, Phase, Row, Stack, StackRequest, StatusReports, Stored
from loom.control.time_account import TimeAccount
from loom.errors import ProtocolMismatch, UnknownInjection
from loom.latencies import Latencies
from loom.weaver.commands import GivenCommand, Target, check_command, check_injectable, select
from loom.weaver.policy import Action
from loom.weaver.registry import Registry
from loom.weaver.replicas import Cause, Replica
from loom.weaver.states import LIVING, ReplicaState
from loom.weaver.views import WeaverEvent

__all__ = ["Output", "Peer", "Timing", "Weaver"]


@dataclass(frozen=True)
class Timing:
    """How long the weaver waits for what, in seconds."""

    beat: float = 1.0
    """Between two heartbeats of a replica."""
    missed_beats: int = 3
    """A replica that has not been connected for as many has failed; a connection on which nothing comes for as many
    is given up."""
    grace: float = 1.0
    """In which a replica may be connected again before anybody is told."""
    restart_grace: float = 10.0
    """After the weaver's start, in which no replica fails because it is not connected yet."""
    stall_factor: float = 10.0
    """A replica is stalled that takes no step in as many of its usual step times,"""
    stall_least: float = 2.0
    """and in so long."""


class Peer:
    """A connection with a threadlet, as the weaver sees it. ``replica`` is None until it has said hello."""

    replica: Replica | None = None


@dataclass(slots=True)
class Output:
    """What is to be said, now that what it is about is stored."""

    frames: list[tuple[Peer, Frame | None]] = field(default_factory=list)
    """For threadlets, in order; None: close the connection."""
    events: list[WeaverEvent] = field(default_factory=list)
    """For watchers."""
    done: list[GivenCommand] = field(default_factory=list)
    """For who waits for them."""
    stacks: list[tuple[str, Replica]] = field(default_factory=list)
    """Stacks to get: the id to give to `Weaver.take_stack`, and the replica."""


class Weaver:
    """Knows replicas and devices, and tells them what to do.

    Args:
        known: what there is already.
        key: the secret that threadlets show.
        now: the time.
        timing: how long to wait for what.
    """

    def __init__(self, known: Registry, key: str, now: float, timing: Timing | None = None) -> None:
        self.known = known
        self.instance = uuid.uuid4().hex
        self.started = now
        self.timing = timing or Timing()
        self.latencies = Latencies()
        """From giving a command to its acknowledgement."""
        self.reports = 0
        """Status reports taken since the start."""
        self._key = key.encode()
        self._output = Output()
        self._urgent = False
        self._reported: dict[Replica, float] = {}
        """When each began to report anew, the earliest first; until it is told what is stored."""
        self._checks: list[tuple[float, int, Replica]] = []
        self._check_number = itertools.count()
        self._stacks: dict[str, tuple[str, int | None]] = {}
        self._stack_waiters: dict[str, list[Callable[[str], None]]] = {}
        self._takers: dict[str, Callable[[Replica, list[Any], float], None]] = {
            StatusReports.KIND: self._status,
            Heartbeat.KIND: self._beat,
            TimeAccount.KIND: self._time_account,
            Acknowledged.KIND: self._acknowledged,
            DeviceReport.KIND: self._device_status,
            Handlers.KIND: self._handlers,
            Stack.KIND: self._stack,
            FaultRemoved.KIND: self._fault_gone,
            Bye.KIND: self._bye,
        }
        """What takes each kind of frame from a threadlet that has said hello."""
        self._failures: dict[str, tuple[WeaverEvent, set[str]]] = {}
        """Devices that have failed since the start: the event, and the processes that were told."""
        for replica in known.replicas.values():
            if replica.state in LIVING:
                replica.link_lost = now
                self._schedule(replica, now + self.timing.grace)
        known.events.append(now, "weaver_started", None, instance=self.instance, replicas=len(known.replicas))

    # -- from threadlets --------------------------------------------------------------------------------------

    def receive(self, peer: Peer, frames: list[list[Any]], now: float) -> None:
        """Take frames from a threadlet.

        Raises:
            ProtocolMismatch: one is not of the protocol. Refuse the connection.
        """
        for frame in frames:
            replica = peer.replica
            if replica is None:
                self._hello(peer, Hello.from_body(frame), now)
            else:
                replica.heard = now
                take = self._takers.get(frame[0])
                if take is None:
                    raise ProtocolMismatch(f"there is no frame of kind {frame[0]!r:.40} from a threadlet")
                take(replica, frame, now)
            if peer.replica is None:  # it was refused, or has said goodbye
                return

    def refuse(self, peer: Peer, code: str, text: str) -> None:
        """Say why a connection is closed, and close it."""
        self._output.frames += [(peer, Refusal(code, text)), (peer, None)]
        self._urgent = True

    def lost(self, peer: Peer, now: float) -> None:
        """Take note that a connection has ended."""
        replica, peer.replica = peer.replica, None
        if replica is not None and replica.link is peer:
            replica.heard = now  # the last that is heard of a process is that its sockets are closed
            self._unlink(replica, now)

    def died(self, replica: Replica, instance: str, reason: str, now: float) -> None:
        """Take note that the process of a replica is dead, unless another has become the replica meanwhile."""
        if replica.instance == instance and replica.state in LIVING:
            self._fail(replica, Cause.DIED, reason, now)

    # -- from the gateway -------------------------------------------------------------------------------------

    def command(
        self,
        kind: CommandKind,
        params: dict[str, Any],
        target: Target,
        by: str,
        now: float,
        cause: int | None = None,
    ) -> GivenCommand:
        """Tell replicas to do something.

        Args:
            kind: what to do.
            params: of the command.
            target: whom.
            by: who gives it.
            now: the time.
            cause: the event that led to it.

        Raises:
            WrongArguments: it makes no sense with these parameters or this target.
            NotInjectable, UnknownReplica: it is a fault, and the target is not marked for that, or nobody.
            UnknownDevice: it names a device that no replica has registered.
        """
        check_command(kind, params)
        there, acknowledgements = select(target, self.known.replicas)
        if kind in FAULT_COMMANDS:
            check_injectable(there, acknowledgements, target)
        if kind is CommandKind.DEACTIVATE_DEVICE:
            self.known.devices.deactivate(params["device"], f"deactivated by {by}")
            self.known.save_device(params["device"])
        elif kind is CommandKind.REACTIVATE:
            self.known.devices.reactivate(params["device"])
            self._failures.pop(params["device"], None)
            self.known.save_device(params["device"])
        for replica in there:
            if replica.state not in LIVING:
                acknowledgements[replica.id] = Acknowledgement.failed(self._why_ended(replica))
        unknown = (id for id in acknowledgements if id not in self.known.replicas)
        names = [*(replica.id for replica in there), *unknown]
        command = Command(uuid.uuid4().hex, kind, params)
        given = GivenCommand(command, target, by, now, names)
        about = {"command": command.id, "do": kind.value, "params": params, "target": target, "by": by}
        given.event = self.known.events.append(now, "command", None, **about, cause=cause, replicas=len(names)).id
        self.known.add_command(given, acknowledgements)
        for replica in there:
            if replica.link is not None and replica.id in given.waiting:
                self._send(replica, command)  # the same for all, so that the server packs it once
        self._urgent = True
        return given

    def remove_fault(self, injection: str, by: str, now: float) -> GivenCommand:
        """Have a fault removed before its time is over, by whoever can: what it has stopped cannot.

        Raises:
            UnknownInjection: no fault of that id was injected, or it was long ago.
            UnknownReplica: nobody who could lives.
        """
        command = self.known.commands.get(injection)
        if command is None or command.kind is not CommandKind.INJECT:
            raise UnknownInjection(f"no fault was injected with the id {injection!r:.80}")
        struck = [self.known.replicas[id] for id in command.replicas if id in self.known.replicas]
        hosts = {replica.host for replica in struck}
        near = [one.id for one in self.known.replicas.values() if one.host in hosts and one.injectable]
        living = [id for id in near if self.known.replicas[id].state in LIVING]
        return self.command(CommandKind.REMOVE_FAULT, {"injection": injection}, living, by, now, command.event)

    def fail_device(self, device: str, reason: str, by: str, now: float) -> WeaverEvent:
        """Take note that a device has failed: find the replicas on it, tell them, and do what their policies say.

        Monitors may say so again and again: that changes nothing unless other processes are on it by then.

        Returns:
            The event that shows it all: the device, the replicas, and what was done with each.

        Raises:
            UnknownDevice: no replica has registered it.
        """
        known = self.known.devices.device(device)
        affected = [self.known.replicas[id] for id in self.known.devices.replicas_of(device)]
        processes = {replica.instance for replica in affected if replica.state in LIVING}
        if device in self._failures and processes <= self._failures[device][1]:
            return self._failures[device][0]
        self.known.devices.fail(device, reason)
        self.known.save_device(device)
        chain: list[dict[str, Any]] = []
        event = self.known.events.append(
            now, "device_failed", None, device=known.to_body(), reason=reason, by=by, replicas=chain
        )
        self._failures[device] = event, processes
        living = [replica for replica in affected if replica.state in LIVING]
        by_action: dict[Action, list[str]] = {}
        for replica in living:
            by_action.setdefault(self.known.policy.action(replica.group), []).append(replica.id)
        told: dict[str, list[str]] = {replica.id: [] for replica in living}
        what = {"device": device, "reason": reason}
        ids = [replica.id for replica in living]
        commands = [self.command(CommandKind.DEVICE_FAILED, what, ids, by, now, event.id)] if ids else []
        for action, kind in ((Action.PAUSE, CommandKind.PAUSE), (Action.STOP, CommandKind.STOP)):
            if action in by_action:
                commands.append(self.command(kind, what, by_action[action], by, now, event.id))
        for command in commands:
            for id in command.replicas:
                told[id].append(command.id)
        for replica in affected:
            done = self.known.policy.action(replica.group).value if replica in living else None
            entry = {"replica": replica.id, "group": replica.group, "state": replica.state.value, "action": done}
            chain.append({**entry, "commands": told.get(replica.id, [])})
        for id in by_action.get(Action.RESPAWN, ()):
            self._want_respawn(self.known.replicas[id], reason, event.id, now, device)
        self._urgent = True
        return event

    def supervision(self, news: dict[str, Any], now: float) -> list[str]:
        """Take a driver's word that processes of its meshes have ended.

        Args:
            news: ``session``, ``procs``, ``rank`` (None: all of them), ``what`` (``"stopped"`` if they were meant
                to end) and ``reason``.
            now: the time.

        Returns:
            The ids of the replicas that this was the end of.
        """
        session, procs, rank, what = (news.get(name) for name in ("session", "procs", "rank", "what"))
        reason = str(news.get("reason") or what or "its process is dead")
        found = [
            replica for replica in self.known.in_procs(session, str(procs)) if rank is None or replica.rank == rank
        ]
        ended = [replica for replica in found if replica.state in LIVING]
        said = {"session": session, "procs": procs, "rank": rank, "host": news.get("host"), "what": what}
        event = self.known.events.append(
            now, "supervision", None, **said, reason=reason, replicas=[replica.id for replica in ended]
        )
        for replica in ended:
            if what == "stopped":
                self._finish(replica, Cause.SAID_FINISHED, reason, now, event.id)
            else:
                self._fail(replica, Cause.DIED, reason, now, event.id)
        self._urgent = True
        return [replica.id for replica in ended]

    def spawned(self, news: dict[str, Any], now: float) -> None:
        """Take a driver's word that it has started processes, whose threadlets will say hello."""
        said = {name: news.get(name) for name in ("session", "procs", "rank", "host", "what")}
        self.known.events.append(now, "spawned", None, **said)

    def note(self, kind: str, replica: str | None, data: dict[str, Any], now: float) -> WeaverEvent:
        """Log what a job says has happened to it."""
        self._urgent = True
        return self.known.events.append(now, kind, replica, **data)

    def set_policy(self, group: str, action: str, by: str, now: float) -> None:
        """Choose what is done with the replicas of a group, or of those that a glob matches, when a device fails.

        Raises:
            WrongArguments: there is no such action.
        """
        self.known.set_policy(group, action, by, now)
        self._urgent = True

    def want_stack(
        self, replica: Replica, event: int | None = None, tell: Callable[[str], None] | None = None
    ) -> str:
        """Have the stack of a replica's process got.

        Args:
            replica: whose.
            event: to add it to.
            tell: what to call with it.

        Returns:
            The id to give to `take_stack`.
        """
        id = uuid.uuid4().hex
        if tell is not None:
            self._stack_waiters[id] = [tell]
        self._stacks[id] = replica.id, event
        self._output.stacks.append((id, replica))
        self._urgent = True
        return id

    def ask_for_stack(self, id: str) -> bool:
        """Ask the threadlet itself for a stack; False where it is not connected."""
        replica = self.known.replicas.get(self._stacks[id][0]) if id in self._stacks else None
        if replica is None or replica.link is None:
            return False
        self._send(replica, StackRequest(id))
        self._urgent = True
        return True

    def take_stack(self, id: str, text: str) -> None:
        """Take a stack, and add it to the event that it was got for."""
        text = text[:_MAX_STACK]
        _, event = self._stacks.pop(id, (None, None))
        if event is not None:
            self.known.events.amend(event, stack=text)
            self._urgent = True
        for tell in self._stack_waiters.pop(id, ()):
            tell(text)

    # -- time, and what is to be said -------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """See what has not happened in its time."""
        self.known.goodput.tick(now)
        checks = self._checks
        while checks and checks[0][0] <= now:
            at, _, replica = heapq.heappop(checks)
            if replica.check_at == at:
                self._look_after(replica, now)

    @property
    def urgent(self) -> bool:
        """Whether somebody waits for what the next commit returns."""
        return self._urgent

    def commit(self, now: float) -> Output:
        """Store what has happened; return what is to be said about it.

        Raises:
            sqlite3.Error: it cannot be stored. Nothing can be promised to anybody any more: end.
        """
        self._urgent = False
        self._output.events = self.known.commit(now)
        output, self._output = self._output, Output()
        while self._reported:
            replica, since = next(iter(self._reported.items()))
            if since > now - _STORED_AFTER:
                break
            del self._reported[replica]
            if replica.link is not None:
                output.frames.append((replica.link, Stored(replica.seq)))
        return output

    # -- what threadlets say ----------------------------------------------------------------------------------

    def _hello(self, peer: Peer, hello: Hello, now: float) -> None:
        if not hmac.compare_digest(hello.key.encode(), self._key):
            return self.refuse(peer, "authentication", "the key is not this weaver's: LOOM_WEAVER is of another")
        replica = self.known.replicas.get(hello.replica)
        if replica is None:
            replica = self.known.add(hello.replica)
        elif replica.link is not None:
            silence = self.timing.beat * self.timing.missed_beats
            if replica.instance != hello.instance and now - replica.heard < silence:
                who = f"another process (pid {replica.pid} on {replica.host})"
                text = f"{who} is the replica {replica.id!r}: give each process a replica_id of its own"
                return self.refuse(peer, "replica_taken", text)
            self._output.frames.append((replica.link, None))
            replica.link.replica = None
        again = replica.instance == hello.instance
        if not again:
            self._end_commands(replica, f"a new process became {replica.id!r} before it had applied this", now)
            replica.begin_instance(hello.instance)
            replica.registered = now
        job, last_sign = replica.job, replica.heard
        self.known.describe(replica, hello)
        if replica.job != job:
            self.known.goodput.finished(job, replica.id, now)
        if again:
            self.known.goodput.back(replica.job, replica.id, now)
        else:
            self.known.goodput.registered(replica.job, replica.id, now, last_sign)
        peer.replica, replica.link, replica.heard = replica, peer, now
        about = {"instance": hello.instance, "host": hello.host, "pid": hello.pid, "group": hello.group}
        devices = [device.uuid for device in hello.devices]
        kind = "reconnected" if again else "registered"
        event = self.known.events.append(now, kind, replica.id, **about, devices=devices, step=hello.step)
        if not again or hello.state is None:
            self.known.move(replica, Cause.REGISTERED, now, event.id)
        if hello.state is not None:
            self.known.move(replica, _ACTIVITY_CAUSES[hello.state], now, event.id)
        replica.progress = now
        if hello.step is not None:
            replica.take_step(hello.step, now, now)
        self._send(replica, Welcome(self.timing.beat, self.instance, replica.seq, spent=True))
        for injection, evidence in hello.removed.items():
            self._fault_removed(replica, injection, evidence, now)
        for given in self.known.commands.unacknowledged(replica.id):
            self._send(replica, given.command)
        self._urgent = True
        self._schedule(replica, now + min(self.timing.beat * self.timing.missed_beats, self.timing.stall_least))

    def _status(self, replica: Replica, frame: list[Any], now: float) -> None:
        reports = StatusReports.from_body(frame).rows
        before = replica.seq
        self._reported.setdefault(replica, now)
        try:
            self._take_reports(replica, reports, now)
        except (TypeError, ValueError) as error:
            raise StatusReports.mismatch(frame) from error
        finally:
            # Where one of them is refused, those before it are taken.
            if replica.seq > before:
                self._keep_reports(replica, reports, before, now)

    def _keep_reports(self, replica: Replica, reports: list[Row], before: int, now: float) -> None:
        """Keep those reports that were not there and have been taken."""
        if _number(reports[0]) <= before or _number(reports[-1]) != replica.seq:
            taken = itertools.takewhile(lambda report: _number(report) <= replica.seq, reports)
            reports = [report for report in taken if report[0] > before]
        replica.reported = reports[-1][1]
        self.reports += len(reports)
        self.known.keep_reports(replica, reports, now)

    def _take_reports(self, replica: Replica, reports: list[Row], now: float) -> None:
        record, row, id = self.known.history.record, self.known.journal_id, replica.id
        for seq, time, step, epoch, max_step, metrics, config in reports:
            if type(seq) is not int or seq >= MAX_COUNT:
                raise ProtocolMismatch(f"a status report has a number, not {seq!r:.40}")
            if seq <= replica.seq:
                continue
            if type(time) is not float or type(metrics) is not dict or not (config is None or type(config) is dict):
                raise ProtocolMismatch(f"not a status report: {[seq, time, step, metrics, config]!r:.80}")
            if epoch is not None:
                replica.epoch = _count("epoch", epoch)
            if max_step is not None:
                replica.max_step = _count("max_step", max_step)
            if step is not None:
                moved = replica.take_step(_count("step", step), time, now)
                if moved and replica.state in _STEPS_MATTER:
                    self.known.move(replica, Cause.STEPPED, now)
            if metrics:
                record(id, row, time, step, metrics)
                replica.metrics.update(metrics)
            if config:
                self._report_config(replica, config, now)
            replica.seq = seq

    def _report_config(self, replica: Replica, config: dict[str, Any], now: float) -> None:
        changes = {
            key: {"old": replica.config.get(key), "new": value}
            for key, value in config.items()
            if key not in replica.config or replica.config[key] != value
        }
        if changes:
            replica.config = {**replica.config, **config}
            self.known.events.append(now, "config", replica.id, changes=changes, step=replica.step)
            self.known.save(replica)

    def _beat(self, replica: Replica, frame: list[Any], now: float) -> None:
        beat = Heartbeat.from_body(frame)
        replica.phase = beat.phase.value
        if beat.step is not None and replica.take_step(beat.step, beat.time, now):
            self.known.move(replica, Cause.STEPPED, now)
        if beat.phase is Phase.PAUSED:
            self.known.move(replica, Cause.PAUSED, now)
        self.known.touch(replica)

    def _time_account(self, replica: Replica, frame: list[Any], now: float) -> None:
        if self.known.goodput.wants(replica.job, replica.id, now):
            self.known.goodput.account(replica.job, replica.id, TimeAccount.from_body(frame), now)

    def _handlers(self, replica: Replica, frame: list[Any], now: float) -> None:
        replica.handlers = {**replica.handlers, **Handlers.from_body(frame).types}
        self.known.save(replica)

    def _device_status(self, replica: Replica, frame: list[Any], now: float) -> None:
        for device, status in DeviceReport.from_body(frame).devices.items():
            self.known.set_device_status(device, {**status, "time": now, "by": replica.id})

    def _acknowledged(self, replica: Replica, frame: list[Any], now: float) -> None:
        told = Acknowledged.from_body(frame)
        made = told.acknowledgement
        command = self._acknowledge(replica, told.command, made)
        if command is None:
            return
        self.latencies.add(now - command.time)
        if made.changes:
            replica.config = {**replica.config, **{key: change.new for key, change in made.changes.items()}}
            self.known.save(replica)
        about = {"command": command.id, "do": command.kind.value, "by": command.by, "cause": command.event}
        event = self.known.events.append(
            now, "applied" if made.ok else "refused", replica.id, **about, **made.to_body()
        )
        if made.ok and command.kind in _COMMAND_CAUSES:
            self.known.move(replica, _COMMAND_CAUSES[command.kind], now, event.id)

    def _stack(self, replica: Replica, frame: list[Any], now: float) -> None:
        stack = Stack.from_body(frame)
        if self._stacks.get(stack.id, (None,))[0] == replica.id:
            self.take_stack(stack.id, stack.text)

    def _fault_gone(self, replica: Replica, frame: list[Any], now: float) -> None:
        fault = FaultRemoved.from_body(frame)
        self._fault_removed(replica, fault.injection, fault.evidence, now)

    def _fault_removed(self, replica: Replica, injection: str, evidence: dict[str, Any], now: float) -> None:
        command = self.known.commands.get(injection)
        cause = None if command is None else command.event
        told = self.known.events.after(cause or 0, MAX_COUNT, replica.id, "fault_removed")
        if any(event.data["injection"] == injection for event in told):  # it is said again with each hello
            return
        self.known.events.append(
            now, "fault_removed", replica.id, injection=injection, evidence=evidence, cause=cause
        )
        self._urgent = True

    def _bye(self, replica: Replica, frame: list[Any], now: float) -> None:
        bye = Bye.from_body(frame)
        peer, replica.link = replica.link, None
        peer.replica = None
        self._output.frames.append((peer, None))
        if bye.ending is Ending.FAILED:
            self._fail(replica, Cause.SAID_FAILED, bye.reason, now)
        else:
            self._finish(replica, Cause.SAID_FINISHED, bye.reason, now)

    # -- what replicas go through -----------------------------------------------------------------------------

    def _look_after(self, replica: Replica, now: float) -> None:
        timing = self.timing
        if replica.state not in LIVING:
            return
        silence = timing.beat * timing.missed_beats
        if replica.link is None:
            if replica.state is not ReplicaState.RECOVERING:
                if now < replica.link_lost + timing.grace:
                    return self._schedule(replica, replica.link_lost + timing.grace)
                self.known.move(replica, Cause.LINK_LOST, now)
            due = max(replica.link_lost + silence, self.started + timing.restart_grace)
            if now < due:
                return self._schedule(replica, due)
            return self._fail(replica, Cause.SILENT, f"not connected for {now - replica.link_lost:.1f} s", now)
        due = replica.heard + silence
        if now >= due:
            self._output.frames.append((replica.link, None))
            replica.link.replica = None
            self._urgent = True
            return self._unlink(replica, now)
        if replica.state is ReplicaState.RUNNING:
            usual = replica.usual_step_time()
            if usual is not None:
                stalled = replica.progress + max(timing.stall_least, timing.stall_factor * usual)
                if now >= stalled:
                    self._stall(replica, usual, now)
                else:
                    due = min(due, stalled)
        self._schedule(replica, due)

    def _stall(self, replica: Replica, usual: float, now: float) -> None:
        about = {"step": replica.step, "seconds": now - replica.progress, "usual_step_time": usual}
        event = self.known.move(replica, Cause.NO_STEP, now, about={**about, "phase": replica.phase})
        if len(self._stacks) < _MAX_STALL_STACKS:
            self.want_stack(replica, event)

    def _unlink(self, replica: Replica, now: float) -> None:
        replica.link = None
        if replica.state in LIVING:
            replica.link_lost = now
            self._schedule(replica, now + self.timing.grace)
        self.known.touch(replica)

    def _fail(self, replica: Replica, cause: Cause, reason: str, now: float, by: int | None = None) -> None:
        action = self.known.policy.action(replica.group)
        devices = self.known.devices.devices_of(replica.id)
        about = {"reason": reason, "step": replica.step, "devices": devices, "action": action.value}
        event = self.known.move(replica, cause, now, by, about)
        heard, stepped = replica.heard, replica.progress
        self.known.goodput.failed(replica.job, replica.id, reason, now, heard, stepped, replica.step)
        replica.died_of = reason
        self._end(replica, now)
        if action is Action.RESPAWN:
            self._want_respawn(replica, reason, event, now)

    def _finish(self, replica: Replica, cause: Cause, reason: str, now: float, by: int | None = None) -> None:
        self.known.move(replica, cause, now, by, {"reason": reason, "step": replica.step})
        self.known.drain(replica)
        self.known.goodput.finished(replica.job, replica.id, now)
        self._end(replica, now)

    def _end(self, replica: Replica, now: float) -> None:
        self._urgent = True
        self._end_commands(replica, self._why_ended(replica), now)
        self.known.forget_surplus()

    def _end_commands(self, replica: Replica, reason: str, now: float) -> None:
        for command in self.known.commands.unacknowledged(replica.id):
            self._acknowledge(replica, command.id, Acknowledgement.failed(reason))
            self.known.events.append(
                now,
                "unanswered",
                replica.id,
                command=command.id,
                do=command.kind.value,
                cause=command.event,
                reason=reason,
            )

    def _acknowledge(self, replica: Replica, id: str, made: Acknowledgement) -> GivenCommand | None:
        command = self.known.acknowledge(replica, id, made)
        if command is not None:
            self._urgent = True
            if command.done:
                self._output.done.append(command)
        return command

    def _want_respawn(
        self, replica: Replica, reason: str, cause: int | None, now: float, device: str | None = None
    ) -> None:
        about = {"session": replica.session, "procs": replica.procs, "rank": replica.rank, "group": replica.group}
        devices = self.known.devices.devices_of(replica.id)
        self.known.events.append(
            now, "respawn_wanted", replica.id, reason=reason, device=device, devices=devices, cause=cause, **about
        )

    def _why_ended(self, replica: Replica) -> str:
        if replica.state is ReplicaState.FINISHED:
            return f"replica {replica.id!r} has finished"
        return f"replica {replica.id!r} has failed: {replica.died_of}"

    # -- bookkeeping ------------------------------------------------------------------------------------------

    def _send(self, replica: Replica, frame: Frame) -> None:
        self._output.frames.append((replica.link, frame))

    def _schedule(self, replica: Replica, at: float) -> None:
        replica.check_at = at
        heapq.heappush(self._checks, (at, next(self._check_number), replica))


_STORED_AFTER = 0.25
"""Seconds from a report to telling its threadlet what is stored: once for several, and soon for one that ends.

Each has its own time: to tell thousands at once would hold up commands.
"""

_MAX_STALL_STACKS = 16
"""When a collective hangs, every replica stalls at once; the stacks of a few say why."""

_MAX_STACK = 1 << 16
"""Characters."""

_STEPS_MATTER = frozenset((ReplicaState.REGISTERING, ReplicaState.STALLED))

_COMMAND_CAUSES = {
    CommandKind.PAUSE: Cause.PAUSED,
    CommandKind.RESUME: Cause.RESUMED,
    CommandKind.REACTIVATE: Cause.RESUMED,
    CommandKind.DRAIN: Cause.DRAINED,
}

_ACTIVITY_CAUSES = {
    Activity.RUNNING: Cause.RESUMED,
    Activity.PAUSED: Cause.PAUSED,
    Activity.DRAINING: Cause.DRAINED,
}


def _number(report: Any) -> int:
    """Of a status report; over all others where it has none."""
    return report[0] if type(report) is list and report and type(report[0]) is int else MAX_COUNT


def _count(field_name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < MAX_COUNT:
        raise ProtocolMismatch(f"{field_name} is a count or None, not {value!r:.80}")
    return value
