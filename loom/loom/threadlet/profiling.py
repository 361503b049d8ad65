"""The profile of this process that the weaver asks for when it cannot take it from outside.

A thread looks a hundred times a second at the stacks of the others. A stack counts if its thread has used the CPU
since the look before, as py-spy counts them: what waits is not what takes the time.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType

from loom.control.profiles import MAX_DEPTH, MOST_SECONDS, RATE, FoldedStacks, Profile, ProfileRequest

_SWITCH = 0.0001
"""Seconds after which a busy thread lets a profile look at it. By default it may run for 5 ms, so that one which is
busy for less would only be seen where it begins to wait."""

_BUSY = 0.1
"""The share of the time between two looks that a busy thread has used the CPU."""


class Profiler:
    """Takes one profile at a time, in a thread of its own."""

    def __init__(self, send: Callable[[Profile], None]) -> None:
        self._send = send
        self._running = threading.Lock()

    def begin(self, request: ProfileRequest) -> None:
        """Begin a profile, which is sent when its time is over; or refuse it, if one is being taken."""
        if not self._running.acquire(blocking=False):
            self._send(Profile(request.id, "", 0, 0, "another profile of its process is being taken"))
            return
        threading.Thread(target=self._run, args=(request,), name="loom-profile", daemon=True).start()

    def _run(self, request: ProfileRequest) -> None:
        try:
            stacks = sample(min(request.seconds, MOST_SECONDS))
            self._send(Profile(request.id, stacks.text, stacks.samples, stacks.left_out, ""))
        finally:
            self._running.release()


def sample(seconds: float) -> FoldedStacks:
    """Return the stacks of this process's other threads that were busy within so many seconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _SWITCH))
    try:
        return _sample(seconds)
    finally:
        sys.setswitchinterval(before)


def _sample(seconds: float) -> FoldedStacks:
    stacks, busy, own = FoldedStacks(), _BusyThreads(), threading.get_ident()
    names: dict[CodeType, str] = {}
    until = time.monotonic() + seconds
    due = time.monotonic()
    while due < until:
        due = max(due + 1 / RATE, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
        # At once: to ask who is busy lets the others run on.
        looks = [(ident, _folded(frame, names)) for ident, frame in sys._current_frames().items() if ident != own]
        now = busy.now()
        for ident, stack in looks:
            if ident in now:
                stacks.add(stack)
    return stacks


class _BusyThreads:
    """The threads that have used the CPU since the last question."""

    def __init__(self) -> None:
        self._used: dict[int, int] = {}
        self._asked = time.monotonic()
        self.now()

    def now(self) -> set[int]:
        """Return the idents of the busy threads; one whose use of the CPU is not known counts as busy."""
        asked, self._asked = self._asked, time.monotonic()
        least = (self._asked - asked) * _BUSY * 1e9
        native = {thread.ident: thread.native_id for thread in threading.enumerate()}
        found = set()
        for ident in sys._current_frames():
            used = _cpu_nanoseconds(native.get(ident))
            if used is None or used - self._used.get(ident, used) >= least:
                found.add(ident)
            if used is not None:
                self._used[ident] = used
        return found


def _cpu_nanoseconds(thread: int | None) -> int | None:
    """Return how long a thread has used the CPU; None if the system does not say."""
    if thread is None:
        return None
    try:
        with open(f"/proc/self/task/{thread}/schedstat") as file:
            return int(file.read().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def _folded(frame: FrameType | None, names: dict[CodeType, str]) -> str:
    functions: list[str] = []
    while frame is not None and len(functions) < MAX_DEPTH:
        code = frame.f_code
        if code not in names:
            names[code] = _name(code)
        functions.append(names[code])
        frame = frame.f_back
    return ";".join(reversed(functions))


def _name(code: CodeType) -> str:
    """Return a function's name as py-spy writes it: ``train (steps.py:12)``."""
    file = code.co_filename
    folders = [folder for folder in sys.path if folder and file.startswith(f"{folder.rstrip('/')}/")]
    if folders:
        file = file[len(max(folders, key=len).rstrip("/")) + 1 :]
    name = f"{getattr(code, 'co_qualname', code.co_name)} ({file}:{code.co_firstlineno})"
    return " ".join(name.replace(";", ":").split())
