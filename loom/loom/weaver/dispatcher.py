"""The dispatch of commands to replicas, whether users give them or follow from a device's failure."""

from __future__ import annotations

import contextlib
import itertools
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from loom.control.commands import (
    FAULT_COMMANDS,
    Acknowledged,
    Acknowledgement,
    AppliedByOthers,
    CohortVerdict,
    Command,
    CommandKind,
)
from loom.control.handshake import CohortPlace, ThreadletHello
from loom.control.latencies import Latencies
from loom.control.run_start import branch_command
from loom.errors import CommandIdTaken, LimitReached, NotFound, WrongArguments, because
from loom.weaver.cohort_commands import CohortCommands
from loom.weaver.cohorts import Cohorts, Overrides
from loom.weaver.commands import GivenCommand, Target, check_command, check_injectable, select
from loom.weaver.commit_output import Outbox
from loom.weaver.device_failures import Action
from loom.weaver.persistent_state import Registry
from loom.weaver.replicas import Cause, Replica
from loom.weaver.states import LIVING, DeviceState, ReplicaEnding, ReplicaState
from loom.weaver.views import WeaverEvent, few, how_ended

_REMEMBERED_REPORTS = 1000  # the last failures of devices among which a report's id is looked for

_MOST_SHARED = 256
"""Acknowledgements that are remembered, as far as they have at most `_MAX_SHARED` bytes."""
_MAX_SHARED = 4096

_REFUSALS_TOLD = 100  # replicas that refuse a command at once, as those that have ended do, that its event names

_CAUSES = {
    CommandKind.PAUSE: Cause.PAUSED,
    CommandKind.RESUME: Cause.RESUMED,
    CommandKind.DRAIN: Cause.DRAINED,
}
"""The state change that follows from an applied command."""


