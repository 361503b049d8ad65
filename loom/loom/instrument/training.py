"""`HookedTraining`: a process that trains, as Loom sees it, for the hooks of the libraries that it trains with.

A process has one, which `training` makes at its first step: a process that never steps an optimizer, such as a
launcher, is no replica. The hooks use nothing else of Loom. One that raises is logged and steps back for good, with
`guarded`: the user's program goes on as if it were not there.
"""

from __future__ import annotations

import atexit
import functools
import logging
import multiprocessing
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from enum import IntEnum
from importlib import import_module
from multiprocessing.util import Finalize
from pathlib import PurePath
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from loom.control.address import was_spawned, weaver_address
from loom.errors import GatewayUnreachable, describe_error

if TYPE_CHECKING:
    from loom.threadlet.threadlet import Threadlet

_log = logging.getLogger("loom")

NAME_VARIABLE = "LOOM_RUN"
"""The environment variable in which the processes of a run find its name, which is also their group."""

AUTO_VARIABLE = "LOOM_AUTO"
"""The environment variable that is 1 where trainings take part without ``loom run``."""

FOUND_VARIABLE = "LOOM_FOUND"
"""The environment variable that is 1 where a gateway has named the weaver, which may have another address later."""

MAX_RUN_NAME = 190
"""Characters of a run's name, to which its replicas add their ranks."""

ANSWER_WITHIN = 5.0
"""Seconds that the gateway has to name its weaver."""

READ_EVERY = 0.25
"""Seconds between two reads of the present values of the keys, at least."""

SILENT_STEPS = 1000
"""Steps of an optimizer after which a richer source counts as gone that has named none of them."""

MAX_WAITING = 1000
"""Names of metrics that wait for the first step, or for the next one."""


class StepSource(IntEnum):
    """The libraries that can name a training's steps. If there are several, the last one here does."""

    TORCH = 0
    ACCELERATE = 1
    TORCHFT = 2
    TORCHTITAN = 3
    LIGHTNING = 4
    TRANSFORMERS = 5


