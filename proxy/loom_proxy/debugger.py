"""`Debugger`: Monarch's debugger, from a notebook or a terminal anywhere."""

from __future__ import annotations

import linecache
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loom.errors import WaitTimeout
from loom.terminal_text import fit_line, fit_lines
from loom.wire.bodies import Debug
from loom_proxy.logs import print_text

if TYPE_CHECKING:
    from loom_proxy.session.calls import Calls

__all__ = ["Breakpoint", "Debugger"]

HEAR_FOR = 20.0
"""Seconds for which the driver holds back a question whose answer is not there yet."""

_PLACE = re.compile(r"^> (?P<path>.+)\((?P<line>\d+)\)\S+\(\).*\n(?!-> )", re.MULTILINE)
"""The place of pdb if it knows no source of the file."""

_UNFINISHED = re.compile(r"(^>.*)?\Z", re.MULTILINE)
"""The place where pdb is, as long as its line has no end."""


@dataclass(frozen=True)
class Breakpoint:
    """An actor that waits in a breakpoint or, after one, in the post-mortem of its exception."""

    actor_name: str
    rank: int
    """In the actor mesh that was called."""
    coords: Mapping[str, int]
    """The rank in each dimension of that mesh."""
    hostname: str
    function: str | None
    """The module and function in which it waits; None until pdb has said something."""
    lineno: int | None


def _print(text: str) -> None:
    print_text("stdout", text)


class Debugger:
    """The debugger of a session's actors; see `Job.debugger`.

    ``breakpoint()`` in an endpoint stops there, also in classes of a notebook or of ``__main__``, until a user
    lets it go on; so does an exception that follows in the same call. One terminal or notebook talks to the
    debugger at a time, and a later one takes the place of the one before. Stopped code waits on meanwhile.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def breakpoints(self) -> list[Breakpoint]:
        """Return the actors that wait now, by name and rank."""
        return self._ask_for_breakpoints(0.0)

    def wait(self, timeout: float | None = None) -> list[Breakpoint]:
        """Wait until an actor waits in a breakpoint; return all that do.

        Raises:
            WaitTimeout: none did within ``timeout`` seconds.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            left = HEAR_FOR if until is None else min(HEAR_FOR, until - time.monotonic())
            if found := self._ask_for_breakpoints(max(left, 0.0)):
                return found
            if until is not None and time.monotonic() >= until:
                raise WaitTimeout(f"no actor has stopped at a breakpoint within {timeout:g} s")

    def _ask_for_breakpoints(self, timeout: float) -> list[Breakpoint]:
        return [Breakpoint(**found) for found in self._ask("breakpoints", timeout)]

    def interact(
        self,
        *commands: str,
        read: Callable[[str], str] = input,
        write: Callable[[str], object] = _print,
    ) -> None:
        """Talk to the debugger until ``quit``, the end of the input or Ctrl-C. ``help`` lists its commands.

        ``attach NAME RANK`` leads to the pdb of one actor, ``cast NAME ranks(0,2) n`` sends a command to several,
        ``continue`` lets all go on.

        Args:
            commands: the first lines, before any is read.
            read: returns a line without its end for a prompt, as `input`; `EOFError` ends the talk.
            write: shows text.
        """
        number = self._ask("enter")
        lines, unfinished = list(commands), ""
        progress, self._calls.progress = self._calls.progress, False
        try:
            while True:
                heard, waits, over = self._ask("hear", number, HEAR_FOR)
                text = unfinished + heard
                unfinished = "" if waits or over else _UNFINISHED.search(text)[0]  # type: ignore[index]
                text = self._with_source(number, text.removesuffix(unfinished))
                prompt = text[text.rfind("\n") + 1 :] if waits and not over else ""
                write(fit_lines(text.removesuffix(prompt)))
                prompt = fit_line(prompt)
                if over:
                    return
                if waits and lines:
                    write(f"{prompt}{lines[0]}\n")
                    self._ask("say", number, lines.pop(0))
                elif waits:
                    self._ask("say", number, read(prompt))
        except (EOFError, KeyboardInterrupt):
            write("\n")
        finally:
            self._calls.progress = progress
            self._ask("leave", number)

    def _with_source(self, number: int, text: str) -> str:
        """Return what pdb says with the line where it is, and show its process the file, which it does not have."""

        def line_of(place: re.Match[str]) -> str:
            lines = linecache.getlines(place["path"]) if _is_source(place["path"]) else []
            if not 0 < int(place["line"]) <= len(lines):
                return place[0]
            self._ask("show", number, place["path"], "".join(lines))
            return f"{place[0]}-> {''.join(lines[int(place['line']) - 1 : int(place['line'])]).strip()}\n"

        return _PLACE.sub(line_of, text)

    def _ask(self, operation: str, *arguments: Any) -> Any:
        return self._calls.ask(Debug(operation, arguments), key=None).get()


def _is_source(path: str) -> bool:
    """Return whether a file that pdb has named, in the cluster, is Python of this program or in its folder.

    The process there may name any file of this machine, and is sent the text of one that counts.
    """
    if path in linecache.cache or path in {getattr(module, "__file__", None) for module in [*sys.modules.values()]}:
        return True
    found = os.path.realpath(path)
    return found.endswith(".py") and Path(found).is_relative_to(os.path.realpath(os.getcwd()))
