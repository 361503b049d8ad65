"""The processes that functions in the driver start, which end with a cancelled run and with the session."""

from __future__ import annotations

import _posixsubprocess
import contextlib
import errno
import functools
import logging
import os
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import psutil

from loom.control.address import ADDRESS_VARIABLE
from loom.control.run_start import PLACE_VARIABLE

logger = logging.getLogger(__name__)

GRACE = 2.0  # seconds that a process has to end after SIGTERM before it is killed
REMEMBERED = 64  # processes of a run above which those that have ended are forgotten


class StartedProcesses:
    """The processes that one run has started. Safe on any thread.

    Args:
        place: the name of the run's own threads and processes as a place where trainings begin.
    """

    def __init__(self, place: str = "") -> None:
        self.place = place
        self.meshes: list[int] = []
        """The ids of the proc meshes that the run has spawned."""
        self.native: list[Any] = []
        """The proc meshes that it has spawned with Monarch's own ``spawn_procs``."""
        self._processes: list[psutil.Process] = []

    def add(self, pid: int) -> None:
        with contextlib.suppress(psutil.Error):  # it has ended
            self._processes.append(psutil.Process(pid))
        if len(self._processes) > REMEMBERED:
            self._processes = [process for process in self._processes if process.is_running()]

    def end_soon(self) -> None:
        """End the processes and their descendants, on a thread of its own."""
        if self._processes:
            threading.Thread(target=lambda: end(self._with_descendants()), name="end", daemon=True).start()

    def _with_descendants(self) -> list[psutil.Process]:
        found = []
        for process in self._processes.copy():
            with contextlib.suppress(psutil.Error):
                found += [process, *process.children(recursive=True)]
        return found


def started_in_the_driver() -> list[psutil.Process]:
    """Return every process that descends from this one or is in its process group."""
    own = psutil.Process()
    found = {process.pid: process for process in own.children(recursive=True)}
    group = os.getpgid(0)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != own.pid and os.getpgid(process.pid) == group:
                found[process.pid] = process
    return list(found.values())


def end(processes: Iterable[psutil.Process]) -> None:
    """End processes, and kill those that are left after `GRACE` seconds. Waits for that."""
    ending = list(processes)
    for process in ending:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, left = psutil.wait_procs(ending, GRACE)
    for process in left:
        with contextlib.suppress(psutil.Error):
            logger.warning("process %d of a run does not end, and is killed", process.pid)
            process.kill()


def note_processes(
    current: Callable[[], StartedProcesses | None], ends: Callable[[], tuple[int, int] | None]
) -> None:
    """Note each process that starts with the run that is ``current`` in its thread, and let it print to the run.

    ``ends`` returns the descriptors of that run's output. A process that is started with an output of its own keeps
    it. A process that may report to the weaver gets the run's place, too. Python starts processes by few functions:
    one that `subprocess` and `multiprocessing` share, and those of `os`.
    """

    def noted(start: Callable[..., Any], redirect: Callable[..., _Call] | None = None) -> Callable[..., Any]:
        @functools.wraps(start)
        def start_noted(*args: Any, **kwargs: Any) -> Any:
            started = current()
            if started is None:
                return start(*args, **kwargs)
            if redirect is None:
                result = start(*args, **kwargs)
            else:
                args, options = redirect(ends(), started.place, args, kwargs)
                result = start(*args, **options)
            pid = result[0] if isinstance(result, tuple) else result
            if pid and not _is_resource_tracker(args):
                started.add(pid)
            return result

        return start_noted

    fork_exec = noted(_posixsubprocess.fork_exec, _given_to_fork_exec)
    _posixsubprocess.fork_exec = fork_exec
    if hasattr(subprocess, "_fork_exec"):  # Python 3.12 and newer
        subprocess._fork_exec = fork_exec
    os.fork, os.forkpty = noted(os.fork), noted(os.forkpty)
    os.posix_spawn = noted(os.posix_spawn, _given_to_posix_spawn)
    os.posix_spawnp = noted(os.posix_spawnp, _given_to_posix_spawn)
    setattr(os, "system", _by_subprocess(os.system, current))  # noqa: B010 - a function of other types
    for name in ("execv", "execve"):
        setattr(os, name, _only_in_children(getattr(os, name)))
    for name in _REPLACED:
        getattr(os, name).__module__ = "os"  # where pickle finds it


_Call = tuple[tuple[Any, ...], Mapping[str, Any]]

_REPLACED = ("fork", "forkpty", "posix_spawn", "posix_spawnp", "system", "execv", "execve")

_ENVIRONMENT, _C2PWRITE, _ERRWRITE = 5, 9, 11
"""Positions of the child's environment, output and error among the arguments of ``fork_exec``. The first is None if
it is inherited, and the others are -1."""


def _given_to_fork_exec(
    ends: tuple[int, int] | None, place: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> _Call:
    changed = list(args)
    given = changed[_ENVIRONMENT]
    variables = os.environb if given is None else dict(one.split(b"=", 1) for one in given)
    if given is None or ADDRESS_VARIABLE.encode() in variables:
        variables = {**variables, PLACE_VARIABLE.encode(): place.encode()}
        changed[_ENVIRONMENT] = [name + b"=" + value for name, value in variables.items()]
    for position, end in zip((_C2PWRITE, _ERRWRITE), ends or (-1, -1), strict=True):
        if changed[position] == -1:
            changed[position] = end
    if ends is not None and changed[_ERRWRITE] == 1:  # `subprocess.STDOUT` where the output is inherited
        changed[_ERRWRITE] = changed[_C2PWRITE]
    return tuple(changed), kwargs


def _given_to_posix_spawn(
    ends: tuple[int, int] | None, place: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> _Call:
    if len(args) == 3 and (args[2] is None or ADDRESS_VARIABLE in args[2]):
        args = (*args[:2], {**(os.environ if args[2] is None else args[2]), PLACE_VARIABLE: place})
    ours = [(os.POSIX_SPAWN_DUP2, end, number) for end, number in zip(ends or (), (1, 2), strict=False)]
    return args, {**kwargs, "file_actions": [*ours, *(kwargs.get("file_actions") or ())]}


def _is_resource_tracker(args: tuple[Any, ...]) -> bool:
    """Return whether a command is `multiprocessing`'s process that all runs share, which ends with the driver."""
    return bool(args) and any("multiprocessing.resource_tracker" in str(word) for word in args[0])


def _by_subprocess(
    system: Callable[[Any], int], current: Callable[[], StartedProcesses | None]
) -> Callable[[Any], int]:
    """Return an `os.system` whose command belongs to the run."""

    @functools.wraps(system)
    def run(command: Any) -> int:
        if current() is None:
            return system(command)
        code = subprocess.Popen(command, shell=True, close_fds=False).wait()
        return -code if code < 0 else code << 8

    return run


def _only_in_children(execute: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
    """Return a function of `os` that puts another program in a process's place, but not in the driver's."""
    driver = os.getpid()

    @functools.wraps(execute)
    def execute_in_a_child(path: Any, *args: Any) -> NoReturn:
        if os.getpid() == driver:
            raise OSError(
                errno.EPERM,
                "a function of job.run is a thread of the session's driver, in whose place no other program may be "
                "put: start it with subprocess.run",
                path,
            )
        execute(path, *args)

    return execute_in_a_child