class CommandDispatcher:
    """The part of the weaver that gives commands and takes acknowledgements."""

    def __init__(self, known: Registry, outbox: Outbox) -> None:
        self._known = known
        self._outbox = outbox
        self._cohorts = Cohorts(known)
        self.overrides = Overrides(known, self._cohorts)
        self.cohort_commands = CohortCommands(known, self._cohorts, self)
        self.latencies = Latencies()
        """Seconds from giving a command to its acknowledgement."""
        self._read: dict[bytes, Acknowledged] = {}
        """Acknowledgements that came last, by their frames."""
        self._logged: dict[int, tuple[Acknowledgement, Mapping[str, object]]] = {}
        """The data of the events of acknowledgements that came last, by the identity of these."""
        self._notified: dict[str, tuple[WeaverEvent, set[str]]] = {}
        """For each failed device the event of its failure, and the process instances that were notified."""

    def give(
        self,
        kind: CommandKind,
        params: Mapping[str, Any],
        target: Target | None,
        by: str,
        now: float,
        cause: int | None = None,
        id: str | None = None,
        announced: bool = False,
    ) -> GivenCommand:
        """Give a command to the replicas of a target; ``cause`` is the event that led to it.

        Without a target all are meant; of a command about devices, those on them. A command about the devices of a
        group is always for those on them.

        With an ``id`` that a command has already, return that command: its sender did not hear that it was given.
        """
        check_command(kind, params)
        if id is not None and (before := self._known.commands.get(id)) is not None:
            if before.kind is not kind:
                raise CommandIdTaken(
                    f"the command {id!r:.80} is a {before.kind}: give each command an id of its own"
                )
            return before
        devices: list[str] = []
        if kind in (CommandKind.DEACTIVATE_DEVICE, CommandKind.REACTIVATE):
            devices = self._devices_meant(kind, params)
        if "group" in params and devices:
            params, target = {**params, "devices": devices}, None
        if target is None and devices:
            target = list(dict.fromkeys(one.id for device in devices for one in self._living_on(device)))
        if target is None:
            if kind in FAULT_COMMANDS:
                raise WrongArguments(f"{kind} needs a target")
            target = "*"
        selected = select(target, self._known.replicas)
        if kind in FAULT_COMMANDS:
            check_injectable(*selected, target)
        for device in devices:
            if kind is CommandKind.DEACTIVATE_DEVICE:
                self._known.devices.deactivate(device, f"deactivated by {by}", self._names_on(device))
            else:
                self._known.devices.reactivate(device)
                self._notified.pop(device, None)  # a later failure is another one
            self._known.save_device(device)
        command = Command(id or uuid.uuid4().hex, kind, params, announced)
        return self._send(command, selected, target, by, now, cause)

    def _devices_meant(self, kind: CommandKind, params: Mapping[str, Any]) -> list[str]:
        """Return the uuids of the devices that a command takes out of use or puts back."""
        if "group" not in params:
            self._known.devices.device(params["device"])  # raises if there is none
            return [params["device"]]
        name: str = params["group"]
        living = [one for one in self._known.replicas.values() if one.state in LIVING]
        there = [one for one in living if name in (one.group, one.id)]
        found = dict.fromkeys(device for one in there for device in self._known.devices.devices_of(one.id))
        if kind is CommandKind.REACTIVATE:
            off = [device for device in found if self._known.devices.state(device) is not DeviceState.ACTIVE]
            found = dict.fromkeys([*off, *self._known.devices.out_of_use(name)])
            if not found:
                raise NotFound(f"no device of a group {name!r:.80} is out of use", code="unknown_device")
        elif not found:
            groups = few(sorted({one.group for one in living}))
            text = f"no replica of a group {name!r:.80} lives on a device; groups: {groups}"
            raise NotFound(text, code="unknown_replica")
        return list(found)

    def _living_on(self, device: str) -> list[Replica]:
        there = (self._known.replicas[id] for id in self._known.devices.replicas_of(device))
        return [one for one in there if one.state in LIVING]

    def _names_on(self, device: str) -> list[str]:
        """Return the ids and the groups of the living replicas on a device."""
        return [name for one in self._living_on(device) for name in (one.id, one.group)]

    def _send(
        self,
        command: Command,
        selected: tuple[list[Replica], dict[str, Acknowledgement]],
        target: Target,
        by: str,
        now: float,
        cause: int | None,
        together: bool = True,
    ) -> GivenCommand:
        """Give a command to the replicas that `select` has found for a target, to ranks of a job ``together``."""
        there, acknowledgements = selected
        for replica in there:
            if replica.state not in LIVING:
                acknowledgements[replica.id] = Acknowledgement.failed(self.why_ended(replica))
        cohorts: dict[str, str] = {}
        if together:
            cohorts, refused_cohorts = self._cohorts.sort(command.kind, there, now)
            acknowledgements |= refused_cohorts
            for id, made in self._cohorts.not_offered(command, there, cohorts).items():
                acknowledgements.setdefault(id, made)
                cohorts.pop(id, None)
        unknown = (id for id in acknowledgements if id not in self._known.replicas)
        names = [*(replica.id for replica in there), *unknown]
        given = GivenCommand(command, target, by, now, names, cohorts=cohorts)
        about: dict[str, object] = {
            "command": command.id,
            "do": command.kind.value,
            "params": command.params,
            "target": target,
            "by": by,
        }
        if acknowledgements:  # no other event tells of these
            told = itertools.islice(acknowledgements.items(), _REFUSALS_TOLD)
            refused = {id: made.reason for id, made in told}
            about |= {"refused": refused, "refused_more": len(acknowledgements) - len(refused)}
        given.event = self._known.events.append(now, "command", None, **about, cause=cause, replicas=len(names)).id
        self._known.commands.add(given, acknowledgements)
        self.send_frames(given, [one for one in there if one.id in given.waiting and one.id not in cohorts])
        for cohort in dict.fromkeys(cohorts.values()):
            self.cohort_commands.begin(given, cohort, now)
        self._outbox.urgent = True
        return given

    def begin_branch(self, replica: Replica, hello: ThreadletHello, now: float) -> None:
        """Expect the acknowledgement of the values with which the process of a branch begins by itself.

        It knows the command by its start. Each rank applies it alone, at its first step, which all make together.
        """
        if not hello.branch_config or hello.parent is None or hello.start is None:
            return
        id = branch_command(hello.start)
        given = self._known.commands.get(id)
        if given is None:
            command = Command(id, CommandKind.UPDATE_CONFIG, hello.branch_config)
            by = f"branch of {hello.parent.run}"
            given = self._send(command, ([replica], {}), [replica.id], by, now, None, together=False)
        elif (made := given.acknowledgements.get(replica.id)) is None or not made.ok:
            self._known.commands.give_to(given, [replica.id], None)
            self.send_frames(given, [replica])

    def send_again(self, replica: Replica) -> None:
        """Send a replica that has connected the commands that it has not acknowledged."""
        for given in self._known.commands.unacknowledged(replica.id):
            cohort = given.cohorts.get(replica.id)
            if cohort is None or (
                self._cohorts.next_of(cohort, given.ranks(cohort)) is given
                and not self.cohort_commands.is_held(given, cohort)
            ):
                self.send_frames(given, [replica], cohort)
            if cohort is not None and any(made.ok for made in given.acknowledgements.values()):
                self._tell_applied(given, [replica])

    def join(self, replica: Replica, place: CohortPlace, now: float) -> None:
        """Take a replica's word on its place in a cohort."""
        replica.join(place, now)
        self._known.save(replica)
        self._outbox.output.described.append(replica)
        self.restore(replica, now)
        self.cohort_commands.tick(now)

    def restore(self, replica: Replica, now: float) -> None:
        """Give a replica that was started again, or its cohort, the values that commands had set before, once."""
        if (due := self.overrides.due(replica)) is not None:
            ids, values = due
            self.give(CommandKind.UPDATE_CONFIG, values, ids, "weaver", now)

    def send_frames(self, given: GivenCommand, replicas: Iterable[Replica], cohort: str | None = None) -> None:
        # One object for all replicas, so that the server packs it once.
        replicas, command = list(replicas), given.command
        if replicas and (cohort is not None or given.attempts):  # ranks of a cohort have made the same attempts
            command = replace(command, id=given.sent_id(replicas[0].id), cohort=cohort)
        plain = replace(command, announced=False) if command.announced else command
        for replica in replicas:
            if replica.link is not None:
                self._outbox.send(replica, command if replica.announced else plain)

    def _tell_applied(self, given: GivenCommand, ranks: Iterable[Replica]) -> None:
        """Tell those of the ranks that have not acknowledged a command that another one has applied it."""
        for rank in ranks:
            if rank.id in given.waiting and rank.link is not None and rank.hears:
                self._outbox.send(rank, AppliedByOthers(given.sent_id(rank.id)))

    def remove_fault(self, injection: str, by: str, now: float) -> GivenCommand:
        """Remove a fault early, through any injectable replica on its hosts: one that it stopped cannot."""
        command = self._known.commands.get(injection)
        if command is None or command.kind is not CommandKind.INJECT:
            raise NotFound(f"no fault was injected with the id {injection!r:.80}", code="unknown_injection")
        on = [self._known.replicas[id] for id in command.replicas if id in self._known.replicas]
        hosts = {replica.host for replica in on}
        near = [one.id for one in self._known.replicas.values() if one.host in hosts and one.injectable]
        living = [id for id in near if self._known.replicas[id].state in LIVING]
        return self.give(CommandKind.REMOVE_FAULT, {"injection": injection}, living, by, now, command.event)

    def fail_device(self, device: str, reason: str, by: str, now: float, report: str | None = None) -> WeaverEvent:
        """Record that a device has failed, notify the replicas on it, and carry out their policies.

        Monitors repeat themselves: a repeated report changes nothing unless new processes use the device. One with
        the id ``report`` of an earlier one changes nothing at all.
        """
        known = self._known.devices.device(device)
        if report is not None:
            failures = self._known.events.after(0, _REMEMBERED_REPORTS, None, "device_failed", True)
            if (before := next((one for one in failures if one.data.get("report") == report), None)) is not None:
                return before
        affected = [self._known.replicas[id] for id in self._known.devices.replicas_of(device)]
        processes = {replica.instance for replica in affected if replica.state in LIVING}
        if device in self._notified and self._known.devices.state(device) is DeviceState.FAILED:
            event, notified = self._notified[device]
            if processes <= notified:
                return event
        self._known.devices.fail(device, reason, self._names_on(device))
        self._known.save_device(device)
        chain: list[Mapping[str, object]] = []
        about = {"report": report} if report is not None else {}
        event = self._known.events.append(
            now, "device_failed", None, device=known.to_body(), reason=reason, by=by, replicas=chain, **about
        )
        self._notified[device] = event, processes
        if len(self._notified) > len(self._known.devices):  # some were forgotten
            self._notified = {one: told for one, told in self._notified.items() if one in self._known.devices}
        living = [replica for replica in affected if replica.state in LIVING]
        commands = self._give_by_policy(living, device, reason, by, event.id, now)
        for replica in affected:
            action = self._known.policy.action(replica.group).value if replica in living else None
            entry = {"replica": replica.id, "group": replica.group, "state": replica.state.value, "action": action}
            given = [command.id for command in commands if replica.id in command.replicas]
            chain.append({**entry, "commands": given})
        for replica in living:
            if self._known.policy.action(replica.group) is Action.RESPAWN:
                self.want_respawn(replica, reason, event.id, now, device)
        self._outbox.urgent = True
        return event

    def tell_of_devices(self, replica: Replica, registered: int, now: float) -> None:
        """Notify a new process of those of its devices that may not be used, and give the commands of its policy.

        It is not respawned, even if its policy says so: it has just been placed there, perhaps for want of others.

        Args:
            registered: id of the event of the process's registration.
        """
        for device in self._known.devices.devices_of(replica.id):
            state, reason = self._known.devices.state(device), self._known.devices.reason(device) or ""
            if state is DeviceState.FAILED:
                self._give_by_policy([replica], device, reason, "weaver", registered, now)
                if device in self._notified:
                    self._notified[device][1].add(replica.instance)
            elif state is DeviceState.INACTIVE:
                what = {"device": device, "reason": reason}
                here: tuple[list[Replica], dict[str, Acknowledgement]] = ([replica], {})
                command = Command(uuid.uuid4().hex, CommandKind.DEACTIVATE_DEVICE, what)
                self._send(command, here, [replica.id], "weaver", now, registered)

    def _give_by_policy(
        self, living: list[Replica], device: str, reason: str, by: str, cause: int, now: float
    ) -> list[GivenCommand]:
        """Notify replicas that their device has failed, and give the commands of their groups' policies."""
        by_action: dict[Action, list[str]] = {}
        for replica in living:
            by_action.setdefault(self._known.policy.action(replica.group), []).append(replica.id)
        what = {"device": device, "reason": reason}
        wanted = (
            (CommandKind.DEVICE_FAILED, [replica.id for replica in living]),
            (CommandKind.PAUSE, self._cohorts.whole(by_action.get(Action.PAUSE, ()))),
            (CommandKind.STOP, self._cohorts.whole(by_action.get(Action.STOP, ()))),
        )
        return [self.give(kind, what, ids, by, now, cause) for kind, ids in wanted if ids]

    def want_respawn(
        self, replica: Replica, reason: str, cause: int | None, now: float, device: str | None = None
    ) -> None:
        """Log that a replica needs a respawn elsewhere."""
        about = {"session": replica.session, "procs": replica.procs, "rank": replica.rank, "group": replica.group}
        devices = self._known.devices.devices_of(replica.id)
        self._known.events.append(
            now, "respawn_wanted", replica.id, reason=reason, device=device, devices=devices, cause=cause, **about
        )

    def read(self, replica: Replica, body: Sequence[Any], packed: bytes, now: float) -> None:
        """Take the frame of an acknowledgement; thousands of equal ones of a command share an object."""
        acknowledged = self._read.get(packed)
        if acknowledged is None:
            acknowledged = Acknowledged.from_body(body)
            if len(packed) <= _MAX_SHARED:
                if len(self._read) >= _MOST_SHARED:
                    self._read.clear()
                self._read[packed] = acknowledged
        self.take(replica, acknowledged, now)

    def take(self, replica: Replica, acknowledged: Acknowledged, now: float) -> None:
        made, given = acknowledged.acknowledgement, self._known.commands.of(acknowledged.command, replica.id)
        if given is None or replica.id not in given.waiting:
            return
        if self.cohort_commands.take(given, replica, acknowledged, now):
            return
        command = self._acknowledge(replica, given.id, made, now)
        if command is None:
            return
        if acknowledged.verdict is not None and (cohort := command.cohorts.get(replica.id)) is not None:
            self.cohort_commands.end_absent(command, cohort, now)
        if acknowledged.verdict is CohortVerdict.MOVED and command.by == "weaver":
            self.overrides.give_back(replica)
            self.restore(replica, now)
        self.latencies.add(now - command.time)
        if made.ok and (cohort := command.cohorts.get(replica.id)) is not None and cohort not in command.told:
            command.told.add(cohort)
            self._tell_applied(command, [self._known.replicas[id] for id in command.ranks(cohort)])
        if made.changes:
            values = {key: change.new for key, change in made.changes.items()}
            with contextlib.suppress(LimitReached):  # the values apply, but are not shown as the configuration
                self._known.keep_config(replica, values, now)
        kind = "applied" if made.ok else "refused"
        event = self._known.events.add(now, kind, replica.id, self._data(command, made))
        if made.ok and command.kind in _CAUSES:
            self._known.move(replica, _CAUSES[command.kind], now, event.id)
            if made.step is not None and command.kind is CommandKind.PAUSE:
                replica.paused_at = max(made.step, replica.paused_at or 0)

    def _data(self, command: GivenCommand, made: Acknowledgement) -> Mapping[str, object]:
        """Return what an event says of an acknowledgement, one object for all replicas that share it."""
        shared, data = self._logged.get(id(made), (None, {}))
        if shared is not made or data["command"] != command.id:
            about = {"command": command.id, "do": command.kind.value, "by": command.by, "cause": command.event}
            data = {**about, **made.to_body()}
            if len(self._logged) >= _MOST_SHARED:
                self._logged.clear()
            self._logged[id(made)] = made, data
        return data

    def _acknowledge(self, replica: Replica, id: str, made: Acknowledgement, now: float) -> GivenCommand | None:
        command = self._known.commands.acknowledge(id, replica.id, made)
        if command is not None:
            self._outbox.urgent = True
            self._outbox.output.acknowledged[command.id] = command
            if (cohort := command.cohorts.get(replica.id)) is not None:
                ranks = command.ranks(cohort)
                if not any(one in command.waiting for one in ranks):
                    self.cohort_commands.advance(cohort, ranks, now)
        return command

    def end_before(self, replica: Replica, since: float, reason: str, now: float) -> None:
        """Fail a replica's commands given before its next process said hello, and all faults; leave it the others.

        The earlier process was still the replica when those were given, but not the one that the user saw.
        """
        for command in self._known.commands.unacknowledged(replica.id):
            if command.time < since or command.kind in FAULT_COMMANDS:
                self.end(command, replica, reason, now)

    def end_all(self, replica: Replica, reason: str, now: float) -> None:
        """Fail the commands that a replica has not acknowledged and never will."""
        for command in self._known.commands.unacknowledged(replica.id):
            self.end(command, replica, reason, now)

    def end(self, command: GivenCommand, replica: Replica, reason: str, now: float) -> None:
        self._acknowledge(replica, command.id, Acknowledgement.failed(reason), now)
        about = {"command": command.id, "do": command.kind.value, "cause": command.event, "reason": reason}
        self._known.events.append(now, "unanswered", replica.id, **about)

    def why_ended(self, replica: Replica) -> str:
        if replica.state is ReplicaState.FINISHED:
            how = "" if replica.ending in (None, ReplicaEnding.COMPLETED) else f" ({how_ended(replica)})"
            return f"replica {replica.id!r} has finished{how}"
        return because(f"replica {replica.id!r} has failed", replica.died_of)
