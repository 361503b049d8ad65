"""Failures in the cluster as a notebook's cell shows them: with the user's lines, and without Loom's and Monarch's.

IPython calls ``_render_traceback_`` of an exception. The frames in the cluster come as text, in which classes of
cells have no source; `linecache` has it here, where the cells ran.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from loom.terminal_text import fit_lines

INTERNAL_VARIABLE = "LOOM_INTERNAL_FRAMES"
"""The environment variable that is 1 if Loom's and Monarch's own frames are shown."""

HIDDEN = "Loom's and Monarch's own frames are hidden: loom.show_internal_frames() shows them"

AROUND = 2
"""Lines of source that are shown before and after that of a frame."""

_FRAME = re.compile(r'^\s*(?:\| )?File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>.*)$')
_INTERNAL = re.compile(
    r"[/\\](?:site-packages|dist-packages)[/\\](?:loom|loom_proxy|loom_gateway|monarch)[/\\]"
    r"|[/\\](?:loom[/\\]loom|proxy[/\\]loom_proxy|gateway[/\\]loom_gateway)[/\\]"
)
_CALL = re.compile(r"Actor call (\S+) failed")


class SourceFrame(NamedTuple):
    """A frame of a traceback."""

    file: str
    line: int
    function: str
    source: tuple[str, ...] = ()
    """The lines that the traceback itself has of it."""

    @property
    def internal(self) -> bool:
        """True if it is one of Loom's or Monarch's."""
        return _INTERNAL.search(self.file) is not None or self.file.startswith("<frozen ")


_shows_internal: bool | None = None


def show_internal_frames(show: bool = True) -> None:
    """Show Loom's and Monarch's own frames in the tracebacks of notebooks, too, or hide them again.

    They are hidden unless ``LOOM_INTERNAL_FRAMES`` is 1.
    """
    global _shows_internal
    _shows_internal = show


def render(error: BaseException, head: str, remote: str) -> list[str]:
    """Return the lines that a notebook shows of a failure.

    Args:
        head: the first line.
        remote: the traceback in the cluster, as text; "" if there is none.
    """
    there, here = list(read_frames(remote)), list(_frames_of(error))
    shown = os.environ.get(INTERNAL_VARIABLE) == "1" if _shows_internal is None else _shows_internal
    own_there, own_here = _own(there, shown), _own(here, shown)
    lines = [head]
    for title, frames in (("In the cluster:", own_there), ("Called here:", own_here)):
        if frames:
            lines += ["", title, *(line for frame in frames for line in _shown(frame))]
    if len(own_there) + len(own_here) < len(there) + len(here):
        lines += ["", HIDDEN]
    return fit_lines("\n".join(lines)).splitlines()


def head_of(place: str, message: str, text: str) -> str:
    """Return the first line of an endpoint's failure: ``rank 1 (gpus=1) of trainers.boom: KeyError: 'missing'``."""
    call = found[1] if (found := _CALL.search(message)) else "a call"
    return f"{f'{place} of ' if place else ''}{call}: {text}"


def read_frames(text: str) -> Iterator[SourceFrame]:
    """Yield the frames of a traceback that Python has written."""
    frame: SourceFrame | None = None
    for line in text.splitlines():
        if found := _FRAME.match(line):
            if frame is not None:
                yield frame
            frame = SourceFrame(found["file"], int(found["line"]), found["function"])
        elif frame is not None and line.startswith("    "):
            frame = frame._replace(source=(*frame.source, line.strip("\n")))
        elif frame is not None:
            yield frame
            frame = None
    if frame is not None:
        yield frame


def _frames_of(error: BaseException) -> Iterator[SourceFrame]:
    for found in traceback.extract_tb(error.__traceback__):
        if "IPython" not in found.filename:
            yield SourceFrame(found.filename, found.lineno or 0, found.name)


def _own(frames: Iterable[SourceFrame], all_of_them: bool) -> list[SourceFrame]:
    """Return the frames to show. If all are internal, these are all there is to see."""
    found = list(frames)
    return (found if all_of_them else [frame for frame in found if not frame.internal]) or found


def _shown(frame: SourceFrame) -> Iterator[str]:
    yield f"  {_place(frame.file)}, line {frame.line}, in {frame.function}"
    lines = linecache.getlines(frame.file)
    told = frame.source[0].strip() if frame.source else None
    if not 0 < frame.line <= len(lines) or told not in (None, lines[frame.line - 1].strip()):
        # The file is not here, or is another one.
        yield from frame.source
        return
    for number in range(max(1, frame.line - AROUND), min(len(lines), frame.line + AROUND) + 1):
        mark = "---->" if number == frame.line else "     "
        yield f"  {mark} {number:>4} {lines[number - 1].rstrip()}"


def _place(file: str) -> str:
    """Return the name of a file, or of a cell: ``Cell In[3]``."""
    shell: Any = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    named = None if shell is None else shell.compile.format_code_name(file)
    return f'File "{file}"' if named is None else " ".join(named)
