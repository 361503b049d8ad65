"""The half of a threadlet that takes commands: it applies them at a step boundary and acknowledges them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from loom.control.commands import (
    FAULT_COMMANDS,
    Acknowledged,
    Acknowledgement,
    Change,
    Command,
    CommandKind,
    FaultRemoved,
)
from loom.control.membership import MAX_REASON, Draining
from loom.control.reports import Phase
from loom.errors import describe_error
from loom.threadlet.deferred import Deferred, Settlement
from loom.threadlet.handlers import HandlerRegistry
from loom.threadlet.inbox import CommandInbox
from loom.threadlet.reporting import StatusReporter
from loom.threadlet.reports import plain
from loom.threadlet.time_accounting import TimeAccounting, TimedBlock

if TYPE_CHECKING:
    from loom.threadlet.injections import Injections


FLUSH_TIMEOUT = 0.5  # seconds that a fault which ends the process waits for its acknowledgement to leave


@dataclass
class _Application:
    """The application of a command so far."""

    command: Command
    reason: str | None = None  # why the whole command is refused
    changes: dict[str, Change] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    deferred: dict[str, tuple[Any, Deferred]] = field(default_factory=dict)  # not settled yet
    evidence: dict[str, Any] = field(default_factory=dict)
    step: int | None = None  # the latest step at which a deferred value takes effect; None for the current step


class CommandApplier(StatusReporter):
    """The part of a threadlet that applies commands."""

    def __init__(self, config: dict[str, Any], sent: bool, injectable: bool) -> None:
        super().__init__(config, sent)
        self._accounting = TimeAccounting()
        self._registry = HandlerRegistry()
        self._on_failure: list[Callable[[str, str], Any]] = []
        self._on_change: list[Callable[[str, bool], Any]] = []
        # Held while commands apply; reentrant because a handler may call the threadlet. The link's thread never
        # takes it, because handlers may take long.
        self._applying = threading.RLock()
        self._paused = False
        self._stop = False
        self._evicted = False
        self._drain_published: int | None = None  # `_published` when a drain was applied
        self._deferring: dict[str, _Application] = {}  # by the command's id; guarded by `_applying`
        self._inbox = CommandInbox()
        self._pending = self._inbox.pending
        """The waiting commands, read in each step without a lock: a missed one applies at the next boundary."""
        self.injectable = injectable
        """Whether failures may be injected into this process."""
        self._hooks: dict[str, Callable[[dict[str, Any]], Any]] = {}
        self._each_step: list[Callable[[], None]] = []  # functions that faults run in each step
        self._injections: Injections | None = None
        if injectable:
            from loom.threadlet.injections import Injections  # imported only if needed, because it takes long

            self._injections = Injections(self._hooks, self._each_step, self._report_removed)
            self._inbox.at_once = self._inject_at_once

    def spent(self, reason: str, beyond: float = 0.0) -> TimedBlock:
        """Return a ``with`` block around work that is not part of a step; its time is reported by this reason.

        Use it in the training thread, in a step or between two. The block's time does not count as the step's, and
        the time of a nested block does not count as the outer block's.

        Args:
            reason: ``"checkpoint"``, ``"waiting"`` (for peers, for data), or another one.
            beyond: seconds from the block's beginning that still count as the step's, such as the usual time of an
                exchange with peers, of which only the rest is a wait.

        Raises:
            WrongArguments: the reason is not printable, is too long, or is one that Loom determines itself, such as
                ``"compute"``; or ``beyond`` is no number of seconds.
        """
        return TimedBlock(self._accounting, reason, beyond)

    def check_and_apply_updates(self) -> bool:
        """Apply the commands that came since the last call, in order, between two steps; return whether any did."""
        if self._each_step and not self._in_steps:
            self._run_each_step()
        if not self._pending and self._drain_published is None:
            return False
        with self._applying:
            if self._drain_published is not None:
                self._stop = True
            return self._advance(updates=True)

    def get_config_update(self) -> dict[str, Any] | None:
        """Apply the next command and return it, for a loop without handlers; return None if there is none.

        The command is ``{"command_type": …, "params": …, "_is_weaver_command": True}``: the name and the parameters
        of a `loom.control.commands.CommandKind`. For ``update_config`` the parameters are the new values, which are
        not converted; the update counts as applied. After ``pause`` `paused` is true, and so on. Injected faults
        are carried out and not returned, and neither are commands that a step or `wait_while_paused` applied.
        """
        if not self._pending and self._drain_published is None:
            return None
        with self._applying:
            # Such a loop may ask several times in one step: a drain ends it once another step is published.
            if self._drain_published not in (None, self._published):
                self._stop = True
            while (command := self._inbox.take()) is not None:
                if command.kind is CommandKind.UPDATE_CONFIG:
                    changes = {key: self._changed(key, value) for key, value in command.params.items()}
                    self._acknowledge(_Application(command, changes=changes))
                else:
                    self._apply(command)
                if command.kind not in FAULT_COMMANDS:
                    what = {"command_type": command.kind.value, "params": dict(command.params)}
                    return {**what, "_is_weaver_command": True}
            return None

    def wait_while_paused(self) -> None:
        """Wait until the pause is over, if a pause was commanded. Call it between two steps.

        During a pause updates are applied if there are handlers; stop and drain end the pause.
        """
        if not self._paused and not self._pending:
            return
        # Read the count before applying: a command that comes in between then ends the wait below at once.
        arrived = self._inbox.arrived
        with self._applying:
            self._advance(updates=bool(self._registry))
        if not self._paused:
            return
        before = self._phase
        self._enter_phase(Phase.PAUSED)
        try:
            with self.spent("waiting"):
                while self._paused and self._inbox.wait(arrived):
                    arrived = self._inbox.arrived
                    with self._applying:
                        self._advance(updates=bool(self._registry))
        finally:
            self._enter_phase(before)

    @property
    def paused(self) -> bool:
        """Whether a pause was commanded and applied."""
        return self._paused

    @property
    def draining(self) -> bool:
        """Whether a drain was applied, commanded or by `drain`: the next step is the last."""
        return self._drain_published is not None

    def drain(self, reason: str = "") -> None:
        """Drain this process by its own choice: the current step is the last, or else the next one.

        The weaver shows the replica as draining, with the first `MAX_REASON` characters of the reason. A pause
        ends. Any thread may call; a second call changes nothing.
        """
        if self._drain_published is None:
            self._drain_published, self._paused = self._published, False
            self._send(Draining(reason[:MAX_REASON]))
            self._inbox.wake()

    @property
    def should_stop(self) -> bool:
        """Whether the loop should end: a stop was applied, a drain at an earlier boundary, or it is `evicted`."""
        return self._stop

    @property
    def evicted(self) -> bool:
        """Whether the machine is about to be taken away: save the state now, and end."""
        return self._evicted

    def evict(self) -> None:
        """Let `should_stop` and `evicted` be true, and end a pause. Any thread may call."""
        self._evicted = self._stop = True
        self._paused = False
        self._inbox.wake()

    def _apply_and_wait(self) -> None:
        self.check_and_apply_updates()
        self.wait_while_paused()

    def _enter_phase(self, phase: Phase) -> None:
        self._phase = phase
        if self._link is not None:
            self._link.beat_now()

    def _run_each_step(self) -> None:
        for each in list(self._each_step):
            each()

    def _advance(self, updates: bool) -> bool:
        """Apply the waiting commands; the caller holds `_applying`."""
        applied = False
        while (command := self._inbox.take(updates)) is not None:
            applied = True
            self._apply(command)
        return applied

    def _apply(self, command: Command) -> None:
        if command.kind in FAULT_COMMANDS:
            return self._inject(command)
        made = _Application(command)
        try:
            match command.kind:
                case CommandKind.UPDATE_CONFIG:
                    self._update(made)
                case CommandKind.PAUSE if self._evicted:
                    made.reason = "its worker is about to end, and it saves its state"
                case CommandKind.PAUSE:
                    self._paused = True
                case CommandKind.RESUME:
                    self._paused = False
                case CommandKind.STOP:
                    self._stop, self._paused = True, False
                case CommandKind.DRAIN:
                    self._drain_published, self._paused = self._published, False
                case CommandKind.DEVICE_FAILED:
                    device, why = str(command.params.get("device")), str(command.params.get("reason"))
                    made.reason = _call_each(self._on_failure, device, why)
                case CommandKind.DEACTIVATE_DEVICE | CommandKind.REACTIVATE:
                    made.reason = self._change_device(command)
        except BaseException as error:  # It ends the training, which has to acknowledge the command first.
            made.reason = f"the training was interrupted: {describe_error(error)}"
            made.deferred.clear()
            raise
        finally:
            self._acknowledge_when_decided(made)

    def _update(self, made: _Application) -> None:
        for outcome in self._registry.apply(made.command.params):
            if outcome.deferred is not None:
                made.deferred[outcome.key] = outcome.value, outcome.deferred
            elif outcome.refused is None:
                made.changes[outcome.key] = self._changed(outcome.key, outcome.value)
            else:
                made.refused[outcome.key] = outcome.refused

    def _change_device(self, command: Command) -> str | None:
        if not self._on_change:
            return f"this replica has no function for {command.kind.value}: @t.on_device_change makes one"
        usable, params = command.kind is CommandKind.REACTIVATE, command.params
        changed = params["devices"] if "devices" in params else [params.get("device")]
        if "devices" in params:  # of a whole group
            changed = [device for device in changed if device in self._own_devices()]
        raised = [_call_each(self._on_change, str(device), usable) for device in changed]
        return "; ".join(text for text in raised if text is not None) or None

    def _own_devices(self) -> Collection[str]:
        """Return the uuids of the devices of this process."""
        raise NotImplementedError

    def _changed(self, key: str, value: Any) -> Change:
        old, self._config[key] = self._config.get(key), value
        return Change(plain(old), plain(value))

    def _acknowledge_when_decided(self, made: _Application) -> None:
        if not made.deferred:
            return self._acknowledge(made)
        self._deferring[made.command.id] = made
        for key, (_, change) in list(made.deferred.items()):
            change.when_decided(partial(self._decided, made.command.id, key))

    def _decided(self, id: str, key: str, settlement: Settlement) -> None:
        # Any thread may call this, even from within a handler of the update itself.
        with self._applying:
            made = self._deferring.get(id)
            if made is None:
                return
            value, _ = made.deferred.pop(key)
            if settlement.step is not None:
                made.changes[key] = self._changed(key, value)
                made.step = settlement.step if made.step is None else max(made.step, settlement.step)
            else:
                made.refused[key] = f"{key}: {settlement.refused}"
            if not made.deferred:
                del self._deferring[id]
                self._acknowledge(made)

    def _refuse_deferred(self) -> None:
        for made in list(self._deferring.values()):
            for _, change in list(made.deferred.values()):
                change.refuse("the training ended before it was applied")

    def _acknowledge(self, made: _Application) -> None:
        reason = made.reason or "; ".join(made.refused.values()) or None
        step = self._whole_step() if made.step is None else made.step
        acknowledgement = Acknowledgement(
            reason is None, step, made.changes, made.refused, reason, evidence=plain(made.evidence)
        )
        acknowledged = Acknowledged(made.command.id, acknowledgement)
        self._inbox.finish(acknowledged)
        self._send(acknowledged)

    def _inject_at_once(self, command: Command) -> bool:
        """Start a command that does not wait for a step boundary; return False if it has to wait for one."""
        assert self._injections is not None
        if not self._injections.at_once(command):
            return False
        # The link's thread calls this, and must not wait for a fault's effect on the host: use another thread.
        threading.Thread(target=self._inject, args=(command,), name="loom-chaos", daemon=True).start()
        return True

    def _inject(self, command: Command) -> None:
        if self._injections is None:
            reason = f"{self.replica_id} is not injectable: make its threadlet injectable=True"
            return self._acknowledge(_Application(command, reason))
        try:
            evidence, strike = self._injections.inject(command)
        except Exception as error:  # noqa: BLE001 - reported in the acknowledgement
            return self._acknowledge(_Application(command, describe_error(error)))
        # Acknowledge before the fault strikes: the process may not survive it.
        self._acknowledge(_Application(command, evidence=evidence))
        if strike is not None:
            if self._link is not None:
                self._link.flush(FLUSH_TIMEOUT)
            if (over := strike.strike()) is not None:
                self._report_removed(command.id, over)

    def _report_removed(self, injection: str, evidence: dict[str, Any]) -> None:
        self._send(FaultRemoved(injection, plain(evidence)))


def _call_each(functions: list[Callable[..., Any]], *arguments: Any) -> str | None:
    """Call every function, even after one has raised; return the texts of the errors, or None."""
    raised = []
    for function in functions:
        try:
            function(*arguments)
        except Exception as error:  # noqa: BLE001 - the user's own code, which must not end the training
            raised.append(f"{getattr(function, '__name__', function)} raised {describe_error(error)}")
    return "; ".join(raised) or None
