"""Forked children of a driver's runs and of actors, as `os.fork` and `multiprocessing` make them.

A forked child inherits what makes a driver: the handlers of signals, the descriptor that wakes the event loop,
sockets, and the function of the run. `keep_apart` turns it into a child of an ordinary program: signals have their
usual effects, its output goes to the run, and nothing of the driver stays open in it. A child that outlives the
driver would otherwise keep the driver's ports, and make it look alive. An actor's child is turned by
`keep_actors_apart`: none of the threads that would answer a call is in it, so it ends with the endpoint.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import select
import signal
import socket
import stat
import sys
import threading
import traceback
from collections.abc import Callable, Collection
from typing import NoReturn, TypeVar

from loom.driver_api import leave
from loom.errors import InForkedChild
from loom_gateway.driver.runs.main_thread import main_thread
from loom_gateway.driver.runs.output import current_ends, print_to_descriptors

_T = TypeVar("_T")

forked: InForkedChild | None = None
"""The error of a child that uses what is its parent's; None in a process that is no such child."""

_driver = os.getpid()
_held: dict[int, tuple[int, int]] = {}  # the driver's descriptors and what they are, from before the first run
_addresses: set[object] = set()  # on which the driver listens
_folder = ""  # whose sockets are the driver's, at either end
_connections: Callable[[], Collection[int]] = tuple  # returns the descriptors of further ones
_forking = threading.local()
_keeps_actors_apart = False
_refusals: list[Callable[[Callable[..., NoReturn]], None]] = []


def keep_apart(folder: str, connections: Callable[[], Collection[int]]) -> None:
    """Turn forks of this process into ordinary children, from now on. Call it before user code runs.

    Args:
        folder: what connects to a socket in it is the driver's.
        connections: returns descriptors that are the driver's, too.
    """
    global _driver, _folder, _connections
    _driver, _folder, _connections = os.getpid(), folder, connections
    _note_descriptors()
    os.fork, os.forkpty = _held_back(os.fork), _held_back(os.forkpty)
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)


def keep_actors_apart() -> None:
    """Turn forks of this process of actors into ordinary children, from now on. Again is harmless."""
    global _keeps_actors_apart
    if not _keeps_actors_apart:
        _keeps_actors_apart = True
        os.register_at_fork(before=_note_parent, after_in_child=_in_child_of_actor)


def refuse_in_children(refuse: Callable[[Callable[..., NoReturn]], None]) -> None:
    """Call ``refuse`` in each child with a function that raises, to be put in the place of what is its parent's."""
    _refusals.append(refuse)


def is_parents(*_: object, **__: object) -> NoReturn:
    """Refuse what only the parent of this child can do."""
    raise forked or RuntimeError("this process is no forked child")


def is_child() -> bool:
    """Return whether this process is a forked copy of the driver."""
    return os.getpid() != _driver


def end_child(error: BaseException | None) -> NoReturn:
    """End a child as a program ends whose main function has returned, or raised an error."""
    code = _report(error)
    atexit._run_exitfuncs()
    _leave(code)


def end_at_once(error: BaseException) -> NoReturn:
    """End this process as an error ends a program, but for the functions of `atexit`.

    Monarch's would take the process out of its meshes, whose stop then waits for it for 40 s (torchmonarch 0.7).
    """
    _leave(_report(error))


def _report(error: BaseException | None) -> int:
    """Print the error that ends a program, and return its exit code."""
    if isinstance(error, SystemExit):
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if error is not None:
        traceback.print_exception(error)
    return int(error is not None)


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 0xFF)


def _note_descriptors() -> None:
    for descriptor in _open_descriptors():
        found = os.fstat(descriptor)
        _held[descriptor] = found.st_dev, found.st_ino
        if stat.S_ISSOCK(found.st_mode):
            with _Borrowed(descriptor) as sock, contextlib.suppress(OSError):
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    _addresses.add(sock.getsockname())


def _open_descriptors() -> list[int]:
    found = [int(name) for name in os.listdir("/dev/fd")]
    return [descriptor for descriptor in found if descriptor > 2 and _is_open(descriptor)]


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False  # the listing's own
    return True


class _Borrowed:
    """A socket object for a descriptor, which stays open."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)

    def __enter__(self) -> socket.socket:
        return self._socket

    def __exit__(self, *_: object) -> None:
        self._socket.detach()


def _is_drivers(descriptor: int) -> bool:
    found = os.fstat(descriptor)
    if _held.get(descriptor) == (found.st_dev, found.st_ino):
        return True
    if not stat.S_ISSOCK(found.st_mode):
        return False
    with _Borrowed(descriptor) as sock:
        with contextlib.suppress(OSError):
            if sock.getsockname() in _addresses:
                return True
            peer = sock.getpeername()
            return isinstance(peer, str) and peer.startswith(_folder)
    return False


def _held_back(fork: Callable[[], _T]) -> Callable[[], _T]:
    """Return a function that forks. The child raises what a signal raises meanwhile, which a hook would drop."""

    @functools.wraps(fork)
    def fork_held_back() -> _T:
        _forking.unblocks = True
        try:
            result = fork()
            if is_child():
                signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)
            return result
        finally:
            _forking.unblocks = False

    return fork_held_back


def _before() -> None:
    # A signal that came before the child has its own handlers would be taken for the driver's, or be lost.
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    _forking.ends = current_ends()
    _note_parent()


def _note_parent() -> None:
    _forking.loop = asyncio._get_running_loop()
    _forking.parent = os.getpid()


def _in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _in_child() -> None:
    try:
        main_thread.forget_handlers()
        main_thread.forget_loop(is_parents)
        _let_go_of_descriptors()
        print_to_descriptors(_forking.ends)
        leave(_refuse_what_is_parents())
        atexit._clear()
    finally:
        if not getattr(_forking, "unblocks", False):
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # as it is for the program that takes the child's place
            signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _let_go_of_descriptors() -> None:
    """Open nothing in the place of each of the driver's descriptors.

    They stay taken: an inherited object may close the number of its descriptor when it is freed, which would
    otherwise be another file by then.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    connections = _connections()
    for descriptor in _open_descriptors():
        if descriptor != nothing and (descriptor in connections or _is_drivers(descriptor)):
            os.dup2(nothing, descriptor, inheritable=False)
    _let_go_of_loop()
    os.close(nothing)


def _let_go_of_loop() -> None:
    if (loop := _forking.loop) is not None:
        # The child of a coroutine. An event that it unregistered would be gone from its parent's loop, too.
        with contextlib.suppress(AttributeError, OSError), select.epoll() as empty:
            os.dup2(empty.fileno(), loop._selector.fileno(), inheritable=False)
        asyncio._set_running_loop(None)


def _refuse_what_is_parents() -> InForkedChild:
    global forked
    forked = InForkedChild(
        f"this is a forked child of process {_forking.parent}, in which alone the session and its meshes can be "
        f"used: return what they need to the parent, or open a session here with loom.connect()"
    )
    for refuse in _refusals:
        refuse(is_parents)
    return forked


def _in_child_of_actor() -> None:
    _let_go_of_loop()
    _refuse_what_is_parents()
    atexit._clear()  # Monarch's would wait for threads that are not here
