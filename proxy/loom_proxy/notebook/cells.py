"""IPython's ``%%cluster``, which runs a cell in a session's driver, and ``%cluster``, which follows or ends one.

A cell is a run of `loom.notebook.run_cell`, named `loom.notebook.RUN_NAME`. Its source, and nothing else, travels
there. `CellView` shows its output as it comes, its displays, and its traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import shlex
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pkgutil import resolve_name
from typing import Any, NoReturn

from loom.errors import (
    LoomError,
    NameTaken,
    NoSuchRun,
    OperationCancelled,
    ProtocolMismatch,
    WaitTimeout,
    WrongState,
    describe_error,
)
from loom.notebook import RUN_NAME, Record
from loom.terminal_text import fit_lines
from loom.wire.bodies import RECORD, STDERR, STDOUT
from loom_proxy.job import Job
from loom_proxy.kubernetes.job import KubernetesJob
from loom_proxy.logs import print_text
from loom_proxy.port_receiver import open_jobs
from loom_proxy.runs import RunHandle, RunOutput

MOST_TEXT = 4 << 20
"""Characters of a cell's text that are shown as they come; of further ones only the last `TAIL`, at the end."""

MOST_RECORDS = 64 << 20
"""Characters of a cell's displays that are shown; further displays are only counted."""

TAIL = 16 << 10

SOON = 2.0
"""Seconds after an interrupt in which a cell ends without a word about it."""

INTERRUPTED = "interrupted; the cell ends when it next runs Python code. Interrupt again to stop waiting for it.\n"

HOW_TO_GO_ON = "`%cluster --attach` follows it, `%cluster --interrupt` interrupts it"


def start(job: Job, source: str) -> RunHandle:
    """Start a cell in a job's session.

    Raises:
        RunNameTaken: another cell of the session is running.
        ReadOnlySession: the job only watches its session.
        ProtocolMismatch: the gateway's Loom is too old.
    """
    if not job._calls.knows_cells:
        version = job.versions.get("monarch-loom", "older")
        what_to_do = "upgrade the gateway, and open a new session"
        raise ProtocolMismatch(f"session {job.session!r} runs no cells: its Loom is {version}; {what_to_do}")
    # The driver refuses a second one too, but then that one would be the last cell, which `last` finds.
    before = job.runs().get(RUN_NAME)
    if before is not None and not before.done():
        raise _busy()
    run: RunHandle = job.run(_RunCell(), source, detach=True, name=RUN_NAME)
    if before is not None:
        before.forget()  # no name finds it any more, and it would push out the results of other runs
    return run


class _RunCell:
    """`loom.notebook.run_cell`, by the name that drivers of the version before have, too."""

    def __call__(self, source: str) -> None:
        raise AssertionError("it becomes the driver's function when it is unpickled there")

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        return resolve_name, ("loom.cells:run_cell",)


def _busy() -> NameTaken:
    return NameTaken(
        f"a cell of this session is still running, and a session runs one at a time: {HOW_TO_GO_ON}",
        code="run_name_taken",
    )


def last(job: Job) -> RunHandle:
    """Return the cell that runs in a job's session, else the one that ran last.

    Raises:
        NoSuchRun: no cell ran.
    """
    run = job.runs().get(RUN_NAME)
    if run is None:
        raise NoSuchRun(f"no cell has run in session {job.session!r}: %%cluster runs one")
    return run


def interrupt(job: Job) -> None:
    """Interrupt the cell that is running in a job's session, as `RunHandle.cancel` does.

    Raises:
        WrongState: no cell is running.
    """
    if not last(job).cancel():
        raise WrongState(f"no cell is running in session {job.session!r}")


def chosen_job(name: str | None, variables: Mapping[str, Any]) -> Job:
    """Return the open job of a name, or the only one.

    Args:
        name: name of a variable that holds a job, or of a session.
        variables: the notebook's variables.

    Raises:
        NoOpenJob: no job is open, several are and there is no name, or the name is of none of them.
    """
    found = [job for job in open_jobs if isinstance(job, Job) and not job.closed]
    if not found:
        text = "no job is open in this notebook: begin with job = loom.connect() or job = loom.local()"
        raise WrongState(text, code="no_open_job")
    if name is None and len(found) == 1:
        return found[0]
    by_name = {job.session: job for job in found}
    for variable, value in variables.items():
        job = value._job if isinstance(value, KubernetesJob) else value
        if not variable.startswith("_") and isinstance(job, Job) and job in found:
            by_name[variable] = job
    if name in by_name:
        return by_name[name]
    names = ", ".join(
        called if called == job.session else f"{called} (session {job.session})" for called, job in by_name.items()
    )
    what = "several jobs are open" if name is None else f"no open job is called {name!r}"
    raise WrongState(f"{what}; --job NAME takes one of: {names}", code="no_open_job")


RESTARTS_WITHIN = 1.0
"""Seconds from Jupyter's interrupt of a kernel until it tells it to end, at most."""


