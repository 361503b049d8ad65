"""Monarch's debugger, which the clients of a session reach through its driver, and nobody else does.

Monarch's own listens on a port of its machine and asks for no token, so whoever is on the machine could run code in
the session's processes, and a second driver there would find the port taken.
"""

from __future__ import annotations

import asyncio
import base64
import collections
import contextlib
import zlib
from typing import Any

from monarch._src.actor.debugger import debug_controller as monarchs
from monarch._src.actor.debugger.debug_controller import DebugController
from monarch._src.actor.debugger.debug_io import DebugIO, DebugIOError
from monarch._src.actor.debugger.debug_session import DebugSession, DebugSessions

from loom.actor import concurrent_endpoint, get_or_spawn_controller
from loom.process import tasks

OPERATIONS = frozenset({"breakpoints", "enter", "say", "show", "hear", "leave"})
"""The endpoints of `SessionDebugger` that clients may call."""

TEXT_ROOM = 1 << 20  # characters that wait for a client; beyond it, the oldest are dropped
PIECE = 4000  # characters of a source in one line for pdb, whose lines are cut after 8192 bytes


class SessionDebugger(DebugController):  # type: ignore[misc]
    """Monarch's controller of debug sessions, without its port. It runs in a session's driver.

    One client talks to it at a time; a later one takes the place of the one before. The actors that it talks about
    wait meanwhile, also if no client does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sessions = _Sessions()
        self._console = _Console()
        self._number = 0  # of the client whose console it is

    async def _serve(self) -> None:
        self._server.set_result(None)  # an actor may begin its session: clients come another way

    @concurrent_endpoint
    async def breakpoints(self, timeout: float) -> list[dict[str, object]]:
        """Return the actors that wait in a breakpoint, as soon as there are some, or after ``timeout`` seconds."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.sessions.there.wait(), timeout)
        return [vars(info) for info in sorted(self.sessions.info())]

    @concurrent_endpoint
    async def enter(self) -> int:
        """Begin a client's talk; return its number."""
        async with self._task_lock:
            await self._end_talk("another client talks to the debugger now\n")
            self._number += 1
            self._debug_io = self._console = _Console()
            self._task = tasks.run("talk to a debugger", self._talk(self._console))
            return self._number

    async def _talk(self, console: _Console) -> None:
        try:
            with contextlib.suppress(DebugIOError):
                await self._enter()
        finally:
            console.end("")

    async def _end_talk(self, why: str) -> None:
        self._console.end(why)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    @concurrent_endpoint
    async def say(self, number: int, line: str) -> None:
        """Take a line of the client's."""
        self._console_of(number).say(line)

    @concurrent_endpoint
    async def show(self, number: int, path: str, source: str) -> None:
        """Take the text of a file that only the client has, for the process that the client is attached to."""
        self._console_of(number).say_unseen(_lines_that_show(path, source))

    @concurrent_endpoint
    async def hear(self, number: int, timeout: float) -> tuple[str, bool, bool]:
        """Return the text for the client, whether a line is waited for, and whether the talk is over.

        Return when there is text, a wait for a line, or an end; after ``timeout`` seconds at most.
        """
        return await self._console_of(number).hear(timeout)

    @concurrent_endpoint
    async def leave(self, number: int) -> None:
        """End a client's talk. The process that it was attached to waits on."""
        async with self._task_lock:
            if number == self._number:
                await self._end_talk("")

    def _console_of(self, number: int) -> _Console:
        return self._console if number == self._number else _OVER


class _Sessions(DebugSessions):  # type: ignore[misc]
    """Monarch's debug sessions, which tell when there are some."""

    def __init__(self) -> None:
        super().__init__()
        self.there = asyncio.Event()

    def insert(self, session: DebugSession) -> None:
        super().insert(session)
        self.there.set()

    def remove(self, actor_name: str, rank: int) -> DebugSession:
        removed = super().remove(actor_name, rank)
        if not len(self):
            self.there.clear()
        return removed


class _Console(DebugIO):  # type: ignore[misc]
    """The input and output of Monarch's debugger, for a client that comes and goes."""

    def __init__(self) -> None:
        self._lines: collections.deque[str] = collections.deque()
        self._unseen: collections.deque[str] = collections.deque()  # lines whose output the client does not get
        self._text = ""
        self._muted = False
        self._wants = False  # whether a line is waited for
        self._over = False
        self._changed = asyncio.Event()

    async def input(self, prompt: str = "") -> str:
        await self.output(prompt)
        self._wants = True
        try:
            while not (self._unseen or self._lines or self._over):
                self._muted = False
                await self._next_change()
        finally:
            self._wants = False
        if self._over:
            raise DebugIOError
        self._muted = bool(self._unseen)
        return self._unseen.popleft() if self._unseen else self._lines.popleft()

    async def output(self, msg: str) -> None:
        if not self._muted:
            self._text = (self._text + msg)[-TEXT_ROOM:]
            self._note()

    async def quit(self) -> None:
        self.end("")

    def say(self, line: str) -> None:
        self._lines.append(line)
        self._note()

    def say_unseen(self, lines: list[str]) -> None:
        self._unseen.extend(lines)
        self._note()

    def end(self, why: str) -> None:
        if not self._over:
            self._over = True
            self._text += why
            self._note()

    async def hear(self, timeout: float) -> tuple[str, bool, bool]:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._until_heard(), timeout)
        text, self._text = self._text, ""
        return text, self._waits, self._over

    @property
    def _waits(self) -> bool:
        return self._wants and not (self._lines or self._unseen)

    async def _until_heard(self) -> None:
        while not (self._text or self._waits or self._over):
            await self._next_change()

    def _note(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _next_change(self) -> None:
        await self._changed.wait()


def _over() -> _Console:
    console = _Console()
    console.end("")
    return console


_OVER = _over()


def _lines_that_show(path: str, source: str) -> list[str]:
    """Return the statements for pdb after which its process knows the lines of a file that it does not have."""
    packed = base64.b64encode(zlib.compress(source.encode())).decode()
    pieces = [packed[start : start + PIECE] for start in range(0, len(packed), PIECE)]
    kept = "vars(__import__('linecache')).setdefault('_shown', [])"
    text = f"__import__('zlib').decompress(__import__('base64').b64decode(''.join({kept}))).decode()"
    entry = f"(len(text), None, text.splitlines(True), {path!r})"
    cache = f"(lambda text: __import__('linecache').cache.__setitem__({path!r}, {entry}))({text})"
    return [*(f"!{kept}.append({piece!r})" for piece in pieces), f"!{cache}", f"!{kept}.clear()"]


def take_the_place_of_monarchs() -> None:
    """Let Monarch make a `SessionDebugger` when it makes its controller in this process."""
    monarchs.DebugController = SessionDebugger


def find_debugger() -> Any:
    """Return an awaitable for the session's debugger, which is made when it is first needed."""
    return get_or_spawn_controller("debug_controller", SessionDebugger).as_asyncio()
