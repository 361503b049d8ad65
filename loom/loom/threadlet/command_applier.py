"""The half of a threadlet that takes commands: it applies them at a step boundary and acknowledges them."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from loom.branches.branch import own_branch
from loom.branches.values import beginning
from loom.control.commands import (
    COHORT_COMMANDS,
    FAULT_COMMANDS,
    Acknowledged,
    Acknowledgement,
    Change,
    CohortVerdict,
    Command,
    CommandKind,
    FaultRemoved,
)
from loom.control.handshake import EVERYTHING_OFFERED, Offers
from loom.control.reports import MAX_REASON, Draining, Phase
from loom.control.run_start import branch_command
from loom.errors import describe_error
from loom.threadlet.cohort import Way
from loom.threadlet.cohort_member import CohortMember
from loom.threadlet.handlers import Deferred, HandlerRegistry, Outcome, Settlement
from loom.threadlet.inbox import Application, AwaitedEffects, CommandInbox
from loom.threadlet.reporting import StatusReporter
from loom.threadlet.status_rows import now_of_system, plain
from loom.threadlet.time_accounting import TimeAccounting, TimedBlock
from loom.wings import Part

_log = logging.getLogger("loom")


class FaultInjections(Protocol):
    """The faults of this process, which the wing of chaos carries out."""

    removed: Mapping[str, Mapping[str, object]]
    """The evidence of the last removals, by the fault's id."""

    def at_once(self, command: Command) -> bool:
        """Return whether a command does not wait for a step boundary."""

    def inject(self, command: Command) -> tuple[Mapping[str, object], Any]:
        """Inject or remove a fault; return the evidence, and a strike for after the acknowledgement, or None."""


BRANCH_BEGINS_WITHIN = 240.0
"""Seconds in which a branch that ends has not begun. The weaver acknowledges the command itself when it has."""

TAKEN_AFTER = 0.5
"""Seconds after which values that `get_config_update` returned are the program's, without a word of it."""

FLUSH_TIMEOUT = 0.5  # seconds that a fault which ends the process waits for its acknowledgement to leave


_NO_WAIT = (
    "the loop goes on: it does not wait during a pause. `with t.step(…)` waits, and so does t.wait_while_paused()"
)
_NO_LOOK = "the loop goes on: it does not look at t.should_stop"
_NOBODY = "nobody acts on it: this replica has no function for {}: @t.{} makes one"
_ACTIONS = {CommandKind.SAVE: ("saves", "checkpoint"), CommandKind.EVALUATE: ("evaluates", "evaluation")}
"""What a program with a function for a command does, and the reason for which it spends the time of it."""
_NOTHING = "nothing here {}: the training offers no function for it, as @t.on_{} makes one"
_SHOWN_BY = 2
"""Step boundaries after which a program has shown what it offers."""
_ENDS = (CommandKind.STOP, CommandKind.DRAIN)
_PAUSES = (CommandKind.PAUSE,)
_TOGETHER = COHORT_COMMANDS - {CommandKind.RESUME, CommandKind.STOP}
"""Commands that a rank does not apply by itself. The two others end a pause, also one in which a rank has died."""
_TOO_EARLY = (
    "it was sent before this process formed a cohort with the other ranks of its job, which change at one step: "
    "give it again"
)
_EVICTED = "its worker is about to end, and it saves its state"
_CHECK, _WAIT, _TAKE = Way.CHECK, Way.WAIT, Way.TAKE  # one name lookup less in each step


