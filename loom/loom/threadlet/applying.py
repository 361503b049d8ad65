"""Applying commands at a step boundary, and acknowledging them: the half of a threadlet that hears the weaver."""

from __future__ import annotations

import threading
from collections.abc import Callable
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
from loom.control.reports import Phase
from loom.threadlet.deferred import Deferred, Settlement
from loom.threadlet.handlers import HandlerRegistry
from loom.threadlet.inbox import CommandInbox
from loom.threadlet.reporting import StatusReporter
from loom.threadlet.reports import plain
from loom.threadlet.spent import SpentBlock, SpentTime

if TYPE_CHECKING:
    from loom.threadlet.injections import Injections


FLUSH_TIMEOUT = 0.5
"""Seconds that a fault which ends the process waits at most for its acknowledgement to leave."""


@dataclass
class _Application:
    """What has become of a command so far."""

    command: Command
    reason: str | None = None
    """Why it is refused as a whole."""
    changes: dict[str, Change] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    deferred: dict[str, tuple[Any, Deferred]] = field(default_factory=dict)
    """Values that were accepted and are not decided yet."""
    evidence: dict[str, Any] = field(default_factory=dict)
    step: int | None = None
    """The latest step that a deferred value holds from; None for the step that is made."""


class CommandApplier(StatusReporter):
    """What a training process has to apply commands."""

    replica_id: str

    def __init__(self, config: dict[str, Any], sent: bool, injectable: bool) -> None:
        super().__init__(config, sent)
        self._spent = SpentTime()
        self._registry = HandlerRegistry()
        self._on_failure: list[Callable[[str, str], Any]] = []
        self._on_change: list[Callable[[str, bool], Any]] = []
        self._applying = threading.RLock()
        """Held while commands apply, so that each does once though any thread may call. Reentrant, as a handler may
        call the threadlet. The link's thread never takes it: handlers take as long as they like."""
        self._paused = False
        self._stop = False
        self._drain_published: int | None = None
        """What `_published` was when a drain applied; None if none has."""
        self._deferring: dict[str, _Application] = {}
        """Updates that handlers accepted and have not applied, by the command's id; guarded by `_applying`."""
        self._inbox = CommandInbox()
        self._pending = self._inbox.pending
        """Read in each step without a lock. What is missed comes at the next boundary."""
        self.injectable = injectable
        """Whether failures may be injected into this process."""
        self._hooks: dict[str, Callable[[dict[str, Any]], Any]] = {}
        self._each_step: list[Callable[[], None]] = []
        """What faults do in each step."""
        self._injections: Injections | None = None
        if injectable:
            from loom.threadlet.injections import Injections  # which takes longer than all else here

            self._injections = Injections(self._hooks, self._each_step, self._tell_removed)
            self._inbox.at_once = self._inject_at_once

    def spent(self, reason: str, beyond: float = 0.0) -> SpentBlock:
        """Return a ``with`` block around what is no step: the weaver is told its time by this reason.

        For the thread that trains, in a step or between two. A step's time does not contain it, nor a block's that
        of a block inside it.

        Args:
            reason: ``"checkpoint"``, ``"waiting"`` (for peers, for data), or another one.
            beyond: seconds, from the block's beginning, that belong to the step all the same: what an exchange with
                peers takes as a rule, of which only the rest is a wait.

        Raises:
            WrongArguments: the reason does not print, is too long, or is one that is found out by itself, such as
                ``"compute"``; ``beyond`` is no number of seconds.
        """
        return SpentBlock(self._spent, reason, beyond)

    def check_and_apply_updates(self) -> bool:
        """Apply, in order, what was commanded since the last call; call it between two steps.

        Returns:
            whether there was anything.
        """
        if self._each_step and not self._in_steps:
            self._run_each_step()
        if not self._pending and self._drain_published is None:
            return False
        with self._applying:
            if self._drain_published is not None:
                self._stop = True
            return self._advance(updates=True)

    def get_config_update(self) -> dict[str, Any] | None:
        """Take the next update of the configuration, for a loop that has no handlers; None when there is none.

        It counts as applied. Values are as they came. Other commands that came before it are applied too.
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
                    return dict(command.params)
                self._apply(command)
            return None

    def wait_while_paused(self) -> None:
        """Return at once, unless a pause has been commanded: then when it is over. Call it between two steps.

        Meanwhile updates are applied, if there are handlers for any, and stop and drain end the wait.
        """
        if not self._paused and not self._pending:
            return
        # Before the look at what waits: a command that comes between the two ends the wait at once.
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
        """Whether a pause has been commanded and applied."""
        return self._paused

    @property
    def draining(self) -> bool:
        """Whether a drain has been commanded and applied: the step that follows is the last."""
        return self._drain_published is not None

    @property
    def should_stop(self) -> bool:
        """Whether the loop is to end: a stop has applied, or a drain at the boundary before this one."""
        return self._stop

    def _attend(self) -> None:
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
        """Apply what waits; the caller holds `_applying`."""
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
        except BaseException as error:  # The training ends of it, and has to answer first.
            made.reason = f"the training was interrupted: {type(error).__name__}: {error}"
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
        return _call_each(
            self._on_change, str(command.params.get("device")), command.kind is CommandKind.REACTIVATE
        )

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
        # Called by any thread, also from within a handler of the update itself.
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
        if self._link is not None:
            self._link.send(acknowledged)

    def _inject_at_once(self, command: Command) -> bool:
        """Carry out a command that waits for no step boundary; return whether it is one."""
        assert self._injections is not None
        if not self._injections.at_once(command):
            return False
        # A thread of its own: the link's, which calls this, may not wait for what a fault does to the host.
        carry_out = self._injections.on_host
        threading.Thread(target=self._carry_out, args=(command, carry_out), name="loom-chaos", daemon=True).start()
        return True

    def _inject(self, command: Command) -> None:
        if self._injections is None:
            reason = f"{self.replica_id} is not injectable: make its threadlet injectable=True"
            return self._acknowledge(_Application(command, reason))
        self._carry_out(command, self._injections.in_training)

    def _carry_out(self, command: Command, carry_out: Callable[[Command], tuple[dict[str, Any], Any]]) -> None:
        try:
            evidence, strike = carry_out(command)
        except Exception as error:  # noqa: BLE001 - told to whoever wanted it
            return self._acknowledge(_Application(command, f"{type(error).__name__}: {error}"))
        # Before the fault strikes, which the process may not outlive.
        self._acknowledge(_Application(command, evidence=evidence))
        if strike is not None:
            if self._link is not None:
                self._link.flush(FLUSH_TIMEOUT)
            if (over := strike.strike()) is not None:
                self._tell_removed(command.id, over)

    def _tell_removed(self, injection: str, evidence: dict[str, Any]) -> None:
        if self._link is not None:
            self._link.send(FaultRemoved(injection, plain(evidence)))


def _call_each(functions: list[Callable[..., Any]], *arguments: Any) -> str | None:
    """Call all, also behind one that raises; return what they raised, or None."""
    raised = []
    for function in functions:
        try:
            function(*arguments)
        except Exception as error:  # noqa: BLE001 - the user's own code, which must not end the training
            raised.append(f"{getattr(function, '__name__', function)} raised {type(error).__name__}: {error}")
    return "; ".join(raised) or None
