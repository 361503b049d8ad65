"""`Threadlet`: makes a training script visible to the weaver, and changeable while it runs, with three lines.

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

No method that the training thread calls waits for the network, for a GPU or for a lock that another thread holds
for long. The exceptions are `Threadlet.wait_while_paused`, which exists to wait, and a step boundary while a
command to all ranks of the job is under way: it waits for the other ranks, for a bounded time, as in
`loom.threadlet.cohort`. Problems on the way to the weaver are logged, under the name ``loom``, and never raised.
"""

from __future__ import annotations

import atexit
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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from multiprocessing.util import Finalize
from queue import SimpleQueue
from typing import Any, TypeVar

from loom.branches.branch import own_branch
from loom.control.address import ADDRESS_VARIABLE, parse_weaver_address, was_spawned, weaver_address
from loom.control.commands import CommandKind
from loom.control.frame import MAX_HELLO, MAX_NAME, pack
from loom.control.handshake import MAX_DEVICES, Activity, Bye, Handlers, Leaving, ThreadletHello, TrainingEnding
from loom.control.reports import PeerFailure, PeerFailures, Phase, Registration, TimeAccount
from loom.control.run_start import PARENT_VARIABLE, RunParent, own_place, read_start
from loom.devices import LocalDevice, own_devices
from loom.errors import Conflict, WrongArguments, describe_error
from loom.process.threads import keep_going
from loom.threadlet import evictions
from loom.threadlet.cohort_member import CohortMember
from loom.threadlet.command_applier import CommandApplier
from loom.threadlet.inbox import AwaitedEffects, CommandInbox
from loom.threadlet.link import WeaverLink
from loom.threadlet.reporting import watch_devices
from loom.threadlet.start_facts import own_start, tell
from loom.threadlet.status_rows import plain
from loom.threadlet.step import Step
from loom.wire.plain import plain as as_sent

MAX_HEARD = 10_000  # failed processes that a threadlet remembers, to drop repetitions


