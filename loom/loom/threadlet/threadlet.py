"""`Threadlet`: three lines in a training script, and it can be watched and changed while it runs.

::

    t = loom.Threadlet("train_0")

    @t.handler("learning_rate")
    def set_learning_rate(value: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = value

    for n in range(steps):
        with t.step(n, max_step=steps) as step:
            step.metrics["loss"] = train_on(batch)
        if t.should_stop:
            break

Nothing that the training thread calls waits for the network, for a GPU or for a lock that somebody else holds for
long, except `Threadlet.wait_while_paused`, whose purpose it is. What goes wrong on the way to the weaver is
logged, under the name ``loom``, and never raised.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import multiprocessing
import os
import socket
import sys
import threading
import time
import types
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.util import Finalize
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from loom.control.address import ADDRESS_VARIABLE, parse_weaver_address
from loom.control.commands import Acknowledged, Acknowledgement, Change, Command, CommandKind, FaultRemoved
from loom.control.frame import MAX_COUNT, MAX_NAME
from loom.control.framing import MAX_HELLO, pack
from loom.control.introduction import Activity, Bye, Ending, Handlers, Hello
from loom.control.reports import MAX_KEPT_REPORTS, DeviceReport, Phase
from loom.control.time_account import TimeAccount
from loom.devices import LocalDevice, device_status, local_devices
from loom.errors import WrongArguments
from loom.threadlet.deferred import Deferred, Verdict
from loom.threadlet.handlers import HandlerRegistry
from loom.threadlet.inbox import CommandInbox
from loom.threadlet.link import ROWS, WeaverLink, now_of_system
from loom.threadlet.reports import AnyGiven, KeptReports, RowMaker, plain
from loom.threadlet.spent import SpentBlock, SpentTime

if TYPE_CHECKING:
    from loom.threadlet.injections import Injections

__all__ = ["Step", "Threadlet"]

_log = logging.getLogger("loom")

F = TypeVar("F", bound=Callable[..., Any])

_STEP, _BETWEEN = Phase.STEP, Phase.BETWEEN  # a name less to look up in each step

REPORT_INTERVAL = 0.5
"""Seconds from one look at what the training loop has published to the next, at least.

