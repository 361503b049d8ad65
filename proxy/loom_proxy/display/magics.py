"""IPython's ``%%cluster``, which runs a cell in a session's driver, and ``%cluster``, which follows or ends one."""

from __future__ import annotations

import argparse
import functools
import shlex
from importlib import import_module
from typing import Any, NoReturn

from loom.cells import Record
from loom_proxy.display.cells import CellView, chosen_job, interrupt, last, short_errors, start

USAGE = """%%cluster [--job NAME] [--timeout SECONDS]

Run this cell in the session's driver, next to the meshes. Its names live as long as the session: `job`, with hosts
and meshes, and each mesh by its name are there. Output and displays appear here; so does the value of the last
expression. Interrupting the kernel interrupts the cell, when it next runs Python code. It goes on through a
restart of the kernel.

%cluster --attach [--job NAME] [--timeout SECONDS]

Show what the session's last cell has put out, and follow it until it ends. Interrupting this leaves it running.

%cluster --interrupt [--job NAME]

Interrupt the session's cell that is running.

--job NAME         a variable that holds a job, or a session's name; needed if several jobs are open
--timeout SECONDS  stop waiting after this long; the cell goes on
"""


def load_ipython_extension(ipython: Any) -> None:
    """Define ``%%cluster`` and ``%cluster``. For ``%load_ext loom``."""

    def cluster(line: str, cell: str | None = None) -> None:
        _cluster(ipython, line, cell)

    cluster.__doc__ = USAGE
    ipython.register_magic_function(cluster, magic_kind="line_cell", magic_name="cluster")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _usage_error(message)


def _usage_error(message: str) -> Exception:
    error: Exception = import_module("IPython.core.error").UsageError(f"{message}\n\n{USAGE}")
    return error


def _parser() -> _Parser:
    parser = _Parser("cluster", add_help=False, allow_abbrev=False)
    parser.add_argument("--job")
    parser.add_argument("--timeout", type=float)
    parser.add_argument("--attach", action="store_true")
    parser.add_argument("--interrupt", action="store_true")
    return parser


def _cluster(ipython: Any, line: str, cell: str | None) -> None:
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise _usage_error(str(error)) from None
    options = _parser().parse_args(words)
    if options.timeout is not None and not options.timeout > 0:
        raise _usage_error(f"--timeout takes seconds, more than 0, not {options.timeout:g}")
    asked = options.attach + options.interrupt
    if (cell is not None and asked) or (cell is None and asked != 1):
        raise _usage_error("%%cluster takes a cell; %cluster takes either --attach or --interrupt")
    with short_errors():
        job = chosen_job(options.job, ipython.user_ns)
        if options.interrupt:
            interrupt(job)
            return
        run = last(job) if cell is None else start(job, cell)
        progress, job.progress = job.progress, False  # the cell's own output shows how far it is
        try:
            ending = functools.partial(getattr, ipython, "exit_now", False)  # a kernel is told on another thread
            CellView(run, _publish, cell is not None, ending).follow(options.timeout)
        finally:
            job.progress = progress


def _publish(record: Record) -> None:
    import_module("IPython.display").publish_display_data(dict(record.data), dict(record.metadata))
