"""Applying commands at a step boundary, and acknowledging them: the half of a threadlet that hears the weaver."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from loom.control.commands import Acknowledged, Acknowledgement, Change, Command, CommandKind, FaultRemoved
from loom.control.frame import MAX_COUNT
from loom.threadlet.deferred import Deferred, Settlement
from loom.threadlet.handlers import HandlerRegistry
from loom.threadlet.inbox import CommandInbox
from loom.threadlet.link import WeaverLink
from loom.threadlet.reports import KeptReports, plain

if TYPE_CHECKING:
    from loom.threadlet.injections import Injections

__all__ = ["CommandApplier"]

FLUSH_TIMEOUT = 0.5
"""Seconds that a fault which ends the process waits at most for its acknowledgement to leave."""


@dataclass
class _DeferredUpdate:
    """An update of the configuration of which some values are not decided yet."""

    command: Command
    changes: dict[str, Change]
    refused: dict[str, str]
    deferred: dict[str, tuple[Any, Deferred]]
    steps: list[int] = field(default_factory=list)
    """The steps that the deferred values which were applied hold from."""


class CommandApplier:
    """What a training process has to apply commands.

    Args:
        config: the configuration as it is.
        injectable: whether failures may be injected into this process.
    """

    replica_id: str

    def __init__(self, config: dict[str, Any], injectable: bool) -> None:
        self._config = config
        self._registry = HandlerRegistry()
        self._on_failure: list[Callable[[str, str], Any]] = []
        self._on_change: list[Callable[[str, bool], Any]] = []
        self._link: WeaverLink | None = None
        self._kept = KeptReports()
        self._published = -1
        self._applying = threading.RLock()
        self._step: Any = None
        self._paused = False
        self._stop = False
        self._drain_published: int | None = None
        """What `_published` was when a drain applied; None if none has."""
        self._deferring: dict[str, _DeferredUpdate] = {}
        """Updates that handlers accepted and have not applied, by the command's id; guarded by `_applying`."""
        self._inbox = CommandInbox()
        self._pending = self._inbox.pending
        self.injectable = injectable
        """Whether failures may be injected into this process."""
        self._hooks: dict[str, Callable[[dict[str, Any]], Any]] = {}
        self._injections: Injections | None = None
        self._each_step: list[Callable[[], None]] = []
        """What faults do in each step; the list of `_injections`."""
        if injectable:
            self._begin_injections()

    def _begin_injections(self) -> None:
        from loom.threadlet.injections import Injections  # which takes longer than all else here

        self._injections = Injections(self._tell_removed)
        self._injections.hooks = self._hooks
        self._each_step = self._injections.each_step
        self._inbox.at_once = self._inject_at_once

    def _advance(self, updates: bool) -> bool:
        """Apply what waits; the caller holds `_applying`."""
        applied = False
        while (command := self._inbox.take(updates)) is not None:
            applied = True
            self._apply(command)
        return applied

    def _apply(self, command: Command) -> None:
        if command.kind is CommandKind.INJECT:
            return self._inject(command)
        changes: dict[str, Change] = {}
        refused: dict[str, str] = {}
        deferred: dict[str, tuple[Any, Deferred]] = {}
        reason = None
        try:
            match command.kind:
                case CommandKind.UPDATE_CONFIG:
                    for outcome in self._registry.apply(command.params):
                        if outcome.deferred is not None:
                            deferred[outcome.key] = outcome.value, outcome.deferred
                        elif outcome.refused is None:
                            changes[outcome.key] = self._changed(outcome.key, outcome.value)
                        else:
                            refused[outcome.key] = outcome.refused
                    reason = "; ".join(refused.values()) or None
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
                    reason = _call_each(self._on_failure, device, why)
                case CommandKind.DEACTIVATE_DEVICE | CommandKind.REACTIVATE:
                    reason = self._change_device(command)
        except BaseException as error:  # The training ends of it, and has to answer first.
            reason = f"the training was interrupted: {type(error).__name__}: {error}"
            deferred.clear()
            raise
        finally:
            if deferred:
                self._defer(command, changes, refused, deferred)
            else:
                self._answer(command, reason, changes, refused)

    def _defer(
        self,
        command: Command,
        changes: dict[str, Change],
        refused: dict[str, str],
        deferred: dict[str, tuple[Any, Deferred]],
    ) -> None:
        """Answer an update when all its deferred values are decided."""
        self._deferring[command.id] = _DeferredUpdate(command, changes, refused, deferred)
        for key, (_, change) in list(deferred.items()):
            change.when_decided(partial(self._decided, command.id, key))

    def _decided(self, id: str, key: str, verdict: Settlement) -> None:
        with self._applying:
            update = self._deferring.get(id)
            if update is None:
                return
            value, _ = update.deferred.pop(key)
            if verdict.step is not None:
                update.changes[key] = self._changed(key, value)
                update.steps.append(verdict.step)
            else:
                update.refused[key] = f"{key}: {verdict.refused}"
            if not update.deferred:
                del self._deferring[id]
                reason = "; ".join(update.refused.values()) or None
                self._answer(
                    update.command, reason, update.changes, update.refused, step=max(update.steps, default=None)
                )

    def _inject_at_once(self, command: Command) -> bool:
        assert self._injections is not None
        if not self._injections.at_once(command):
            return False
        carry_out = self._injections.on_host
        threading.Thread(target=self._carry_out, args=(command, carry_out), name="loom-chaos", daemon=True).start()
        return True

    def _inject(self, command: Command) -> None:
        if self._injections is None:
            return self._answer(command, f"{self.replica_id} is not injectable: make its threadlet injectable=True")
        self._carry_out(command, self._injections.in_training)

    def _carry_out(self, command: Command, carry_out: Callable[[Command], tuple[dict[str, Any], Any]]) -> None:
        try:
            evidence, strike = carry_out(command)
        except Exception as error:  # noqa: BLE001 - told to whoever wanted it
            return self._answer(command, f"{type(error).__name__}: {error}")
        self._answer(command, evidence=evidence)
        if strike is not None:
            if self._link is not None:
                self._link.flush(FLUSH_TIMEOUT)
            if (over := strike.strike()) is not None:
                self._tell_removed(command.id, over)

    def _tell_removed(self, injection: str, evidence: dict[str, Any]) -> None:
        if self._link is not None:
            self._link.send(FaultRemoved(injection, plain(evidence)))

    def _suffer(self) -> None:
        assert self._injections is not None
        self._injections.suffer()

    def _change_device(self, command: Command) -> str | None:
        if not self._on_change:
            return f"this replica has no function for {command.kind.value}: @t.on_device_change makes one"
        return _call_each(
            self._on_change, str(command.params.get("device")), command.kind is CommandKind.REACTIVATE
        )

    def _changed(self, key: str, value: Any) -> Change:
        old, self._config[key] = self._config.get(key), value
        return Change(plain(old), plain(value))

    def _answer(
        self,
        command: Command,
        reason: str | None = None,
        changes: dict[str, Change] | None = None,
        refused: dict[str, str] | None = None,
        evidence: dict[str, Any] | None = None,
        step: int | None = None,
    ) -> None:
        at = self._whole_step() if step is None else step
        made = Acknowledgement(
            reason is None, at, changes or {}, refused or {}, reason, evidence=plain(evidence or {})
        )
        acknowledged = Acknowledged(command.id, made)
        self._inbox.finish(acknowledged)
        if self._link is not None:
            self._link.send(acknowledged)

    def _whole_step(self) -> int | None:
        step = self._step
        return step if type(step) is int and 0 <= step < MAX_COUNT else self._kept.last_step

    def _refuse_deferred(self) -> None:
        for update in list(self._deferring.values()):
            for _, change in list(update.deferred.values()):
                change.refuse("the training ended before it was applied")


def _call_each(functions: list[Callable[..., Any]], *arguments: Any) -> str | None:
    """Call all, also behind one that raises; return what they raised, or None."""
    raised = []
    for function in functions:
        try:
            function(*arguments)
        except Exception as error:  # noqa: BLE001 - the user's own code, which must not end the training
            raised.append(f"{getattr(function, '__name__', function)} raised {type(error).__name__}: {error}")
    return "; ".join(raised) or None
