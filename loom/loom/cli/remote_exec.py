"""``loom exec``, ``shell``, ``cp``, ``forward`` and ``debug``: hands on the processes of a session."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loom.cli.options import Access, Json, asking, only_session
from loom.cli.output import say, say_lines, show
from loom.cli.sessions import tree
from loom.errors import LoomError, NoSuchMesh, WrongArguments

if TYPE_CHECKING:
    from loom_proxy.remote_exec.copies import CopyProgress
    from loom_proxy.remote_exec.execution import Execution, RankOutput


@asking
def debug(
    access: Access,
    actor: Annotated[str | None, typer.Argument(help="Attach to this actor mesh at once.")] = None,
    rank: Annotated[int, typer.Argument(min=0, help="The rank to attach to.")] = 0,
    session: Annotated[str | None, typer.Option(help="Name of a session; not needed if only one lives.")] = None,
    wait: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="First wait until an actor stops.")
    ] = None,
    only_list: Annotated[bool, typer.Option("--list", help="Only list the actors that have stopped.")] = False,
    as_json: Json = False,
) -> None:
    """Debug a session's actors: breakpoint() in an endpoint stops there. The token must be one that may drive.

    The program that drives the session goes on beside. `help` lists the commands, such as `attach NAME RANK`,
    `cast NAME ranks(0,2) n` and `continue`. `quit`, or Ctrl-D, leaves what has stopped as it is.
    """
    name = session or only_session(access.gateway())
    job = access.connect(name, "debug")
    with job:
        job.print_logs = False
        if wait is not None:
            job.debugger.wait(wait)
        if only_list or as_json:
            found = [asdict(each) for each in job.debugger.breakpoints()]
            columns = ["actor", "rank", "host", "function", "line"]
            rows = [
                [one[name] for name in ("actor_name", "rank", "hostname", "function", "lineno")] for one in found
            ]
            show(as_json, {"breakpoints": found}, "actors that have stopped", columns, rows)
            return
        job.debugger.interact(*([] if actor is None else [f"attach {actor} {rank}"]))


Mesh = Annotated[
    str | None, typer.Option("--mesh", help="Name of a mesh of processes or actors; not needed if there is one.")
]
Rank = Annotated[int, typer.Option("--rank", min=0, help="The rank in the mesh.")]
Session = Annotated[str | None, typer.Option(help="Name of a session; not needed if only one lives.")]
Away = Annotated[
    float,
    typer.Option(min=1, metavar="SECONDS", help="How long it goes on there when this machine cannot be reached."),
]

PASSED_ON = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""The signals that `exec` passes on to the command. The second SIGINT kills it, the third ends `exec` itself."""


@asking
def exec_(
    access: Access,
    command: Annotated[list[str], typer.Argument(help="The command and its arguments, after --.")],
    mesh: Mesh = None,
    rank: Annotated[int | None, typer.Option(min=0, help="The rank in the mesh; every rank without it.")] = None,
    stdin: Annotated[bool, typer.Option("--stdin", "-i", help="Pass on the standard input.")] = False,
    session: Session = None,
    away: Away = 300.0,
) -> None:
    """Run a command in the environment of ranks. The exit status is the command's, the highest of all ranks.

    Lines of several ranks begin with the rank. Ctrl-C interrupts the command, and kills it the second time.
    """
    from loom_proxy.remote_exec.methods import RankMethods

    with _reached(access, session, mesh) as found, RankMethods.exec(found, command, rank, away=away) as execution:
        if stdin:
            threading.Thread(target=_pass_input, args=(execution,), daemon=True).start()
        else:
            execution.close_input()
        show = _Lines() if len(execution.ranks) > 1 else _write
        with _signals_to(execution):
            for output in execution.output():
                show(output)
        if isinstance(show, _Lines):
            show.end()
        failed = {rank: one for rank, one in execution.finished.items() if isinstance(one, LoomError)}
        for rank, error in sorted(failed.items()):
            say_lines(f"rank {rank}: {error}", err=True)
        known = [one.status for one in execution.finished.values() if not isinstance(one, LoomError)]
        raise typer.Exit(max([*known, *(error.exit_status for error in failed.values())]))


@asking
def shell(
    access: Access,
    command: Annotated[list[str] | None, typer.Argument(help="Another command than the shell, after --.")] = None,
    mesh: Mesh = None,
    rank: Rank = 0,
    session: Session = None,
    away: Away = 300.0,
) -> None:
    """Open a terminal in the environment of a rank. It goes on through a cut of the line; Enter ~ . leaves it."""
    from loom_proxy.remote_exec.methods import RankMethods

    with _reached(access, session, mesh) as found:
        raise typer.Exit(RankMethods.shell(found, rank, command or [], away=away))


@asking
def cp(
    access: Access,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="PATH here, or RANK:PATH.")],
    destination: Annotated[str, typer.Argument(metavar="DESTINATION", help="RANK:PATH, or PATH here.")],
    mesh: Mesh = None,
    session: Session = None,
) -> None:
    """Copy a file or a folder to a rank's host or from there: `loom cp data.json 3:/tmp`, `loom cp 3:run.log x`."""
    from loom_proxy.remote_exec.methods import RankMethods

    here, there = _rank_and_path(source), _rank_and_path(destination)
    if (here is None) == (there is None):
        raise WrongArguments("one of the two paths is on a rank, as in 3:/tmp/run.log, and the other one is here")
    progress = _Progress()
    with _reached(access, session, mesh) as found:
        if there is not None:
            copy = RankMethods.copy_to(found, source, there[1], there[0], on_progress=progress)
        else:
            assert here is not None
            copy = RankMethods.copy_from(found, here[1], destination, here[0], on_progress=progress)
    progress.end()
    say(copy)


