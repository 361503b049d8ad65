"""The execution of a cell in a session's driver: its code, the value of its last expression, and its traceback.

`run_cell` is a function for `Job.run`. All cells of a session share one namespace, which lives as long as the
driver. ``await`` works at top level; the event loop ends with the cell.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import linecache
import os
import sys
import tokenize
from collections import deque
from collections.abc import Coroutine, Sequence
from io import StringIO
from types import CodeType
from typing import Any

import loom.beside
from loom.cells.displays import display
from loom.cells.namespace import Namespace
from loom.cells.records import Record
from loom.cells.tracebacks import traceback_text

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

    What the cell raises is raised, after its traceback has been shown. A cell with ``await`` at top level returns a
    coroutine, which runs it.

    Raises:
        RuntimeError: this process is no session's driver.
    """
    global _cells
    if _cells is None:
        loom.beside.session()  # raises outside of a driver
        os.environ.setdefault("MPLBACKEND", "module://loom.cells.figures")
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


async def _await(codes: Sequence[CodeType], name: str, names: dict[str, Any], quiet: bool) -> None:
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


def _show(value: Any, names: dict[str, Any], quiet: bool) -> None:
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
            loom.beside.session().show(Record(traceback=traceback_text(error, self._name)).to_text())
        if "matplotlib.pyplot" in sys.modules:
            from loom.cells import figures

            figures.show()