Each interrupts the training for about half a millisecond, most of it spent on handing the interpreter to and fro;
where processes exchange gradients, all wait for the one that is interrupted. A report after a longer silence is
looked at at once.
"""

DEVICES_INTERVAL, CONNECTED_INTERVAL = 5.0, 0.2
"""Seconds between two looks at the devices; the second between two whether there is anybody to tell of them."""

CLOSE_TIMEOUT = 2.0
"""Seconds that the end of the process waits at most for the last reports to be stored."""

FLUSH_TIMEOUT = 0.5
"""Seconds that a fault which ends the process waits at most for its acknowledgement to leave."""

MAX_CONFIG = 10_000
"""Keys of the configuration that the weaver is told of when it is found, at most."""


class Threadlet:
    """A training process, as the weaver sees it.

    Any thread may call any method. A forked child does not use its parent's threadlet: there, what is published
    goes nowhere and no command comes; a child that trains makes its own.

    Args:
        replica_id: name of the replica; ``LOOM_REPLICA`` where none is given, or else host and process id.
        group: name of the replicas that belong together; ``LOOM_GROUP`` where none is given.
        weaver: ``tcp://HOST:PORT/KEY``; ``LOOM_WEAVER`` where none is given. Without either everything works and
            nothing is sent.
        devices: what this process trains on. None: the GPU that ``LOCAL_RANK`` numbers, as scripts for ``torchrun``
            use it, or else all those of `loom.devices.local_devices`.
        config: values of the configuration that are known from the beginning.
        injectable: whether failures may be injected into this process, and its host, on purpose (`loom.chaos`);
            where it is None, whether ``LOOM_INJECTABLE`` is 1.

    Raises:
        InvalidAddress: the weaver's address has another form.
        WrongArguments: the replica's or the group's name is too long, or does not print.
    """

    def __init__(
        self,
        replica_id: str | None = None,
        *,
        group: str | None = None,
        weaver: str | None = None,
        devices: Iterable[LocalDevice] | None = None,
        config: Mapping[str, Any] | None = None,
        injectable: bool | None = None,
    ) -> None:
        text = os.environ.get(ADDRESS_VARIABLE, "") if weaver is None else weaver
        address = parse_weaver_address(text) if text else None
        # An empty name is none.
        self.replica_id = replica_id or os.environ.get("LOOM_REPLICA") or f"{socket.gethostname()}-{os.getpid()}"
        self.group = group if group is not None else os.environ.get("LOOM_GROUP", "")
        for name in (self.replica_id, self.group):
            if not name.isprintable() or len(name) > MAX_NAME:
                raise WrongArguments(
                    f"a replica or group is named by 200 printable characters at most, not {name!r:.80}"
                )
        self.instance = uuid.uuid4().hex
        """Tells this process from those that had the replica's name before."""
        self.devices = list(_own_devices() if devices is None else devices)
        self._config: dict[str, Any] = dict(config or {})
        self._registry = HandlerRegistry()
        self._on_failure: list[Callable[[str, str], Any]] = []
        self._on_change: list[Callable[[str, bool], Any]] = []
        self.injectable = os.environ.get("LOOM_INJECTABLE") == "1" if injectable is None else injectable
        """Whether failures may be injected into this process."""
        self._hooks: dict[str, Callable[[dict[str, Any]], Any]] = {}

        self._numbers = itertools.count()
        self._published = -1
        self._given: deque[AnyGiven] = deque(maxlen=MAX_KEPT_REPORTS if address else 0)
        self._wakes: SimpleQueue[None] = SimpleQueue()
        """Wakes the thread that makes rows. No lock is held meanwhile, so that signal handlers may publish too."""
        self._asleep = False
        """Whether that thread waits to be woken."""
        self._rows = RowMaker()
        self._kept = KeptReports()
        self._inbox = CommandInbox()
        self._pending = self._inbox.pending
        self._injections: Injections | None = None
        self._each_step: list[Callable[[], None]] = []
        """What faults do in each step; the list of `_injections`."""
        if self.injectable:
            self._begin_injections()
        self._spent = SpentTime()

        self._applying = threading.RLock()
        self._step: Any = None
        self._phase = Phase.BETWEEN
        self._in_steps = False
        """Whether the loop uses `step`, which knows better than `publish_status` when a step begins and ends."""
        self._paused = False
        self._stop = False
        self._drain_published: int | None = None
        """What `_published` was when a drain applied; None if none has."""
        self._deferring: dict[str, _DeferredUpdate] = {}
        """Updates that handlers accepted and have not applied, by the command's id; guarded by `_applying`."""

        self._ended = threading.Event()
        self._link: WeaverLink | None = None
        self._threads: list[threading.Thread] = []
        if address is None:
            _log.info("no weaver (%s is not set): the status of %s is not sent", ADDRESS_VARIABLE, self.replica_id)
        else:
            self._link = WeaverLink(
                address, self._inbox, self._kept, self._introduction, self._heartbeat, self._account
            )
            self._begin(self._link)

    def _begin_injections(self) -> None:
        from loom.threadlet.injections import Injections  # which takes longer than all else here

        self._injections = Injections(self._tell_removed)
        self._injections.hooks = self._hooks
        self._each_step = self._injections.each_step
        self._inbox.at_once = self._inject_at_once

    def _begin(self, link: WeaverLink) -> None:
        _open.add(self)
        if multiprocessing.parent_process() is not None:
            # Such a child ends without the functions of `atexit`, but with these.
            Finalize(self, self._end_of_process, exitpriority=10)
        for target, name in ((self._convert, "loom-reports"), (self._watch_devices, "loom-devices")):
            self._threads.append(threading.Thread(target=target, name=name, daemon=True))
        link.start()
        for thread in self._threads:
            thread.start()

    # -- what the training loop says ------------------------------------------------------------------------

    def publish_status(
        self,
        step: int | None = None,
        epoch: int | None = None,
        max_step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Tell how far the training is. Returns at once, whatever the weaver does.

        Args:
            step: the step that has been made.
            epoch: the epoch it belongs to.
            max_step: how many there will be.
            metrics: numbers, also of torch and numpy: they are converted in the background, which waits for the
                device they are on. A tensor that the loop changes in place may be read after the change.
            config: values of the configuration, as they are now.
        """
        if step is not None:
            self._step = step
            if self._phase is Phase.BETWEEN and not self._in_steps:
                self._phase = Phase.STEP
        if config is not None:
            config = dict(config)
            self._config.update(config)
        if metrics is not None:
            metrics = {**metrics}
        self._published = number = next(self._numbers)
        self._given.append((number, now_of_system(), step, epoch, max_step, metrics, config))
        if self._asleep:
            self._asleep = False
            self._wakes.put(None)

    def step(
        self,
        number: int,
        *,
        epoch: int | None = None,
        max_step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Step:
        """A ``with`` block around one step: everything in one line.

        Before the step and after it, what was commanded meanwhile is applied, and a pause waited for. After it,
        unless it raised, its status is published, with the metrics that it put into `Step.metrics`.

        Args:
            number: of the step.
            epoch, max_step, metrics, config: as for `publish_status`.
        """
        return Step(self, number, {**metrics} if metrics else {}, (epoch, max_step, config))

    def spent(self, reason: str, beyond: float = 0.0) -> SpentBlock:
        """A ``with`` block around what is no step: its time is told to the weaver by this reason.

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

    @property
    def dropped(self) -> int:
        """Status reports that were dropped, the oldest first, because the weaver did not take them."""
        return self._kept.dropped + self._rows.missed

    @property
    def connected(self) -> bool:
        """Whether the weaver can be talked to now."""
        return self._link is not None and self._link.connected

    # -- what the training loop is told ---------------------------------------------------------------------

    def handler(self, key: str) -> Callable[[F], F]:
        """Have the decorated function called with each new value of a key, in `check_and_apply_updates`.

        The value is converted to the type its parameter is annotated with: int, float, bool, str, an Enum (by name
        or value), a Literal, Optional, or a list of these. One that is not of the type is refused, as is one
        for which the function raises; whoever sent it is told why.

        A function that cannot apply the value yet returns a `Deferred`: the acknowledgement waits for its verdict.

        Raises:
            WrongArguments: the function takes no single argument, or is annotated with another type.
        """
        names = sys._getframe(1).f_locals

        def register(function: F) -> F:
            self._registry.register(key, function, names)
            if self._link is not None:
                self._link.send(Handlers(self._registry.types()))
            return function

        return register

    def on_device_failure(self, function: Callable[[str, str], Any]) -> Callable[[str, str], Any]:
        """Decorator: call the function with a device's uuid and the reason, when one that it uses has failed."""
        self._on_failure.append(function)
        return function

    def on_device_change(self, function: Callable[[str, bool], Any]) -> Callable[[str, bool], Any]:
        """Decorator: call the function with a device's uuid, and whether it is to be used, when that is changed."""
        self._on_change.append(function)
        return function

    def on_fault(self, kind: str) -> Callable[[F], F]:
        """Have the decorated function carry out injected faults of a kind of `loom.chaos` that is one of training.

        For those that depend on the training: what a process group is, and how a loss becomes NaN. It is called at
        a step boundary with the fault's parameters, and may return a function that removes the fault.
        """

        def register(function: F) -> F:
            self._hooks[kind] = function
            return function

        return register

    def check_and_apply_updates(self) -> bool:
        """Apply, in order, what was commanded since the last call; call it between two steps.

        Returns:
            whether there was anything.
        """
        if self._each_step and not self._in_steps:
            self._suffer()
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
            if self._drain_published not in (None, self._published):
                self._stop = True
            while (command := self._inbox.take()) is not None:
                if command.kind is CommandKind.UPDATE_CONFIG:
                    changes = {key: self._changed(key, value) for key, value in command.params.items()}
                    self._answer(command, changes=changes)
                    return dict(command.params)
                self._apply(command)
            return None

    def wait_while_paused(self) -> None:
        """Return at once, unless a pause has been commanded: then when it is over. Call it between two steps.

        Meanwhile updates are applied, if there are handlers for any, and stop and drain end the wait.
        """
        if not self._paused and not self._pending:
            return
        arrived = self._inbox.arrived
        with self._applying:
            self._advance(updates=bool(self._registry))
        if not self._paused:
            return
        before, self._phase = self._phase, Phase.PAUSED
        self._tell_phase()
        try:
            with self.spent("waiting"):
                while self._paused and self._inbox.wait(arrived):
                    arrived = self._inbox.arrived
                    with self._applying:
                        self._advance(updates=bool(self._registry))
        finally:
            self._phase = before
            self._tell_phase()

    def _attend(self) -> None:
        self.check_and_apply_updates()
        self.wait_while_paused()

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

    # -- applying -------------------------------------------------------------------------------------------

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

    def _decided(self, id: str, key: str, verdict: Verdict) -> None:
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

    # -- the background -------------------------------------------------------------------------------------

    def _introduction(self, key: str) -> Hello:
        activity = Activity.PAUSED if self._paused else Activity.RUNNING
        return Hello(
            key=key,
            replica=self.replica_id,
            instance=self.instance,
            group=self.group,
            pid=os.getpid(),
            host=socket.gethostname(),
            procs=os.environ.get("LOOM_PROCS"),
            rank=_number_in("LOOM_RANK") if "LOOM_RANK" in os.environ else _number_in("RANK"),
            actors=os.environ.get("LOOM_ACTORS"),
            session=os.environ.get("LOOM_SESSION"),
            devices=tuple(self.devices),
            handlers=self._registry.types(),
            config=self._plain_config(),
            state=Activity.DRAINING if self.draining else activity,
            step=self._whole_step(),
            injectable=self.injectable,
            removed={} if self._injections is None else plain(dict(self._injections.removed)),
            applied=tuple(self._inbox.applied()),
        )

    def _plain_config(self) -> dict[str, Any]:
        config: dict[str, Any] = plain(dict(self._config))
        if len(config) > MAX_CONFIG or len(pack(["config", config])) > MAX_HELLO // 2:
            _log.warning("the configuration is too large to be told: the weaver sees what changes of it")
            return {}
        return config

    def _heartbeat(self) -> tuple[int | None, Phase]:
        return self._whole_step(), self._phase

    def _account(self) -> TimeAccount:
        in_step = self._in_steps and self._phase is Phase.STEP
        return self._spent.account(in_step, self._in_steps, self._whole_step())

    def _tell_phase(self) -> None:
        if self._link is not None:
            self._link.beat_now()

    def _convert(self) -> None:
        """Make rows of what is published. A thread of its own: it waits for GPUs."""
        warned = False
        make = self._rows.make
        while True:
            self._await_reports()
            ending = self._ended.is_set()
            if given := self._given:
                while given:
                    self._kept.add([make(given.popleft()) for _ in range(min(len(given), ROWS))])
                if self._link is not None:
                    self._link.wake()
            if self.dropped and not warned:
                warned = True
                _log.warning("status reports are dropped, the oldest first: the weaver does not take them")
            if ending:
                return
            self._ended.wait(REPORT_INTERVAL)

    def _await_reports(self) -> None:
        # The training thread looks at `_asleep` after it has given a report, this one at the reports after it has
        # said that it is asleep: one of the two sees what the other did.
        self._asleep = True
        if not self._given and not self._ended.is_set():
            self._wakes.get()
        self._asleep = False

    def _watch_devices(self) -> None:
        """Report the devices. A thread of its own: NVML may hang when a GPU is broken."""
        failed = False
        broken: dict[str, str | None] = {}
        pause = 0.0
        while not self._ended.wait(pause):
            link = self._link
            if link is None or not link.connected:
                pause = CONNECTED_INTERVAL
                continue
            pause = DEVICES_INTERVAL
            try:
                status = device_status(self.devices)
            except Exception:  # noqa: BLE001 - logged, and tried again
                if not failed:
                    failed = True
                    _log.exception("the devices cannot be looked at")
                continue
            for name, use in status.items():
                if use.error is not None and use.error != broken.get(name):
                    _log.warning("the device %s does not answer: %s", name, use.error)
                broken[name] = use.error
            link.send_if_idle(DeviceReport(now_of_system(), {name: use.as_dict() for name, use in status.items()}))

    # -- the end --------------------------------------------------------------------------------------------

    def close(self, error: BaseException | None = None) -> None:
        """Say goodbye to the weaver. Harmless when it has been done.

        Takes at most about two seconds, when the weaver is there but does not store the last reports.

        Args:
            error: what the training ended of; None if it came to its end.
        """
        if self._ended.is_set():
            return
        self._refuse_deferred()
        self._ended.set()
        self._wakes.put(None)
        self._inbox.close()
        _open.discard(self)
        if self._link is None:
            return
        deadline = time.monotonic() + CLOSE_TIMEOUT
        self._threads[0].join(CLOSE_TIMEOUT / 2)
        self._link.close(self._goodbye(error), max(0.0, deadline - time.monotonic()))

    def _refuse_deferred(self) -> None:
        for update in list(self._deferring.values()):
            for _, change in list(update.deferred.values()):
                change.refuse("the training ended before it was applied")

    def _goodbye(self, error: BaseException | None) -> Bye:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            error = None
        if error is not None:
            if isinstance(error, SystemExit):
                return Bye(f"exit code {error.code}", Ending.FAILED)
            return Bye(f"{type(error).__name__}: {error}"[:2000], Ending.FAILED)
        if self._stop:
            return Bye("it was told to stop", Ending.STOPPED)
        return Bye("it came to its end", Ending.FINISHED)

    def _end_of_process(self) -> None:
        self.close(_fatal_error())

    def __enter__(self) -> Threadlet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self.close(error)

    def _abandon(self) -> None:
        """In a forked child: become one that has no weaver."""
        link, self._link = self._link, None
        self._ended = threading.Event()
        self._ended.set()
        self._applying = threading.RLock()
        self._given = deque(maxlen=0)
        self._inbox = CommandInbox()
        self._inbox.close()
        self._pending = self._inbox.pending
        self._paused = False
        self._deferring = {}
        if link is not None:
            link.abandon()


@dataclass
class _DeferredUpdate:
    """An update of the configuration of which some values are not decided yet."""

    command: Command
    changes: dict[str, Change]
    refused: dict[str, str]
    deferred: dict[str, tuple[Any, Deferred]]
    steps: list[int] = field(default_factory=list)
    """The steps that the deferred values which were applied hold from."""


class Step:
    """One step of a training loop; made by `Threadlet.step`."""

    # What runs for every step is short, in the number of functions too: behind a step of training, none of it is in
    # the processor's cache any more.

    __slots__ = ("_rest", "_threadlet", "metrics", "number")

    def __init__(
        self,
        threadlet: Threadlet,
        number: int,
        metrics: dict[str, Any],
        rest: tuple[int | None, int | None, Mapping[str, Any] | None],
    ) -> None:
        self._threadlet = threadlet
        self.number = number
        self.metrics = metrics
        """What is published with the step; the block fills it."""
        self._rest = rest

    def __enter__(self) -> Step:
        threadlet = self._threadlet
        threadlet._in_steps = True
        threadlet._step = self.number
        if threadlet._pending or threadlet._paused or threadlet._drain_published is not None:
            threadlet._attend()
        threadlet._phase = _STEP
        threadlet._spent.began = monotonic()
        if threadlet._each_step:
            threadlet._suffer()
        return self

    def discard(self) -> None:
        """Say that what the step has done so far did not count and is done again: its time is lost."""
        self._threadlet._spent.discard()

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        threadlet = self._threadlet
        spent = threadlet._spent
        took = monotonic() - spent.began
        threadlet._phase = _BETWEEN
        number = self.number
        if kind is None and type(number) is int and number > spent.highest:
            spent.highest = number
            spent.compute += took
        else:
            spent.odd_step(number, took, kind is None)
        if kind is None:
            threadlet._step = number  # the block may have changed it
            epoch, max_step, config = self._rest
            if config is not None:
                config = dict(config)
                threadlet._config.update(config)
            metrics = None if self.metrics is None else {**self.metrics}
            # As `publish_status`, one function less.
            threadlet._published = published = next(threadlet._numbers)
            threadlet._given.append((published, now_of_system(), number, epoch, max_step, metrics, config))
            if threadlet._asleep:
                threadlet._asleep = False
                threadlet._wakes.put(None)
            if threadlet._pending or threadlet._paused or threadlet._drain_published is not None:
                threadlet._attend()


def _call_each(functions: list[Callable[..., Any]], *arguments: Any) -> str | None:
    """Call all, also behind one that raises; return what they raised, or None."""
    raised = []
    for function in functions:
        try:
            function(*arguments)
        except Exception as error:  # noqa: BLE001 - the user's own code, which must not end the training
            raised.append(f"{getattr(function, '__name__', function)} raised {type(error).__name__}: {error}")
    return "; ".join(raised) or None


def _own_devices() -> list[LocalDevice]:
    devices = local_devices()
    rank = _number_in("LOCAL_RANK")
    if rank is not None and len(devices) > 1 and rank < len(devices):
        return [devices[rank]]
    return devices


def _number_in(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else None


# -- the process --------------------------------------------------------------------------------------------

_open: set[Threadlet] = set()
"""Those of this process that have a link and are not closed."""


def _fatal_error() -> BaseException | None:
    """What the interpreter ends of, as far as it can be known here: not the code of a `sys.exit`."""
    if (error := sys.exc_info()[1]) is not None:
        return error
    # At a prompt, this is any earlier mistake.
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)


def _close_all() -> None:
    for threadlet in list(_open):
        threadlet._end_of_process()


def _abandon_all() -> None:
    for threadlet in list(_open):
        threadlet._abandon()
    _open.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_abandon_all)
