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

import itertools
import logging
import os
import socket
import sys
import threading
import time
import types
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from queue import SimpleQueue
from typing import Any, TypeVar

from loom.control.address import ADDRESS_VARIABLE, parse_weaver_address
from loom.control.commands import CommandKind
from loom.control.frame import MAX_NAME
from loom.control.framing import MAX_HELLO, pack
from loom.control.introduction import Activity, Bye, Ending, Handlers, ThreadletHello
from loom.control.reports import MAX_KEPT_REPORTS, DeviceReport, Phase
from loom.control.time_account import TimeAccount
from loom.devices import LocalDevice, device_status, local_devices
from loom.errors import WrongArguments
from loom.threadlet import process_exit
from loom.threadlet.applying import CommandApplier
from loom.threadlet.inbox import CommandInbox
from loom.threadlet.link import ROWS, WeaverLink, now_of_system
from loom.threadlet.reports import AnyGiven, RowMaker, plain
from loom.threadlet.spent import SpentBlock, SpentTime
from loom.threadlet.step import Step

__all__ = ["Step", "Threadlet"]

_log = logging.getLogger("loom")

F = TypeVar("F", bound=Callable[..., Any])

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

MAX_CONFIG = 10_000
"""Keys of the configuration that the weaver is told of when it is found, at most."""


class Threadlet(CommandApplier):
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
        super().__init__(
            dict(config or {}), os.environ.get("LOOM_INJECTABLE") == "1" if injectable is None else injectable
        )
        self._numbers = itertools.count()
        self._given: deque[AnyGiven] = deque(maxlen=MAX_KEPT_REPORTS if address else 0)
        self._wakes: SimpleQueue[None] = SimpleQueue()
        """Wakes the thread that makes rows. No lock is held meanwhile, so that signal handlers may publish too."""
        self._asleep = False
        """Whether that thread waits to be woken."""
        self._rows = RowMaker()
        self._spent = SpentTime()

        self._phase = Phase.BETWEEN
        self._in_steps = False
        """Whether the loop uses `step`, which knows better than `publish_status` when a step begins and ends."""

        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        if address is None:
            _log.info("no weaver (%s is not set): the status of %s is not sent", ADDRESS_VARIABLE, self.replica_id)
        else:
            self._link = WeaverLink(
                address, self._inbox, self._kept, self._introduction, self._heartbeat, self._account
            )
            self._begin(self._link)

    def _begin(self, link: WeaverLink) -> None:
        process_exit.opened(self)
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

    # -- the background -------------------------------------------------------------------------------------

    def _introduction(self, key: str) -> ThreadletHello:
        activity = Activity.PAUSED if self._paused else Activity.RUNNING
        return ThreadletHello(
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
        process_exit.closed(self)
        if self._link is None:
            return
        deadline = time.monotonic() + CLOSE_TIMEOUT
        self._threads[0].join(CLOSE_TIMEOUT / 2)
        self._link.close(self._goodbye(error), max(0.0, deadline - time.monotonic()))

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

    def __enter__(self) -> Threadlet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self.close(error)

    def abandon(self) -> None:
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


def _own_devices() -> list[LocalDevice]:
    devices = local_devices()
    rank = _number_in("LOCAL_RANK")
    if rank is not None and len(devices) > 1 and rank < len(devices):
        return [devices[rank]]
    return devices


def _number_in(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else None