class PeerWatch:
    """Calls functions with each failure of a peer, once, on a thread of its own.

    It does not wait for a step boundary, which a training that waits for the dead peer in a collective never
    reaches. Any thread may call the methods.
    """

    def __init__(self) -> None:
        self._functions: list[Callable[[str, str], Any]] = []
        self._heard: dict[str, None] = {}  # the instances of failed processes, the oldest first
        self._failures: SimpleQueue[PeerFailure | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, function: Callable[[str, str], Any]) -> None:
        """Call a function with each later failure: the peer's replica id, and the reason."""
        self._functions = [*self._functions, function]

    def receive(self, frame: PeerFailures) -> None:
        """Take failures from the weaver, on the link's thread, which must not wait for a function."""
        if not self._functions:
            return
        for failure in frame.failures:
            if failure.instance not in self._heard:
                self._heard[failure.instance] = None
                self._failures.put(failure)
        while len(self._heard) > MAX_HEARD:
            del self._heard[next(iter(self._heard))]
        if self._thread is None:
            self._thread = threading.Thread(target=self._call, name="loom-peers", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._failures.put(None)

    def _call(self) -> None:
        while (failure := self._failures.get()) is not None:
            for function in self._functions:
                try:
                    function(failure.replica, failure.reason)
                except BaseException:  # noqa: BLE001 - the user's own code, such as sys.exit(), must not end the thread
                    _log.exception("a function for the failure of %s raised", failure.replica)


_log = logging.getLogger("loom")

F = TypeVar("F", bound=Callable[..., Any])

CLAIM_TIMEOUT = 10.0  # seconds; a weaver takes 3 to find a process dead, and attempts are up to 4 apart
CLOSE_TIMEOUT = 2.0  # seconds that the end of the process waits for the last reports to be stored
MAX_CONFIG = 10_000  # keys of the configuration that a hello may have


class Threadlet(CommandApplier):
    """A training process, as the weaver sees it.

    Any thread may call any method. A forked child does not use its parent's threadlet: in the child it publishes
    nothing and gets no commands. A child that trains makes its own.

    Args:
        replica_id: name of the replica; the default is ``LOOM_REPLICA``, or else host and process id.
        group: name of the replicas that belong together; the default is ``LOOM_GROUP``.
        weaver: ``tcp://HOST:PORT/KEY``; the default is ``LOOM_WEAVER``, or what a session gave to a process that it
            spawned. Without either everything works and nothing is sent.
        devices: the devices that this process trains on; None: `loom.devices.own_devices`, which is the GPU that
            ``LOCAL_RANK`` numbers.
        config: values of the configuration that are known from the beginning.
        injectable: whether failures may be injected into this process, and its host, on purpose (`loom.chaos`);
            None: whether ``LOOM_INJECTABLE`` is 1.
        respawns: whether something starts another process in this one's place when it dies, so that the time until
            then counts as respawn; None: whether ``LOOM_RESPAWNS`` is 1.
        find_weaver: returns the weaver's address; called if no other is given, and when nobody has answered there
            for a while. It may take its time, and raises if it finds none.
        cohort: whether a process of torch.distributed's default process group takes commands with all of its ranks,
            at one step. False: it takes them by itself, for a program that agrees with its other ranks by its own
            means.
        run: id of the start of a training, which all of its processes share, also those that take the place of dead
            ones: they are one run. The default is ``LOOM_RUN_ID``, or the step of Slurm that the process is of.
        parent: the run that this one continues; the default is ``LOOM_RUN_PARENT``.

    Raises:
        InvalidAddress: the weaver's address has another form.
        WrongArguments: the replica's or the group's name is too long, or not printable.
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
        respawns: bool | None = None,
        find_weaver: Callable[[], str] | None = None,
        cohort: bool = True,
        run: str | None = None,
        parent: RunParent | None = None,
    ) -> None:
        text = weaver_address() if weaver is None else weaver
        address = parse_weaver_address(text) if text else None
        # An empty name counts as no name.
        self.replica_id = (
            _name("replica_id", replica_id)
            or _name("LOOM_REPLICA", os.environ.get("LOOM_REPLICA"))
            or f"{socket.gethostname()}-{os.getpid()}"
        )
        self.group = _name("group", os.environ.get("LOOM_GROUP") if group is None else group)
        self._parent = parent or RunParent.read(os.environ.get(PARENT_VARIABLE, ""))
        self._start = own_start() if run is None else read_start(as_sent(run, "run"))
        self.instance = uuid.uuid4().hex
        """Id of this process, to tell it from earlier processes with the replica's name."""
        self.devices = list(own_devices() if devices is None else devices)
        """The devices of this process; `add_device` and `remove_device` change them."""
        self._changing_devices = threading.Lock()
        if injectable is None:
            injectable = os.environ.get("LOOM_INJECTABLE") == "1"
        self._made_by = None if _maker is None else _maker()
        self._place = own_place()
        self._respawns = os.environ.get("LOOM_RESPAWNS") == "1" if respawns is None else respawns
        nowhere = address is None and find_weaver is None
        super().__init__({**_of_process, **(config or {})}, not nowhere, injectable)
        self.begin_branch(self._start)
        self._peers = PeerWatch()
        evictions.add(self)
        if nowhere:
            _log.info("no weaver (%s is not set): the status of %s is not sent", ADDRESS_VARIABLE, self.replica_id)
        else:
            self._link = WeaverLink(
                address,
                find_weaver,
                self._inbox,
                self._kept,
                self._introduction,
                self._heartbeat,
                self._account,
                self._peers.receive,
                self._cohort if cohort else None,
                self.offers,
                self._tell_start,
            )
            self._begin(self._link)

    def _begin(self, link: WeaverLink) -> None:
        _open.add(self)
        if multiprocessing.parent_process() is not None:
            # A child of multiprocessing runs these finalizers at its end, but not the functions of `atexit`.
            Finalize(self, _close, (self,), exitpriority=10)
        # Daemon threads do not keep a process from ending; `close` waits for the reports.
        self._reports = threading.Thread(
            target=keep_going,
            args=("report the status", partial(self._make_rows, link)),
            name="loom-reports",
            daemon=True,
        )
        watch = partial(watch_devices, lambda: self.devices, link, self._ended)
        devices = threading.Thread(
            target=keep_going, args=("watch the devices", watch), name="loom-devices", daemon=True
        )
        for thread in (link, self._reports, devices):
            thread.start()

    @property
    def registered(self) -> bool:
        """True once the weaver has registered this process."""
        return self._link is not None and self._link.welcomed.is_set()

    @property
    def device_failure_functions(self) -> Sequence[Callable[[str, str], Any]]:
        """The functions of `on_device_failure`."""
        return self._on_failure

    def claim(self, timeout: float = CLAIM_TIMEOUT) -> bool:
        """Wait until the weaver has registered this process; return whether it has. It tries again afterwards, too.

        For a program that must not run twice at once: another one may have the replica's name, whose process would
        get the commands that are meant for this one. Without a weaver, nothing is waited for.

        Args:
            timeout: seconds. In fewer than 10, a process that is dead may not yet count as such.

        Raises:
            ReplicaTaken: another process is the replica, and lives.
        """
        if (link := self._link) is None or link.welcomed.wait(timeout):
            return link is not None
        if link.taken:
            raise Conflict(link.taken, code="replica_taken")
        return False

    def step(
        self,
        number: int,
        *,
        epoch: int | None = None,
        max_step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Step:
        """Return a ``with`` block around one step, which does everything in one line.

        Before and after the step, the commands that came meanwhile are applied, and a pause is waited for. After
        the step, unless it raised, its status is published, with the metrics in `Step.metrics`.

        Args:
            number: of the step.
            epoch, max_step, metrics, config: as for `publish_status`.
        """
        return Step(self, number, {**metrics} if metrics else {}, (epoch, max_step, config))

    def handler(self, key: str) -> Callable[[F], F]:
        """Register the decorated function for each new value of a key, which is called at a step boundary.

        The value is converted to the type its parameter is annotated with: int, float, bool, str, an Enum (by name
        or value), a Literal, Optional, or a list of these. A value that cannot be converted is refused, and so is
        one for which the function raises; the sender gets the reason.

        A function that cannot apply the value yet returns a `Deferred`: the acknowledgement waits for its verdict.

        Raises:
            WrongArguments: the function does not take a single argument, or is annotated with another type.
        """
        names = sys._getframe(1).f_locals

        def register(function: F) -> F:
            self._registry.register(key, function, names)
            self._send(Handlers(self._registry.types()))
            return function

        return register

    def on_device_failure(self, function: Callable[[str, str], Any]) -> Callable[[str, str], Any]:
        """Register the decorated function, which gets the uuid of each device that fails, and the reason."""
        self._on_failure.append(function)
        return function

    def on_device_change(self, function: Callable[[str, bool], Any]) -> Callable[[str, bool], Any]:
        """Register the decorated function, which gets a device's uuid, and whether it may be used from now on."""
        self._on_change.append(function)
        return function

    def on_save(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Register the decorated function, which saves a checkpoint at a step boundary when a user asks for it.

        The command is acknowledged when the function has returned: what it saves must be saved by then. A function
        that cannot save yet returns a `Deferred`. Its error refuses the command, and does not end the training. A
        later function takes the place of an earlier one.
        """
        self.offer_action(CommandKind.SAVE, function)
        return function

    def on_evaluate(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Register the decorated function, which evaluates the model at a step boundary; otherwise as `on_save`."""
        self.offer_action(CommandKind.EVALUATE, function)
        return function

    def on_peer_failure(self, function: Callable[[str, str], Any]) -> Callable[[str, str], Any]:
        """Register the decorated function, which gets the id of each replica of this job that fails, and why.

        The job is the replica's group, in its session. The function runs at once, on a thread of its own, because
        the training may wait for the failed peer in a collective: it may abort a process group, or set a flag.
        Each failure is told once, also if it happens while the weaver is away. Errors of the function are logged.
        """
        self._peers.add(function)
        return function

    def add_device(self, device: LocalDevice) -> None:
        """Register one more device of this process; a device with its uuid is replaced. Any thread may call.

        Raises:
            WrongArguments: the process would have too many devices.
        """
        with self._changing_devices:
            others = [one for one in self.devices if one.uuid != device.uuid]
            if len(others) >= MAX_DEVICES:
                raise WrongArguments(f"a process has {MAX_DEVICES} devices at most")
            self._set_devices([*others, device])

    def remove_device(self, uuid: str) -> None:
        """Stop using a device: its failure does not concern this process any more. Any thread may call.

        Raises:
            WrongArguments: the process has no device with this uuid.
        """
        with self._changing_devices:
            rest = [one for one in self.devices if one.uuid != uuid]
            if len(rest) == len(self.devices):
                known = ", ".join(one.uuid for one in rest) or "none"
                raise WrongArguments(f"this process has no device {uuid!r:.80}; it has: {known:.400}")
            self._set_devices(rest)

    def _set_devices(self, devices: list[LocalDevice]) -> None:
        self.devices = devices  # a new list, since other threads may read the old one
        self._send(Registration(tuple(devices)))

    def on_fault(self, kind: str) -> Callable[[F], F]:
        """Register the decorated function for a kind of fault of `loom.chaos` that depends on the training.

        Only the training knows its process group, or how its loss can become NaN. The function is called at a step
        boundary with the fault's parameters, and may return another one that removes the fault.
        """

        def register(function: F) -> F:
            self._hooks[kind] = function
            return function

        return register

    def _own_devices(self) -> Collection[str]:
        return {device.uuid for device in self.devices}

    def _introduction(self, key: str) -> ThreadletHello:
        activity = Activity.PAUSED if self._phase is Phase.PAUSED else Activity.RUNNING
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
            mesh=os.environ.get("LOOM_MESH"),
            respawns=self._respawns,
            announced=True,
            cohort=self._cohort.place,
            hears=True,
            restarted=_ranks_started_again(),
            offers=self.offers(),
            start=self._start,
            parent=self._parent,
            branch_config={} if (branch := own_branch()) is None else branch.config,
            place=self._place,
            patient=True,
        )

    def _plain_config(self) -> dict[str, Any]:
        config: dict[str, Any] = plain(dict(self._config))
        if len(config) > MAX_CONFIG or len(pack(["config", config])) > MAX_HELLO // 2:
            _log.warning("the configuration is too large to be told: the weaver sees what changes of it")
            return {}
        return config

    def _tell_start(self) -> None:
        gpus = [device.type or device.uuid for device in self.devices if device.kind == "gpu"]
        tell(self._send, socket.gethostname(), gpus)

    def _heartbeat(self) -> tuple[int | None, Phase]:
        return self._whole_step(), self._phase

    @property
    def _inside_step(self) -> bool:
        return self._in_steps and self._phase is Phase.STEP

    def _account(self) -> TimeAccount:
        return self._accounting.account(self._inside_step, self._in_steps, self._whole_step())

    def close(self, error: BaseException | None = None) -> None:
        """Say goodbye to the weaver. Do nothing if that was done before.

        The call takes at most about two seconds, if the weaver is connected but does not store the last reports. If
        the weaver was lost within the last ten seconds, it is waited for, five seconds at most.

        Args:
            error: the error that ended the training; None if it ended normally.
        """
        self._close(error, self._inside_step)

    def _close(self, error: BaseException | None, early: bool, exits: bool = False) -> None:
        """Close, ``early`` if the training is not over though nothing has told the threadlet to stop.

        With ``exits`` this process ends now, and nobody else tells how.
        """
        evictions.discard(self)
        if self._ended.is_set():
            return
        goodbye: Bye | Leaving = self._goodbye(error, early)
        if exits and goodbye.ending is not TrainingEnding.FAILED:
            goodbye = Leaving(goodbye.reason, goodbye.ending)
        self._settle_all(goodbye.ending is TrainingEnding.FAILED)
        self._cohort.close(CLOSE_TIMEOUT / 4)
        self._ended.set()
        self._wakes.put(None)
        self._inbox.close()
        self._peers.close()
        _open.discard(self)
        if self._link is None:
            return
        deadline = time.monotonic() + CLOSE_TIMEOUT
        self._reports.join(CLOSE_TIMEOUT / 2)
        self._link.close(goodbye, max(0.0, deadline - time.monotonic()))

    def _goodbye(self, error: BaseException | None, early: bool) -> Bye:
        if isinstance(error, SystemExit):
            if code := _exit_code(error):
                return Bye(f"exit code {code}", TrainingEnding.FAILED)
            error = None
        if error is not None:
            return Bye(describe_error(error)[:2000], TrainingEnding.FAILED)
        if self._evicted:
            return Bye("its worker was told to end", TrainingEnding.EVICTED)
        if self._stop:
            return Bye("it was told to stop", TrainingEnding.STOPPED)
        if early:
            return Bye("its process ended within its training", TrainingEnding.EARLY)
        return Bye("it came to its end", TrainingEnding.FINISHED)

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
        """Detach from the weaver, in a forked child."""
        link, self._link = self._link, None
        self._ended = threading.Event()
        self._ended.set()
        self._applying, self._changing_devices = threading.RLock(), threading.Lock()
        self._given = deque(maxlen=0)
        self._inbox = CommandInbox()
        self._inbox.close()
        CohortMember.forget()
        self._cohort = CohortMember(self._refusal, self._refuse, self._inbox.wake)
        self._gate = self._cohort.gate
        self._pending = self._inbox.pending
        self._paused = self._unsettled = False
        self._effects = AwaitedEffects(self._acknowledge)
        self._before_polling = None
        self._deferring = {}
        if link is not None:
            link.abandon()


_open: set[Threadlet] = set()
"""The threadlets that say goodbye when this process ends, and that a forked child abandons."""


_of_process: dict[str, Any] = {}
"""Values of the configuration of every training of this process."""


def report_of_process(key: str, value: Any) -> None:
    """Report a value of the configuration of every training of this process, also of later ones."""
    _of_process[key] = value
    for threadlet in list(_open):
        if threadlet._config.get(key) != value:
            threadlet._report_config(key, value)


def is_used() -> bool:
    """Return whether this process has a threadlet that reports."""
    return bool(_open)


_maker: Callable[[], object] | None = None
"""Returns the actor that makes a threadlet; None if none does."""


def belong_to(maker: Callable[[], object]) -> None:
    """Let each threadlet of this process belong to the actor that ``maker`` returns when it is made, or to none."""
    global _maker
    _maker = maker


def close_those_of(maker: object, error: BaseException | None) -> None:
    """Say goodbye for the threadlets of an actor that has ended, by an error or in order."""
    for threadlet in list(_open):
        if threadlet._made_by == maker:
            threadlet._close(error, early=True)


def _exit_code(error: SystemExit) -> str:
    """Return the exit code that Python makes of a `SystemExit`, with the text that it prints; "" for 0."""
    if error.code is None or isinstance(error.code, int):
        code = (error.code or 0) & 0xFF
        return str(code) if code else ""
    return f"1: {str(error.code)[:2000]}"


def _close(threadlet: Threadlet) -> None:
    """Close a threadlet with the error that ends the interpreter, if it is known.

    A `sys.exit` is known in a child of multiprocessing only. A session sees how the processes end that it spawned.
    """
    error = sys.exc_info()[1]
    # At an interactive prompt, `last_value` is any earlier error.
    if error is None and not hasattr(sys, "ps1"):
        error = getattr(sys, "last_value", None)
    spawned = was_spawned()
    exits = not spawned and multiprocessing.parent_process() is None
    threadlet._close(error, threadlet._inside_step or spawned, exits)


def _close_all() -> None:
    for threadlet in list(_open):
        _close(threadlet)


def _abandon_all() -> None:
    for threadlet in list(_open):
        threadlet.abandon()
    _open.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_abandon_all)


def _name(what: str, given: Any) -> str:
    name = "" if given is None else as_sent(given, what)
    if isinstance(name, str) and name.isprintable() and len(name) <= MAX_NAME:
        return name
    raise WrongArguments(f"{what}: {MAX_NAME} printable characters at most name it, not {name!r:.80}")


def _ranks_started_again() -> int:
    """Return the number of ranks of this job, if its launcher tells that it has started it again, else 0."""
    again = any(map(_number_in, ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", "LOOM_STARTED_AGAIN")))
    return (_number_in("WORLD_SIZE") or 1) if again else 0


def _number_in(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else None