class CommandApplier(StatusReporter):
    """The part of a threadlet that applies commands."""

    def __init__(self, config: dict[str, Any], sent: bool, injectable: bool) -> None:
        super().__init__(config, sent)
        self._accounting = TimeAccounting()
        self._registry = HandlerRegistry()
        self._on_failure: list[Callable[[str, str], Any]] = []
        self._on_change: list[Callable[[str, bool], Any]] = []
        self._actions: dict[CommandKind, Callable[[], Any]] = {}  # the program's functions for `_ACTIONS`
        self._unable: dict[CommandKind, Callable[[], str | None]] = {}
        """For commands of `_ACTIONS`, returns why the program cannot carry it out now, or None."""
        self._asked = False  # whether the program has asked for commands by `get_config_update`
        # Held while commands apply; reentrant because a handler may call the threadlet. The link's thread never
        # takes it, because handlers may take long.
        self._applying = threading.RLock()
        self._paused = False
        self._stop = False
        self._evicted = False
        self._drain_published: int | None = None  # `_published` when a drain was applied
        self._deferring: dict[str, Application] = {}  # by the command's id; guarded by `_applying`
        self._effects = AwaitedEffects(self._acknowledge)
        self._unsettled = False
        """True if the loop has to show a command's effect, or waits by asking; steps read it without a lock."""
        self._before_polling: Phase | None = None
        """The phase before the loop began to wait by asking again and again whether it is paused."""
        self._applies_in: int | None = None  # the thread that applied the last pause
        self._handled: dict[str, Outcome] = {}  # the outcomes of the last update that was taken
        self._held: Application | None = None
        """An update whose values the program took, until it dispatches them, is at a boundary, or time is up."""
        self._inbox = CommandInbox()
        self._pending = self._inbox.pending
        """The waiting commands, read in each step without a lock: a missed one applies at the next boundary."""
        self.injectable = injectable
        """True if failures may be injected into this process."""
        self._begin_branch_here: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
        """Starts a branch of this process's run, in a program that needs no command for that."""
        self._branch_command: str | None = None
        """Id of the command by which a process of a branch takes the branch's values before its first step."""
        self._took: int | None = None  # `_published` when `get_config_update` returned a command last
        self._cohort = CohortMember(self._refusal, self._refuse, self._inbox.wake)
        self._gate = self._cohort.gate
        self._inbox.at_once = self._take_over
        self._hooks: dict[str, Callable[[Mapping[str, Any]], Any]] = {}
        self._each_step: list[Callable[[], None]] = []  # functions that faults run in each step
        self._injections: FaultInjections | None = None
        if injectable:
            self._injections = Part.INJECTIONS.load()(self._hooks, self._each_step, self._report_removed)

    def spent(self, reason: str, beyond: float = 0.0) -> TimedBlock:
        """Return a ``with`` block around work that is not part of a step; its time is reported by this reason.

        Use it in the training thread, in a step or between two. The block's time does not count as the step's, and
        the time of a nested block does not count as the outer block's.

        Args:
            reason: ``"checkpoint"``, ``"waiting"`` (for peers, for data), or another one.
            beyond: seconds from the block's beginning that still count as the step's, such as the usual time of an
                exchange with peers; only the rest is a wait.

        Raises:
            WrongArguments: the reason is not printable, is too long, or is one that Loom determines itself, such as
                ``"compute"``; or ``beyond`` is no number of seconds.
        """
        return TimedBlock(self._accounting, reason, beyond)

    def check_and_apply_updates(self) -> bool:
        """Apply the commands that came since the last call, in order, between two steps; return whether any did.

        The call does not wait during a pause: a loop that goes on without `wait_while_paused` refuses the pause. It
        waits for the other ranks of the job, within bounds, while they decide about a command.
        """
        if self._each_step and not self._in_steps:
            self._run_each_step()
        gate, met = self._gate, False
        if gate.way is _CHECK or gate.counts(_CHECK):
            gate.come()
            if gate.meeting is not None:
                met = self._meet() is not None
        elif gate.waits and gate.meeting is not None:
            met = self._meet() is not None
        if not self._pending and self._drain_published is None and not self._unsettled:
            return met
        with self._applying:
            if self._drain_published is not None:
                self._stop = True
            return self._advance(updates=True) or met

    def get_config_update(self) -> dict[str, Any] | None:
        """Apply the next command and return it; return None if there is none.

        A command is ``{"command_type": …, "params": …, "_is_weaver_command": True}``: the name and the parameters
        of a `loom.control.commands.CommandKind`. For ``update_config`` these are the new values as they were sent.
        Their handlers are called before this returns. The program takes values without a handler, and the
        acknowledgement says so. News of a configuration that is nobody's command, such as ``config.info`` of NATS,
        is a dict of the values alone. Injected faults are carried out and not returned, and neither are commands
        that a step or `wait_while_paused` applied.
        """
        gate, taken, self._asked = self._gate, None, True
        if self._took == self._published:  # the program asks whether there is another one, at the same boundary
            self._took = None
        elif gate.way is _TAKE or gate.counts(_TAKE):
            gate.come()
            if gate.meeting is not None:
                taken = self._meet(by_program=True)
        elif gate.waits and gate.meeting is not None:
            taken = self._meet(by_program=True)
        if taken is not None:
            return self._given_to_program(taken)
        if not self._pending and self._drain_published is None and not self._unsettled:
            return None
        with self._applying:
            # Such a loop may ask several times in one step: a drain ends it once another step is published.
            if self._drain_published not in (None, self._published):
                self._stop = True
            self._look()
            while (command := self._next()) is not None:
                self._apply(command, by_program=True)
                if command.announced or command.kind not in FAULT_COMMANDS:
                    return self._given_to_program(command)
            self._note_poll()
            return None

    def _given_to_program(self, command: Command) -> dict[str, Any]:
        self._took = self._published
        if command.announced:
            return dict(command.params)
        what = {"command_type": command.kind.value, "params": dict(command.params)}
        return {**what, "_is_weaver_command": True}

    def _dispatch_handlers(self, params: Mapping[str, Any]) -> dict[str, str]:
        """Call the handlers for new values, as torchLoom's loops do with what `get_config_update` returned.

        A value that `get_config_update` has given to its handler is not given to it again. Other values are applied
        as the program's own, and reported to the weaver.

        Returns:
            The reasons of values that were refused, by key: none raises an error.
        """
        refused = {}
        with self._applying:
            for key, value in params.items():
                outcome = self._handled.pop(key, None)
                if outcome is None or type(value) is not type(outcome.sent) or value != outcome.sent:
                    outcome = self._registry.apply(key, value)
                    if (held := self._held) is not None and key in held.taken:
                        self._dispatched(held, key, outcome)
                    elif outcome.deferred is not None:
                        outcome.deferred.when_decided(partial(self._note_own, key, outcome.value))
                    elif outcome.refused is None:
                        self._report_config(key, outcome.value)
                if outcome.refused is not None:
                    refused[key] = outcome.refused
                    _log.warning("not applied: %s", outcome.refused)
            self._release(self._held)
        return refused

    def _dispatched(self, held: Application, key: str, outcome: Outcome) -> None:
        """Note what came of a value that the program has taken and then dispatched."""
        held.taken.remove(key)
        taken = held.changes.pop(key)
        self._config[key] = taken.old
        if outcome.deferred is not None:
            held.deferred[key] = outcome.value, outcome.deferred
        elif outcome.refused is not None:
            held.refused[key] = outcome.refused
        else:
            held.changes[key] = self._changed(key, outcome.value)

    def _release(self, made: Application | None) -> None:
        """Acknowledge an update that was held back, if it still is."""
        with self._applying:
            if made is not None and self._held is made:
                self._held = None
                self._acknowledge_when_settled(made)

    def _note_own(self, key: str, value: Any, settlement: Settlement) -> None:
        if settlement.step is not None:
            self._report_config(key, value)

    def wait_while_paused(self) -> None:
        """Wait until the pause is over, if a pause was commanded. Call it between two steps.

        During a pause updates are applied if there are handlers; stop and drain end the pause.
        """
        self._effects.waits = True
        gate = self._gate
        if gate.way is not _CHECK and (gate.way is _WAIT or gate.counts(_WAIT)):
            gate.come()
            if gate.meeting is not None:
                self._meet()
        if not self._paused and not self._pending:
            return
        # Read the count before applying: a command that comes in between then ends the wait below at once.
        arrived = self._inbox.arrived
        with self._applying:
            self._advance(updates=bool(self._registry))
        if not self._paused:
            return
        self._stop_polling()
        before = self._phase
        self._enter_phase(Phase.PAUSED)
        try:
            with self._applying:
                self._look()
            with self.spent("waiting"):
                while self._paused and self._inbox.wait(arrived):
                    arrived = self._inbox.arrived
                    if gate.meeting is not None:
                        self._meet()
                    with self._applying:
                        self._advance(updates=bool(self._registry))
        finally:
            self._enter_phase(before)

    @property
    def paused(self) -> bool:
        """True if a pause was commanded and applied. A loop may wait by asking again and again."""
        if self._unsettled and self._paused and self._applies_in == threading.get_ident():
            with self._applying:
                self._note_poll()
        return self._paused

    @property
    def draining(self) -> bool:
        """True if a drain was applied, commanded or by `drain`: the next step is the last."""
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
        """True if the loop should end: a stop was applied, a drain at an earlier boundary, or it is `evicted`."""
        self._effects.asks = True
        # Not if a handler runs in another thread, which may take long: the next boundary looks again.
        if self._unsettled and self._applying.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._applying.release()
        return self._stop

    def go_on(self) -> None:
        """Forget a stop, or a drain, that has ended one of several trainings of this process."""
        with self._applying:
            self._stop, self._drain_published = self._evicted, None

    @property
    def evicted(self) -> bool:
        """True if the machine is about to be taken away: save the state now, and end."""
        return self._evicted

    def evict(self) -> None:
        """Let `should_stop` and `evicted` be true, and end a pause. Any thread may call."""
        self._evicted = self._stop = True
        self._paused = False
        self._inbox.wake()

    def _meet(self, by_program: bool = False) -> Command | None:
        """Come to a boundary while a command of the cohort is under way; return the command if it was applied here.

        Wait for the other ranks, within bounds.
        """
        step, epoch = (one if type(one) is int else None for one in (self._step, self._epoch))
        meeting = self._cohort.attend(step, epoch)
        if meeting is None:
            return None
        command = meeting.command
        made = Application(command)
        with self._applying:
            self._registry.read_into(self._config, command.params)
            before = {key: self._config[key] for key in command.params if key in self._config}
            try:
                self._carry_out(made, by_program)
            finally:
                if meeting.confirms:
                    failed = made.reason or "; ".join(made.refused.values()) or None
                    refused = self._cohort.confirm(meeting, failed)
                    if refused is not None:
                        made.verdict = self._cohort.verdict(meeting.nobody)
                        self._take_back(made, before, refused)
                self._acknowledge_when_decided(made)
        return command if made.reason is None else None

    def _take_back(self, made: Application, before: Mapping[str, Any], reason: str) -> None:
        """Give handlers the values before an update that another rank has not applied."""
        made.reason = reason
        for key in reversed(made.changes):
            if key not in before:
                del self._config[key]
            if key in made.taken:
                continue  # the program has not got it
            refused = None
            if key in made.undo:
                refused = _undone(key, made.undo[key])
            elif key in before:
                refused = self._registry.apply(key, before[key]).refused
            else:
                refused = f"{key}: the value before is unknown: name it in the threadlet's config"
            if refused is not None:
                made.reason += f"; and this rank keeps the new value, since {refused}"
        self._config.update(before)
        for _, change in made.deferred.values():
            change.refuse(reason)
        made.changes, made.taken, made.deferred = {}, [], {}

    def take_over(self) -> None:
        """Give handlers the values that the other ranks of a new cohort have, between two steps."""
        if not self._cohort.wanted:
            return
        values = self._cohort.take_wanted(self._registry)
        with self._applying:
            for key in [key for key, value in values.items() if callable(value)]:
                if (refused := _undone(key, values.pop(key))) is not None:
                    _log.warning("not given up: %s", refused)
            self._dispatch_handlers(values)

    def _refusal(self, command: Command) -> str | None:
        """Return why a command of the cohort cannot be applied here, if that shows without the program's code."""
        kind, by_program = command.kind, self._gate.is_way(_TAKE)
        if kind is CommandKind.PAUSE and self._evicted:
            return _EVICTED
        if not self._gate.passed:  # what the program offers may still come
            return None
        if kind in _ACTIONS and not by_program and (reason := self._why_not(kind)) is not None:
            return reason
        if kind is not CommandKind.UPDATE_CONFIG:
            return None
        known = self._registry
        refusals = [known.refusal(*one) for one in command.params.items() if not by_program or one[0] in known]
        return "; ".join(one for one in refusals if one is not None) or None

    def _why_not(self, kind: CommandKind) -> str | None:
        """Return why nothing here saves, or evaluates, now; None if something does."""
        if kind not in self._actions:
            return _NOTHING.format(_ACTIONS[kind][0], kind)
        try:
            return self._unable[kind]()
        except Exception:  # noqa: BLE001 - such as of a Trainer that goes just now: the function itself will say it
            return None

    def offer_action(
        self,
        name: str,
        function: Callable[[], Any],
        unable: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Let a function carry out a command of `_ACTIONS`.

        Args:
            name: the command's kind.
            function: carries it out at a step boundary.
            unable: returns why it cannot be carried out now, or None; any thread may call it.
        """
        kind = CommandKind(name)
        self._actions[kind], self._unable[kind] = function, unable
        if self._link is not None:
            self._link.beat_now()

    def offers(self) -> Offers:
        """Return what this process refuses, as far as its first steps have shown what its program offers."""
        if self._gate.passed < _SHOWN_BY or self._asked:
            return EVERYTHING_OFFERED
        reasons = {kind.value: self._why_not(kind) for kind in _ACTIONS}
        return Offers({kind: why for kind, why in reasons.items() if why is not None}, any_key=False)

    def _refuse(self, command: Command, reason: str, verdict: CohortVerdict | None) -> None:
        self._acknowledge(Application(command, reason, verdict=verdict))

    def _take_over(self, command: Command) -> bool:
        """Take a command over from the step boundary, if it does not wait for one; the link's thread calls this."""
        if command.cohort is not None:
            self._cohort.take(command)
            return True
        if command.kind is CommandKind.BRANCH:
            threading.Thread(target=self._start_branch, args=(command,), name="loom-branch", daemon=True).start()
            return True
        return self._injections is not None and self._inject_at_once(command)

    def _start_branch(self, command: Command) -> None:
        """Start a branch of this process's run, and see whether it ends before the weaver hears of it."""
        from loom.branches import launch  # which few processes need

        made, process = Application(command), None
        try:
            if self._begin_branch_here is not None:
                made.evidence = dict(self._begin_branch_here(command.params))
                return self._acknowledge(made)
            start, process, log = launch.launch(command.params, self._config)
            made.evidence = {"name": start.name, "step": start.branch.step, "pid": process.pid, "log": str(log)}
            if not command.params.get("replace"):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(BRANCH_BEGINS_WITHIN)
                    made.reason = launch.why_ended(process, log)
        except Exception as error:  # noqa: BLE001 - reported in the acknowledgement
            made.reason = describe_error(error)
        self._acknowledge(made)
        if process is not None:
            process.wait()  # it is this process's child, and would stay a zombie

    def _apply_and_wait(self) -> None:
        self.check_and_apply_updates()
        self.wait_while_paused()

    def _enter_phase(self, phase: Phase) -> None:
        self._phase = phase
        self._cohort.pause(phase is Phase.PAUSED)
        if self._link is not None:
            self._link.beat_now()

    def _run_each_step(self) -> None:
        for each in list(self._each_step):
            each()

    def _advance(self, updates: bool) -> bool:
        """Apply the waiting commands; the caller holds `_applying`."""
        applied = False
        while (command := self._next(updates)) is not None:
            applied = True
            self._apply(command)
        self._look()
        return applied

    def on_branch(self, function: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
        """Let a function start the branches of this process's run, in place of its command line.

        It gets the parameters of `loom.branches.launch.launch`, on a thread of its own, and returns what to
        acknowledge once the branch has begun. It raises to refuse.
        """
        self._begin_branch_here = function

    def begin_branch(self, start: str | None) -> None:
        """Let a process of a branch take the branch's values at its first step boundary, by a command of its own.

        The weaver gives the command with that id when it hears of the process, and gets its acknowledgement.
        """
        branch = own_branch()
        if branch is not None and branch.config and start is not None:
            self._branch_command = branch_command(start)
            self._inbox.receive(Command(self._branch_command, CommandKind.UPDATE_CONFIG, branch.config))

    def take_branch_values(self) -> None:
        """Apply the values of a branch, in a loop that is not at its first step boundary yet."""
        if self._branch_command is not None:
            with self._applying:
                self._advance(updates=True)

    def _next(self, updates: bool = True) -> Command | None:
        """Remove and return the next command. The relative values of a branch are resolved now."""
        command, branch = self._inbox.pop(updates), own_branch()
        if command is None or command.id != self._branch_command or branch is None:
            return command
        values = beginning(branch, self._registry, partial(self._value_at_start, branch.known))
        return replace(command, params=values)

    def _value_at_start(self, known: Mapping[str, Any], key: str) -> Any:
        """Return the value of a key that its handler reads; else that of the branch's run, else this process's."""
        read: dict[str, Any] = {}
        self._registry.read_into(read, (key,))
        return read.get(key, known.get(key, self._config.get(key)))

    def _look(self) -> None:
        """Acknowledge commands whose effect the loop has shown, and refuse commands that it has passed over."""
        self._release(self._held)
        effects = self._effects
        if effects.asks:
            effects.shown(*_ENDS)
        if self._phase is Phase.PAUSED:
            effects.shown(*_PAUSES)
        elif not self._paused:
            effects.end(_PAUSES, "the pause ended before the loop waited")
        passed = effects.passed(self._published, 2 if self._in_steps else 1)
        if CommandKind.PAUSE in passed and not self._waits:
            self._paused = False
            effects.end(_PAUSES, _NO_WAIT)
        if passed.intersection(_ENDS):
            self._stop, self._drain_published = self._evicted, None
            effects.end(_ENDS, _NO_LOOK)
        if self._before_polling is not None and not effects.polls_at(self._published):
            self._paused = False  # the loop goes on
        if not self._paused:
            self._stop_polling()
        self._settle()

    @property
    def _waits(self) -> bool:
        """True if the loop waits during a pause, sooner or later."""
        return self._in_steps or self._effects.waits

    def _note_poll(self) -> None:
        """Note that the loop asks whether it is paused, and that it waits if it does so again and again."""
        if self._paused and self._effects and self._effects.polls(self._published):
            self._before_polling = self._phase
            self._enter_phase(Phase.PAUSED)
            self._look()

    def _stop_polling(self) -> None:
        if (before := self._before_polling) is not None:
            self._before_polling = None
            self._enter_phase(before)

    def _settle(self) -> None:
        self._unsettled = bool(self._effects or self._held) or self._before_polling is not None

    def _apply(self, command: Command, by_program: bool = False) -> None:
        """Apply a command.

        Args:
            command: the command.
            by_program: whether the program gets it, and may apply what no function of the threadlet does.
        """
        if command.kind in FAULT_COMMANDS:
            return self._inject(command)
        made = Application(command)
        together = command.kind in _TOGETHER and command.id != self._branch_command
        if together and self._cohort.place is not None and self._sends_to_cohorts:
            made.reason = _TOO_EARLY
            made.verdict = CohortVerdict.MOVED if self._cohort.follows else None
            return self._acknowledge(made)
        self._registry.read_into(self._config, command.params)
        try:
            self._carry_out(made, by_program)
        finally:
            self._acknowledge_when_decided(made)

    @property
    def _sends_to_cohorts(self) -> bool:
        return self._link is not None and self._link.takes_cohorts

    def _carry_out(self, made: Application, by_program: bool) -> None:
        """Do what a command tells; the caller acknowledges it."""
        try:
            match made.command.kind:
                case CommandKind.UPDATE_CONFIG:
                    self._update(made, by_program)
                case CommandKind.PAUSE | CommandKind.RESUME | CommandKind.STOP | CommandKind.DRAIN:
                    self._change_loop(made)
                case CommandKind.DEVICE_FAILED:
                    self._device_failed(made, by_program)
                case CommandKind.DEACTIVATE_DEVICE | CommandKind.REACTIVATE:
                    self._change_device(made, by_program)
                case CommandKind.SAVE | CommandKind.EVALUATE:
                    self._act(made, by_program)
        except BaseException as error:  # It ends the training, which has to acknowledge the command first.
            made.reason = f"the training was interrupted: {describe_error(error)}"
            made.deferred.clear()
            raise

    def _update(self, made: Application, by_program: bool) -> None:
        self._handled = {}
        former = {key: self._registry.former(key) for key in made.command.params}
        for key, value in made.command.params.items():
            if by_program and key not in self._registry:
                made.taken.append(key)
                made.changes[key] = self._changed(key, value)
                continue
            outcome = self._registry.apply(key, value)
            if by_program:
                self._handled[key] = outcome
            if outcome.deferred is not None:
                made.deferred[key] = outcome.value, outcome.deferred
            elif outcome.refused is None:
                made.changes[key] = self._changed(key, outcome.value, former[key])
                if outcome.undo is not None:
                    made.undo[key] = outcome.undo
            else:
                made.refused[key] = outcome.refused

    def _change_loop(self, made: Application) -> None:
        """Let the loop wait, go on, stop or leave; it shows later whether it does."""
        kind = made.command.kind
        if kind is CommandKind.PAUSE:
            if self._evicted:
                made.reason = _EVICTED
                return
            self._paused, self._applies_in = True, threading.get_ident()
        else:
            # A pause is acknowledged before what ends it.
            self._effects.end(_PAUSES, None if self._waits else "it ended before the loop waited")
            self._paused = False
            self._stop_polling()
            made.step = self._whole_step()
        if kind is CommandKind.STOP:
            self._stop = True
        elif kind is CommandKind.DRAIN:
            self._drain_published = self._published
        if kind is not CommandKind.RESUME:
            made.awaited = True
            self._effects.add(made, self._published)

    def _device_failed(self, made: Application, by_program: bool) -> None:
        device, why = str(made.command.params.get("device")), str(made.command.params.get("reason"))
        if self._on_failure:
            made.reason = _call_each(self._on_failure, device, why)
        elif by_program:
            made.taken.append(made.command.kind.value)
        else:
            made.reason = _NOBODY.format(made.command.kind.value, "on_device_failure")

    def _change_device(self, made: Application, by_program: bool) -> None:
        kind, params = made.command.kind, made.command.params
        if not self._on_change:
            if by_program:
                made.taken.append(kind.value)
            else:
                made.reason = _NOBODY.format(kind.value, "on_device_change")
            return
        changed = params["devices"] if "devices" in params else [params.get("device")]
        if "devices" in params:  # of a whole group
            changed = [device for device in changed if device in self._own_devices()]
        usable = kind is CommandKind.REACTIVATE
        raised = [_call_each(self._on_change, str(device), usable) for device in changed]
        made.reason = "; ".join(text for text in raised if text is not None) or None

    def _act(self, made: Application, by_program: bool) -> None:
        """Save or evaluate, by the program's function for it."""
        kind = made.command.kind
        function = self._actions.get(kind)
        if function is None and by_program:
            made.taken.append(kind.value)
            return
        made.reason = self._why_not(kind)
        if function is None or made.reason is not None:
            return
        try:
            with self.spent(_ACTIONS[kind][1]):
                answer = function()
        except Exception as error:  # noqa: BLE001 - the user's own code, which must not end the training
            made.reason = f"the function for {kind} raised {describe_error(error)}"
        else:
            if isinstance(answer, Deferred):
                made.deferred[kind.value] = None, answer

    def _own_devices(self) -> Collection[str]:
        """Return the uuids of the devices of this process."""
        raise NotImplementedError

    def _report_config(self, key: str, value: Any) -> None:
        """Report a value that the program has changed by itself."""
        self._config[key] = value
        self._give((next(self._numbers), now_of_system(), None, None, None, None, {key: value}))

    def _changed(self, key: str, value: Any, back: Mapping[str, Any] | None = None) -> Change:
        old, self._config[key] = self._config.get(key), value
        return Change(plain(old), plain(value), None if back is None else plain(back))

    def _acknowledge_when_decided(self, made: Application) -> None:
        if made.awaited and made.reason is None:
            self._look()
        elif made.command.kind is CommandKind.UPDATE_CONFIG and made.taken:
            self._release(self._held)
            self._held, self._unsettled = made, True
            waiting = threading.Timer(TAKEN_AFTER, self._release, (made,))
            waiting.daemon = True
            waiting.start()
        else:
            self._acknowledge_when_settled(made)

    def _acknowledge_when_settled(self, made: Application) -> None:
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
                if made.command.kind is CommandKind.UPDATE_CONFIG:
                    made.changes[key] = self._changed(key, value)
                made.step = settlement.step if made.step is None else max(made.step, settlement.step)
            else:
                made.refused[key] = f"{key}: {settlement.refused}"
            if not made.deferred:
                del self._deferring[id]
                self._acknowledge(made)

    def _settle_all(self, failed: bool) -> None:
        """Settle the commands that are neither acknowledged nor refused, because the training has ended."""
        self._release(self._held)
        if self._effects:
            with self._applying:
                self._effects.end(_PAUSES, "the training ended before it waited")
                self._effects.end(_ENDS, "the training failed before it looked at this" if failed else None)
        for made in list(self._deferring.values()):
            for _, change in list(made.deferred.values()):
                change.refuse("the training ended before it was applied")

    def _acknowledge(self, made: Application) -> None:
        reason = made.reason or "; ".join(made.refused.values()) or None
        step = self._whole_step() if made.step is None else made.step
        if made.command.id == self._branch_command and (branch := own_branch()) is not None:
            step = branch.step if step is None else step
            if reason is not None:
                _log.error("the branch of %s begins without a value: %s", branch.run, reason)
        acknowledgement = Acknowledgement(
            reason is None,
            step,
            made.changes,
            made.refused,
            reason,
            evidence=plain(made.evidence),
            taken=tuple(made.taken),
        )
        if made.command.kind is CommandKind.UPDATE_CONFIG and made.changes:
            values = {key: made.command.params[key] for key in made.changes if key in self._registry}
            self._cohort.note(values, {key: made.undo.get(key, made.changes[key].old) for key in values})
        acknowledged = Acknowledged(made.command.id, acknowledgement, made.verdict)
        self._inbox.finish(acknowledged)
        self._send(acknowledged)

    def _inject_at_once(self, command: Command) -> bool:
        """Start a fault that does not wait for a step boundary; return False if it has to wait for one."""
        assert self._injections is not None
        if not self._injections.at_once(command):
            return False
        # The link's thread calls this, and must not wait for a fault's effect on the host: use another thread.
        threading.Thread(target=self._inject, args=(command,), name="loom-chaos", daemon=True).start()
        return True

    def _inject(self, command: Command) -> None:
        if self._injections is None:
            reason = f"{self.replica_id} is not injectable: make its threadlet injectable=True"
            return self._acknowledge(Application(command, reason))
        try:
            evidence, strike = self._injections.inject(command)
        except Exception as error:  # noqa: BLE001 - reported in the acknowledgement
            return self._acknowledge(Application(command, describe_error(error)))
        # Acknowledge before the fault strikes: the process may not survive it.
        self._acknowledge(Application(command, evidence=evidence))
        if strike is not None:
            if self._link is not None:
                self._link.flush(FLUSH_TIMEOUT)
            if (over := strike.strike()) is not None:
                self._report_removed(command.id, over)

    def _report_removed(self, injection: str, evidence: Mapping[str, object]) -> None:
        self._send(FaultRemoved(injection, plain(evidence)))


def _undone(key: str, undo: Callable[[], object]) -> str | None:
    """Bring back what held before a key was set; return why it cannot be, or None."""
    try:
        undo()
    except Exception as error:  # noqa: BLE001 - such as of an optimizer that is gone
        return f"{key}: {describe_error(error)}"
    return None


def _call_each(functions: list[Callable[..., Any]], *arguments: Any) -> str | None:
    """Call every function, even after one has raised; return the texts of the errors, or None."""
    raised = []
    for function in functions:
        try:
            function(*arguments)
        except Exception as error:  # noqa: BLE001 - the user's own code, which must not end the training
            raised.append(f"{getattr(function, '__name__', function)} raised {describe_error(error)}")
    return "; ".join(raised) or None