class HookedTraining:
    """A process that trains. Only the training thread calls the methods, except `log`, which any thread may call.

    Args:
        threadlet: the process's threadlet.
    """

    def __init__(self, threadlet: Threadlet) -> None:
        self.threadlet = threadlet
        self.pid = os.getpid()
        self.owner = StepSource.TORCH
        """The richest source of this training so far: it names the steps."""
        self._silent = 0  # steps since the owner has named one
        self._metrics: dict[str, Any] = {}
        self._lock = threading.Lock()  # guards `_metrics`
        self._step: int | None = None
        self._readers: dict[str, Callable[[], Any]] = {}
        self._config: dict[str, Any] = {}  # as last published
        self._read_next = 0.0  # when the values of the keys are read again, at the next status
        self._stop: Callable[[], object] | None = None
        self._stopped = False

    def owns(self, source: StepSource) -> bool:
        """Return whether this source names the steps: it does unless a richer one has asked before.

        A hook asks at each step. Its source publishes nothing if the answer is no.
        """
        if source >= self.owner or self._silent > SILENT_STEPS:
            self.owner, self._silent = source, 0
            return True
        self._silent += 1
        return False

    def begin(self, source: StepSource) -> bool:
        """Note that a library begins a training; return whether it names the steps: not within a richer one's."""
        if lives_on():  # the training before was interrupted, or stopped
            self.owner = source
            if self._stopped:
                self._forget_stop()
        if not self.owns(source):
            return False
        self._stop = None
        _note_change()
        return True

    def end(self, source: StepSource, step: int, epoch: int | None = None) -> None:
        """Note that a library's training has come to its end, with this step as the last one."""
        if self.owner is source:
            self._read_next = 0.0  # what the keys have now is their last value
            self.publish(step, epoch, max_step=step)
            self.owner, self._silent, self._stop = StepSource.TORCH, 0, None
            _note_change()

    def publish(
        self,
        step: int,
        epoch: int | None = None,
        max_step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Publish a step that was made, with the metrics given since the last one, and what changed of the keys."""
        waiting = self._take_metrics()
        if metrics:
            waiting.update(metrics)
        self._step, self._silent = step, 0
        config = self._changed() if monotonic() >= self._read_next else None
        self.threadlet.publish_status(step, epoch, max_step, waiting or None, config)

    def log(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Let metrics join the next status. ``step`` is the tracker's own number, which is not the training's."""
        with self._lock:
            _merge(self._metrics, metrics)

    def offer(
        self,
        key: str,
        type: Any,
        read: Callable[[], Any],
        write: Callable[[Any], object] | None = None,
        saved: Callable[[], Callable[[], object]] | None = None,
        former: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        """Offer a configuration key; one that was offered before is replaced.

        Args:
            key: the key, such as ``learning_rate``.
            type: the type of its values, such as ``float`` or ``float | None``.
            read: returns the present value; called at a step every `READ_EVERY` seconds, and before a change.
            write: applies a value, at a step boundary, and raises to refuse it, or returns a `Deferred`; None if
                the key can only be read.
            saved: returns a function that brings back what holds now, if ``write`` with the present value does not.
            former: returns the values, by key, that bring it back when they are set.
        """
        self._readers[key] = read
        self._read_next = 0.0
        if write is None:
            return

        def apply(value: Any) -> object:
            return write(value)

        apply.__annotations__ = {"value": type, "return": object}
        apply.present = read  # type: ignore[attr-defined]
        if saved is not None:
            apply.saved = saved  # type: ignore[attr-defined]
        if former is not None:
            apply.former = former  # type: ignore[attr-defined]
        self.threadlet.handler(key)(apply)

    def offer_action(
        self, name: str, function: Callable[[], object], unable: Callable[[], str | None] = lambda: None
    ) -> None:
        """Offer ``save`` or ``evaluate``: the function does it at a step boundary, and raises to refuse it.

        A function that cannot do it there returns a `Deferred`. ``unable`` returns why it cannot be done at all, as
        long as that holds, on any thread: nobody asks for it then.
        """
        self.threadlet.offer_action(name, function, unable)

    def on_stop(self, function: Callable[[], object]) -> None:
        """Let a stop call a function, once, instead of raising `SystemExit`: the owner's own way to end."""
        self._stop = function

    def boundary(self) -> None:
        """Apply commands, wait during a pause, and stop if that was commanded.

        The post hook of the primary optimizer alone calls this, whoever owns the steps.

        Raises:
            SystemExit: with code 0, if the training is to stop and its owner has no way of its own.
        """
        threadlet = self.threadlet
        if self._stopped and self._stop is None:  # the exception has ended a cell, or a call, and not the process
            self._forget_stop()
        if threadlet.check_and_apply_updates():
            self._read_next = 0.0
        threadlet.wait_while_paused()
        if threadlet.should_stop and not self._stopped:
            self._stopped = True
            if self._stop is None:
                raise SystemExit(0)
            self._stop()

    def take_branch_values(self) -> None:
        """Apply the values with which a branch begins, before its first step."""
        self.threadlet.take_branch_values()
        self._read_next = 0.0

    def _forget_stop(self) -> None:
        self._stopped = False
        self.threadlet.go_on()

    def close(self) -> None:
        """Publish what has changed since the last status; the threadlet says goodbye by itself."""
        if self._step is None or self.pid != os.getpid():  # a fork may have taken over the lock
            return
        config, metrics = self._changed(), self._take_metrics()
        if config or metrics:
            self.threadlet.publish_status(self._step, metrics=metrics, config=config)

    def _take_metrics(self) -> dict[str, Any]:
        with self._lock:
            waiting, self._metrics = self._metrics, {}
        return waiting

    def _changed(self) -> dict[str, Any] | None:
        self._read_next = monotonic() + READ_EVERY
        present = {key: read() for key, read in self._readers.items()}
        if present == self._config:
            return None
        changed = {key: value for key, value in present.items() if self._config.get(key) != value}
        self._config = present
        return changed or None


_training: HookedTraining | None = None
_waiting: dict[str, Any] = {}  # metrics that were logged before the first step
_making = threading.Lock()


def training() -> HookedTraining:
    """Return this process's `HookedTraining`, which is made at the first call.

    Raises:
        NotHere: this process is a fork of one that trains, or loads data for one.
    """
    made = _make() if _training is None else _training
    if made.pid != os.getpid():
        raise NotHere("this process is a fork of one that trains")
    return made


def _make() -> HookedTraining:
    global _training
    with _making:
        if _training is None:
            _check_takes_part()
            from loom.threadlet.threadlet import Threadlet  # which processes that never train have no need of

            made = HookedTraining(Threadlet(**_identity(), config=_describe_group()))
            made.log(_waiting)
            _waiting.clear()
            if multiprocessing.parent_process() is None:
                atexit.register(made.close)
            else:  # before the threadlet's own
                Finalize(made, made.close, exitpriority=20)
            _training = made
        return _training


_changes: list[Callable[[], object]] = []


def on_change(function: Callable[[], object]) -> None:
    """Call a function whenever a training of a library begins or ends in this process."""
    _changes.append(function)


def _note_change() -> None:
    for function in _changes:
        function()


def lives_on() -> bool:
    """Return whether this process lives on after a training: a notebook's kernel, a prompt, or one of a session."""
    return hasattr(sys, "ps1") or was_spawned() or _driver() is not None


def log(metrics: Mapping[str, Any], step: int | None = None) -> None:
    """Let metrics join the next status of this process; if it has made no step yet, they wait for the first one."""
    if _training is None:
        _merge(_waiting, metrics)
    elif _training.pid == os.getpid():  # not a fork, which may have taken over the lock
        _training.log(metrics, step)


class NotHere(RuntimeError):
    """This process takes no part: a hook that meets it is quiet from then on."""


def _check_takes_part() -> None:
    data = sys.modules.get("torch.utils.data")
    if data is not None and data.get_worker_info() is not None:
        raise NotHere("this process loads data for one that trains")
    if _forked and not _in_process_group():
        raise NotHere("this process is a fork, and no rank of its own")
    threadlets = sys.modules.get("loom.threadlet.threadlet")
    if threadlets is not None and threadlets.is_used():
        raise NotHere("the program has a threadlet of its own")


_forked = False
_forked_group: object = None
"""The default process group of the process that this one is a fork of."""


def _note_fork() -> None:
    global _forked, _forked_group, _making
    _forked, _forked_group = True, _process_group()
    _making = threading.Lock()  # another thread may have held it


os.register_at_fork(after_in_child=_note_fork)


def _process_group() -> object:
    """Return the default process group of torch.distributed; None without one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.group.WORLD
    return None


def _describe_group() -> dict[str, Any]:
    """Return what is known of torch.distributed's default group, for the configuration."""
    if _process_group() is None:
        return {}
    distributed = sys.modules["torch.distributed"]
    return {"backend": str(distributed.get_backend()), "world_size": distributed.get_world_size()}


def _in_process_group() -> bool:
    """Return whether this process is a rank, and not only a fork of one."""
    return (group := _process_group()) is not None and group is not _forked_group


def _identity() -> dict[str, Any]:
    """Return the arguments of `Threadlet` that say what this process is, and to whom it reports."""
    if was_spawned():
        return {}  # the session that has spawned it has named it
    if (driver := _driver()) is not None:
        return {"replica_id": f"{driver.name}_0", "group": driver.name, "weaver": driver.weaver_address()}
    group = as_run_name(os.environ.get(NAME_VARIABLE) or _name_of_program())
    asks = os.environ.get(FOUND_VARIABLE if weaver_address() else AUTO_VARIABLE) == "1"
    return {
        "replica_id": f"{group}_{global_rank()}",
        "group": group,
        "find_weaver": ask_gateway if asks else None,
    }


def _driver() -> Any:
    """Return the session whose driver this process is; None in another process."""
    api = sys.modules.get("loom.driver_api")
    return api.session() if api is not None and api.in_driver() else None


def as_run_name(text: str) -> str:
    """Return a text, such as the name of a script, as the name of a run: a target of commands can have it."""
    return re.sub(r"[^\w.-]", "_", text)[:MAX_RUN_NAME] or "train"


def _name_of_program() -> str:
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return PurePath(file).stem if file else "train"


NOWHERE = (
    "nothing to report to: no LOOM_WEAVER, no LOOM_URL, no current context, no running `loom up` and, in Slurm, no "
    "gateway of `loom slurm up`"
)


def ask_gateway() -> str:
    """Return the address of the weaver of the chosen gateway.

    Raises:
        LoomError: no gateway is chosen, or it does not name its weaver.
        TimeoutError: it does not answer.
    """
    from loom.process.threads import within

    def look() -> str:
        # The laptop's side knows contexts; where only the library is needed, it is not imported.
        if (chosen := import_module("loom_proxy.contexts").find_gateway()) is None:
            raise GatewayUnreachable(NOWHERE)
        return str(chosen.weaver_address(ANSWER_WITHIN))

    return within(ANSWER_WITHIN, look)


_replica_group = 0


def set_replica_group(number: int) -> None:
    """Set the number of torchft's replica group of this process: each group counts its ranks from 0."""
    global _replica_group
    _replica_group = number


def global_rank() -> int:
    """Return ``RANK``, else the rank in torch.distributed's default group, else that in a step of Slurm, else 0.

    The ranks of torchft's replica groups follow one another.
    """
    before = _replica_group * int(os.environ.get("WORLD_SIZE", "1"))
    if (rank := os.environ.get("RANK", "")).isdecimal():
        return before + int(rank)
    if _process_group() is not None:
        return before + int(sys.modules["torch.distributed"].get_rank())
    rank = os.environ.get("SLURM_PROCID", "")
    return before + (int(rank) if rank.isdecimal() else 0)


def _merge(into: dict[str, Any], metrics: Mapping[str, Any]) -> None:
    for name, value in metrics.items():
        if name in into or len(into) < MAX_WAITING:
            into[name] = value


F = TypeVar("F", bound=Callable[..., Any])

_stepped_back: set[str] = set()


def guarded(source: str, boundaries: bool = False) -> Callable[[F], F]:
    """Decorate a hook: if it raises, that is logged, and no hook of this source does anything any more.

    Args:
        source: a name for users, such as ``"PyTorch's optimizers"``.
        boundaries: whether the hook is that of the step boundaries, without which the process is no replica.
    """

    def decorate(hook: F) -> F:
        @functools.wraps(hook)
        def call(*arguments: Any, **options: Any) -> Any:
            if source in _stepped_back:
                return None
            try:
                return hook(*arguments, **options)
            except Exception as error:  # noqa: BLE001 - a hook never ends the user's program
                step_back(source, error)
                if boundaries and _training is not None and _training.pid == os.getpid():
                    _training.threadlet.close()
                return None

        return call  # type: ignore[return-value]

    return decorate


def step_back(source: str, error: BaseException) -> None:
    """Let no hook of this source do anything any more, and log why, once."""
    _stepped_back.add(source)
    if not isinstance(error, NotHere):
        _log.warning(
            "Loom steps back from %s, and the training goes on without it: %s",
            source,
            describe_error(error),
            exc_info=error,
        )
