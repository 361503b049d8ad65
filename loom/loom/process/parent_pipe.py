"""A pipe by which a child process notices that its parent is gone, however the parent ended."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Sequence

_held: weakref.WeakSet[ParentPipe] = weakref.WeakSet()


class ParentPipe:
    """The parent's side of the pipe, whose ``child_end`` the child has as its standard input.

    The kernel closes this side when this process ends. A forked copy of this process does not hold it.
    """

    def __init__(self) -> None:
        self.child_end, self._ours = os.pipe()
        self._close = weakref.finalize(self, os.close, self._ours)
        _held.add(self)

    def given(self) -> None:
        """Close this process's copy of the child's end, once the child has it."""
        os.close(self.child_end)

    def release(self) -> None:
        """Let a child go on that waits in `parent_releases`."""
        with contextlib.suppress(BrokenPipeError):  # it has ended
            os.write(self._ours, b"\n")

    def close(self) -> None:
        """Tell the child to end."""
        self._close()


def parent_releases(descriptor: int = 0) -> bool:
    """Wait until the parent lets this process go on, and return True; False if the parent ends before."""
    return bool(os.read(descriptor, 1))


def take_standard_input() -> int:
    """Return the pipe that is standard input, at a descriptor that no child inherits. Standard input is empty then.

    User code in this process that reads standard input would wait for the parent, and take what it says.
    """
    parent_pipe = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return parent_pipe


def when_parent_ends(end: Callable[[], object], descriptor: int = 0) -> None:
    """Call a function, on a thread of its own, when the parent closes its end of the pipe, standard input."""

    def watch() -> None:
        while os.read(descriptor, 4096):
            pass
        end()

    threading.Thread(target=watch, name="exit-with-parent", daemon=True).start()


_WATCHED = """
(trap '' HUP INT QUIT TERM TSTP; exec </dev/null >/dev/null 2>&1; read _ <"/dev/fd/$1"; kill -KILL -$$) &
if [ -n "$2" ]; then : <"$2"; fi
shift 2
exec "$@"
"""


def killed_with_pipe(command: Sequence[str], pipe: int, terminal: str = "") -> list[str]:
    """Return a command that is killed, with its process group, when a pipe has no writer any more.

    It has to be the first process of a session.

    Args:
        pipe: the end to read, which the command has to inherit.
        terminal: the path of a terminal that becomes its controlling terminal.
    """
    return ["/bin/sh", "-c", _WATCHED, "loom", str(pipe), terminal, *command]


def _release_in_a_fork() -> None:
    for parent_pipe in list(_held):
        parent_pipe.close()


os.register_at_fork(after_in_child=_release_in_a_fork)