@asking
def forward(
    access: Access,
    port: Annotated[int, typer.Argument(min=1, max=65535, help="A port of the rank's host.")],
    mesh: Mesh = None,
    rank: Rank = 0,
    local: Annotated[
        int | None, typer.Option(min=0, max=65535, help="The port here, 0 for a free one; the same without it.")
    ] = None,
    address: Annotated[
        str, typer.Option(help="The address here; other machines reach no loopback one.")
    ] = "127.0.0.1",
    session: Session = None,
) -> None:
    """Forward a port of a rank's host to this machine, until Ctrl-C."""
    from loom_proxy.remote_exec.methods import RankMethods

    def refused(error: LoomError) -> None:
        say_lines(f"{error}", err=True)

    with (
        _reached(access, session, mesh) as found,
        RankMethods.forward(found, port, rank, local_port=local, address=address, on_refused=refused) as open_port,
        contextlib.suppress(KeyboardInterrupt),
    ):
        say(f"{address}:{open_port.port} leads to port {port} of rank {rank}; Ctrl-C ends it")
        open_port.wait()


@contextlib.contextmanager
def _reached(access: Access, session: str | None, mesh: str | None) -> Iterator[Any]:
    """Yield a mesh of a session, to which this program connects next to the driving one."""
    gateway = access.gateway()
    with access.connect(session or only_session(gateway), "ranks") as job:
        job.print_logs = False
        yield _mesh(dict(job.meshes), mesh, lambda: gateway.meshes(job.session))


def _mesh(meshes: Mapping[str, Any], name: str | None, shown: Callable[[], Mapping[str, Any]]) -> Any:
    """Return the mesh with a name, or the only one of processes. ``shown`` asks for all, also those stopped."""
    from loom_proxy.mesh.procs import ProcMeshProxy

    if name is not None and name in meshes:
        return meshes[name]
    known = ", ".join(sorted(meshes)) or "none"
    if name is not None:
        stopped = any(one["name"] == name and one["stopped"] for _, one in tree(shown()["hosts"]))
        found = f"mesh {name!r} was stopped" if stopped else f"there is no mesh {name!r}"
        raise NoSuchMesh(f"{found}; the session's meshes: {known}")
    procs = {
        one: mesh for one, mesh in meshes.items() if isinstance(mesh, ProcMeshProxy) and not mesh._whole.stopped
    }
    if len(procs) == 1:
        return next(iter(procs.values()))
    if not procs:
        raise NoSuchMesh(f"the session has no mesh of processes; its meshes: {known}")
    raise NoSuchMesh(f"choose with --mesh one of the session's meshes of processes: {', '.join(sorted(procs))}")


def _rank_and_path(text: str) -> tuple[int, str] | None:
    rank, colon, path = text.partition(":")
    if not colon or not rank.isdecimal() or not path:
        return None
    return int(rank), path


def _pass_input(execution: Execution) -> None:
    with contextlib.suppress(LoomError):  # the command or the session is over
        with contextlib.suppress(OSError, ValueError, AttributeError):  # there is no input, or it has gone
            while data := os.read(sys.stdin.fileno(), 1 << 16):
                execution.write(data)
        execution.close_input()


@contextlib.contextmanager
def _signals_to(execution: Execution) -> Iterator[None]:
    """Pass this program's signals on to the command."""
    # A handler may interrupt any other code, so that a thread sends them.
    came: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    interrupts = itertools.count(1)

    def take(number: int, frame: object) -> None:
        interrupted = next(interrupts) if number == signal.SIGINT else 0
        if interrupted > 2:
            raise KeyboardInterrupt
        came.put(signal.SIGKILL if interrupted == 2 else number)

    def pass_on() -> None:
        with contextlib.suppress(LoomError):  # the session is over
            while (number := came.get()) is not None:
                execution.signal(number)

    before = {number: signal.signal(number, take) for number in PASSED_ON}
    thread = threading.Thread(target=pass_on, daemon=True)
    thread.start()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        came.put(None)


def _write(output: RankOutput) -> None:
    stream = sys.stdout if output.stream == "stdout" else sys.stderr
    stream.buffer.write(output.data)
    stream.flush()


class _Lines:
    """Writes whole lines of several ranks, each behind its rank."""

    def __init__(self) -> None:
        self._begun: dict[tuple[int, str], bytes] = {}

    def __call__(self, output: RankOutput) -> None:
        key = output.rank, output.stream
        *lines, rest = (self._begun.pop(key, b"") + output.data).split(b"\n")
        if rest:
            self._begun[key] = rest
        if lines:
            text = b"".join(b"[%d] %s\n" % (output.rank, line) for line in lines)
            _write(output._replace(data=text))

    def end(self) -> None:
        """Write the lines that have no end."""
        from loom_proxy.remote_exec.execution import RankOutput

        for (rank, stream), line in sorted(self._begun.items()):
            _write(RankOutput(rank, stream, b"[%d] %s\n" % (rank, line)))


class _Progress:
    """Shows the progress of a copy in one line of a terminal."""

    EVERY = 0.2  # seconds

    def __init__(self) -> None:
        self._shown = 0.0
        self._shows = sys.stderr.isatty()

    def __call__(self, progress: CopyProgress) -> None:
        now = time.monotonic()
        if self._shows and now - self._shown > self.EVERY:
            self._shown = now
            typer.echo(f"\r{progress.files} files, {progress.size / 1e6:.1f} MB", err=True, nl=False)

    def end(self) -> None:
        if self._shown:
            typer.echo("\r\033[K", err=True, nl=False)