class CellView:
    """Shows a cell's output in this notebook.

    Args:
        publish: shows a display.
        interrupting: whether an interrupt of the kernel interrupts the cell too.
        ending: whether the kernel ends.
    """

    def __init__(
        self,
        run: RunHandle,
        publish: Callable[[Record], object],
        interrupting: bool,
        ending: Callable[[], bool] = lambda: False,
    ) -> None:
        self._run = run
        self._publish = publish
        self._interrupting = interrupting
        self._ending = ending
        self._interrupted = False
        self._output = RunOutput(run)
        self._unshown: deque[tuple[int, str]] = deque()  # of what was read; an interrupt leaves the rest here
        self._text_left = MOST_TEXT
        self._records_left = MOST_RECORDS
        self._left_out = 0  # characters of text that were not shown
        self._tail = ""  # the last ones of them
        self._displays_left_out = 0
        self._traceback = ""

    def follow(self, timeout: float | None = None) -> None:
        """Show what the cell has put out, and go on until it ends.

        Args:
            timeout: seconds to wait at most; None waits for ever.

        Raises:
            Exception: what the cell raised, which IPython shows with the traceback of the cell.
            KeyboardInterrupt: the kernel was interrupted.
            OperationCancelled: another program interrupted the cell.
            WaitTimeout: the time is up; the cell goes on.
            LoomError: the session or the connection failed.
        """
        until = None if timeout is None else time.monotonic() + timeout
        try:
            self._follow(until)
        except KeyboardInterrupt:
            if not self._interrupting:
                raise _shown_as(
                    KeyboardInterrupt(f"stopped following the cell, which goes on in the cluster: {HOW_TO_GO_ON}")
                ) from None
            self._interrupt()
        except WaitTimeout:
            raise WaitTimeout(f"the cell is still running after {timeout:g} s: {HOW_TO_GO_ON}") from None
        self._end()

    def _follow(self, until: float | None) -> None:
        while self._unshown or not self._output.ended:
            while self._unshown:
                self._take(*self._unshown.popleft())
            if not self._output.ended:
                self._unshown.extend(self._output.read(_left(until)))
            if self._text_left <= 0 and not self._output.ended:
                self._run.exception(_left(until))  # the driver keeps the end of the text until it is read

    def _interrupt(self) -> None:
        if self._is_restart():
            raise _shown_as(KeyboardInterrupt(f"the kernel ends, and the cell goes on: {HOW_TO_GO_ON}")) from None
        self._interrupted = True
        try:
            self._run.cancel()
            with contextlib.suppress(WaitTimeout):
                return self._follow(time.monotonic() + SOON)
            self._write(STDERR, INTERRUPTED)
            self._follow(None)
        except KeyboardInterrupt:
            raise _shown_as(
                KeyboardInterrupt(f"stopped waiting for the cell, which has not ended yet: {HOW_TO_GO_ON}")
            ) from None

    def _is_restart(self) -> bool:
        """Wait for a moment whether the kernel was interrupted because it is to end, as Jupyter does."""
        until = time.monotonic() + RESTARTS_WITHIN
        with contextlib.suppress(KeyboardInterrupt):  # a second one is meant for the cell
            while not self._ending() and time.monotonic() < until:
                time.sleep(0.01)
        return self._ending()

    def _take(self, stream: int, text: str) -> None:
        if stream == RECORD:
            self._show(text)
            return
        shown, rest = text[: self._text_left], text[self._text_left :]
        self._text_left -= len(shown)
        self._write(stream, shown)
        if rest:
            if not self._left_out:
                self._write(
                    2, f"\n… more than {MOST_TEXT:,} characters; the last ones follow at the cell's end …\n"
                )
            self._left_out += len(rest)
            self._tail = (self._tail + rest)[-TAIL:]

    @staticmethod
    def _write(stream: int, text: str) -> None:
        print_text("stdout" if stream == STDOUT else "stderr", text)

    def _show(self, text: str) -> None:
        record = Record.from_text(text)
        if record.traceback:
            self._traceback = record.traceback
        elif len(text) > self._records_left:
            self._displays_left_out += 1
        else:
            self._records_left -= len(text)
            self._publish(record)

    def _end(self) -> None:
        """Show the end of long output; raise what the cell raised."""
        if self._tail:
            self._write(STDOUT, self._tail)
        if self._displays_left_out:
            self._write(
                2, f"… {self._displays_left_out} displays left out: more than {MOST_RECORDS:,} characters …\n"
            )
        error = self._run.exception()
        if error is None:
            return
        if isinstance(error, OperationCancelled):
            if not self._interrupted:
                error = OperationCancelled("another program interrupted the cell")
            else:
                error = KeyboardInterrupt("the cell was interrupted in the cluster")
            raise _shown_as(error, f"{self._traceback}\n\n{describe_error(error)}".lstrip())
        if isinstance(error, NameTaken) and not self._traceback:
            raise _busy()  # another program was quicker
        raise _shown_as(error, self._traceback) if self._traceback else error


def _left(until: float | None) -> float | None:
    return None if until is None else max(0.0, until - time.monotonic())


def _shown_as(error: BaseException, text: str = "") -> BaseException:
    """Return an exception that IPython shows as a text, instead of with this program's own frames."""
    lines = (text or fit_lines(describe_error(error))).splitlines()
    with contextlib.suppress(AttributeError):  # of a class with slots
        error._render_traceback_ = lambda: lines  # type: ignore[attr-defined]
    return error


@contextlib.contextmanager
def short_errors() -> Iterator[None]:
    """Let IPython show Loom's own errors as one line."""
    try:
        yield
    except LoomError as error:
        if "_render_traceback_" not in vars(error):  # the lines of `_shown_as`
            _shown_as(error)
        raise


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
