"""The traceback of a cell that raised, in IPython's form: each frame with the lines around the one that ran."""

from __future__ import annotations

import builtins
import linecache
import traceback
from collections.abc import Iterator
from types import TracebackType

from loom.wire.exceptions import last_lines

AROUND = 2
"""Lines of source before the line that ran, and after it."""

MOST_FRAMES = 40
"""Frames of an exception that are shown: the first and the last ones."""

_GROUP = getattr(builtins, "BaseExceptionGroup", None)  # from Python 3.11 on

LARGEST = 64 << 10
"""Characters of a traceback; of a longer one the middle is left out."""


def traceback_text(error: BaseException, source_name: str) -> str:
    """Return the traceback of an exception, and of those that caused it, from the cell's own code on.

    Args:
        source_name: the file name of the cell's code.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != source_name:
        frames = frames.tb_next
    text = "\n".join(_chain(error, frames, set()))
    if len(text) > LARGEST:
        text = f"{text[: LARGEST // 2]}\n… {len(text) - LARGEST:,} characters left out …\n{text[-LARGEST // 2 :]}"
    return text


def _chain(error: BaseException, frames: TracebackType | None, seen: set[int]) -> Iterator[str]:
    seen.add(id(error))
    cause, context = error.__cause__, error.__context__
    if cause is not None and id(cause) not in seen:
        yield from _chain(cause, cause.__traceback__, seen)
        yield "\nThe above exception was the direct cause of the following exception:\n"
    elif context is not None and not error.__suppress_context__ and id(context) not in seen:
        yield from _chain(context, context.__traceback__, seen)
        yield "\nDuring handling of the above exception, another exception occurred:\n"
    yield "-" * 75
    if found := traceback.extract_tb(frames):
        yield f"{type(error).__name__:42}Traceback (most recent call last)"
    left_out = max(0, len(found) - MOST_FRAMES)
    for number, frame in enumerate(found):
        if number < MOST_FRAMES // 2 or number >= MOST_FRAMES // 2 + left_out:
            yield from _frame(frame)
        elif number == MOST_FRAMES // 2:
            yield f"… {left_out} frames left out …\n"
    if _GROUP is not None and isinstance(error, _GROUP):  # its exceptions follow in Python's own form
        yield "".join(traceback.format_exception(type(error), error, None, chain=False)).rstrip()
    else:
        yield last_lines(error)


def _frame(frame: traceback.FrameSummary) -> Iterator[str]:
    line = frame.lineno or 0
    where = "" if frame.name == "<module>" else f", in {frame.name}"
    yield f"{frame.filename}, line {line}{where}"
    lines = linecache.getlines(frame.filename)
    for number in range(max(1, line - AROUND), min(len(lines), line + AROUND) + 1):
        mark = "---->" if number == line else "     "
        yield f"{mark} {number:<4} {lines[number - 1].rstrip()}".rstrip()
    yield ""
