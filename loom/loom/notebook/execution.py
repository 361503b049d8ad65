"""The execution of a cell in a session's driver: its code, the value of its last expression, and its traceback.

`run_cell` is a function for `Job.run`. All cells of a session share one namespace, which lives as long as the
driver. ``await`` works at top level; the event loop ends with the cell.

IPython's shell is not used: it would save the compiling and the tracebacks, and cost a driver half a second, 14 MiB
and 56 MB on disk. Its displays and tracebacks have no bounds, and it takes over the process's hooks.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import itertools
import keyword
import linecache
import os
import sys
import tokenize
import traceback
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from io import StringIO
from types import CodeType, TracebackType
from typing import Any

import loom.driver_api
from loom.notebook.displays import Record, display
from loom.wire.exceptions import last_lines


class CellJob:
    """The session, for a cell in its driver. Its meshes are Monarch's own, as those that `Job.run` passes."""

    @property
    def session(self) -> str:
        """The session's name."""
        return loom.driver_api.session().name

    @property
    def hosts(self) -> Any:
        """The Monarch host mesh of the worker hosts."""
        return loom.driver_api.session().host_mesh()

    @property
    def meshes(self) -> Mapping[str, Any]:
        """The session's Monarch proc and actor meshes by name; of two with one name, the newer."""
        return loom.driver_api.session().meshes()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"in the cluster, job has no {name!r}; it has hosts, meshes and session. "
            f"The notebook's own job has more: use it in a cell without %%cluster"
        )

    def __repr__(self) -> str:
        return f"<job of session {self.session!r} in its driver: hosts, meshes {', '.join(self.meshes) or 'none'}>"


class Namespace:
    """The global variables of all cells of a session."""

    def __init__(self) -> None:
        # Classes of this module's name travel by value, to workers too, as those of a notebook do.
        self.names: dict[str, object] = {
            "__name__": "__main__",
            "__builtins__": builtins,
            "job": CellJob(),
            "display": display,
        }
        self._given: dict[str, object] = {}  # the meshes that are in `names`

    def give_meshes(self) -> None:
        """Bring the names of meshes up to date. A name that a cell has assigned keeps the cell's value."""
        meshes = {name: mesh for name, mesh in loom.driver_api.session().meshes().items() if _is_usable(name)}
        for name, mesh in self._given.items():
            if name not in meshes and self.names.get(name) is mesh:
                del self.names[name]
        for name, mesh in meshes.items():
            if name not in self.names or self.names[name] is self._given.get(name):
                self.names[name] = mesh
        self._given = meshes


def _is_usable(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name) and not hasattr(builtins, name)


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


KEPT_SOURCES = 1000
"""Cells whose source is kept, for tracebacks of functions that they have defined."""


class _Cells:
    """The cells that have run in this driver."""

    def __init__(self) -> None:
        self.namespace = Namespace()
        self.numbers = itertools.count(1)
        self._sources: deque[str] = deque()

    def keep(self, name: str, source: str) -> None:
        """Make the source of a cell known to tracebacks; forget the oldest one."""
        # Without a time of change, so that `linecache` never looks for a file.
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        self._sources.append(name)
        if len(self._sources) > KEPT_SOURCES:
            linecache.cache.pop(self._sources.popleft(), None)


_cells: _Cells | None = None


def run_cell(source: str) -> Coroutine[Any, Any, None] | None:
    """Run a cell's source in the session's namespace; show the value of its last expression.

    The exception of the cell is raised, after its traceback has been shown. A cell with ``await`` at top level
    returns a coroutine, which runs it.

    Raises:
        RuntimeError: this process is no session's driver.
    """
    global _cells
    if _cells is None:
        loom.driver_api.session()  # raises outside of a driver
        os.environ.setdefault("MPLBACKEND", "module://loom.notebook.figures")
        _cells = _Cells()
    name = f"<%%cluster cell {next(_cells.numbers)}>"
    _cells.keep(name, source)
    names = _cells.namespace.names
    with _shown(name):
        _cells.namespace.give_meshes()
        codes = _compiled(source, name)
        if any(code.co_flags & inspect.CO_COROUTINE for code in codes):
            return _await(codes, name, names, quiet=_is_quiet(source))
        value = None
        for code in codes:
            value = eval(code, names)
        _show(value, names, quiet=_is_quiet(source))
    return None


async def _await(codes: Sequence[CodeType], name: str, names: dict[str, object], quiet: bool) -> None:
    with _shown(name):
        value = None
        for code in codes:
            value = eval(code, names)
            if code.co_flags & inspect.CO_COROUTINE:
                value = await value
        _show(value, names, quiet)


def _compiled(source: str, name: str) -> list[CodeType]:
    """Return the code of a cell's statements, and that of the expression at its end."""
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    tree = compile(source, name, "exec", ast.PyCF_ONLY_AST | flags, dont_inherit=True)
    codes: list[ast.Module | ast.Expression] = [tree]
    if tree.body and isinstance(last := tree.body[-1], ast.Expr):
        tree.body.pop()
        codes.append(ast.Expression(last.value))
    return [
        compile(code, name, "eval" if isinstance(code, ast.Expression) else "exec", flags, dont_inherit=True)
        for code in codes
    ]


def _is_quiet(source: str) -> bool:
    """Return whether a semicolon ends the cell, which keeps IPython from showing the last expression."""
    nothing = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER, tokenize.DEDENT)
    tokens = list(tokenize.generate_tokens(StringIO(source).readline))
    last = next((token for token in reversed(tokens) if token.type not in nothing), None)
    return last is not None and last.string == ";"


def _show(value: Any, names: dict[str, object], quiet: bool) -> None:
    if value is not None and not quiet:
        names["_"] = value
        display(value)


class _shown:  # noqa: N801
    """Show the figures that a cell leaves open, and the traceback of what it raises.

    `contextlib.contextmanager` sets the traceback of what the block raises, which a frozen class refuses.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            loom.driver_api.session().show(Record(traceback=traceback_text(error, self._name)).to_text())
        if "matplotlib.pyplot" in sys.modules:
            from loom.notebook import figures

            figures.show()
