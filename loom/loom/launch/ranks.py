"""The ranks of a command on the hosts of a cluster, and the function in the driver that waits for them.

Each rank is a process of a mesh, which has its place by the variables of ``torchrun``. It starts the command as a
child, which has its output and dies with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

import loom
from loom.actor import Actor, concurrent_endpoint, endpoint
from loom.control.address import ADDRESS_VARIABLE, weaver_address
from loom.control.run_start import CODE_VARIABLE, COMMAND_VARIABLE, PLACE_VARIABLE, START_VARIABLE
from loom.errors import EnvironmentFailed, LoomError
from loom.launch.environment import HostEnvironment, enter, environment_on_this_host, usable_cache
from loom.launch.project import PackageList
from loom.manifest import SYNCED_AT
from loom.process.parent_pipe import killed_with_pipe
from loom.terminal_text import fit_line

GRACE = 10.0
"""Seconds that a rank's command has to end after SIGTERM; then it is killed."""

ANSWERS_WITHIN = 10.0
"""Seconds that living ranks have to answer at the end."""

NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""The exit codes of a shell for a command that it cannot start."""

_OF_THE_MESH = ("LOOM_PROCS", "LOOM_MESH", "LOOM_RANK", "LOOM_REPLICA", "LOOM_GROUP", "LOOM_SIGTERM_EVICTS")
"""Variables that make a process a replica of its mesh. The command's are replicas of the run."""

_PACKAGE = Path(loom.__file__).parent

_PYTHONS = ("python", "python3")


@dataclass(frozen=True)
class Launch:
    """A command that runs on ranks."""

    run: str
    """The id of its run."""
    name: str
    """The name of the run, which is its replicas' group."""
    command: tuple[str, ...]
    shown: tuple[str, ...]
    """The command without its secrets, for the weaver."""
    tree: str
    """The digest of the synced folder."""
    inside: str
    """The command's working folder in the tree; "" is the tree itself."""
    packages: PackageList | None
    """The packages of its environment; None runs it in the workers' own."""
    code: Mapping[str, Any]
    """What git says of the folder, on the machine that it comes from."""
    alone: bool
    """True if each host has one rank: a launcher such as torchrun may be the command."""


class RanksEnd(NamedTuple):
    """The end of a command on its ranks."""

    status: int
    """The exit status of the rank that failed first; 0 if none has."""
    rank: int | None = None
    """That rank."""


class LaunchedRank(Actor):
    """A rank of a command."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._environment: HostEnvironment | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._ended = False

    @concurrent_endpoint
    async def prepare(self) -> tuple[int, HostEnvironment | None, str]:
        """Make the environment and the folder, unless another rank of the host has; return (rank, it, error)."""
        try:
            if self._launch.packages is not None:
                self._environment = await asyncio.to_thread(environment_on_this_host, self._launch.packages)
            self._folder = await asyncio.to_thread(_folder_on_this_host, self._launch)
        except LoomError as error:
            return _rank(), None, str(error)
        except OSError as error:
            return _rank(), None, f"the folder of the run cannot be made: {error}"
        return _rank(), self._environment, ""

    @concurrent_endpoint
    async def run(self) -> tuple[int, int]:
        """Run the command; return the rank and its exit status."""
        alive, ours = os.pipe()
        try:
            self._child = self._start(alive)
            status = await asyncio.to_thread(self._child.wait)
        except OSError as error:
            sys.stderr.write(fit_line(f"cannot run {self._launch.command[0]}: {error.strerror}") + "\n")
            sys.stderr.flush()
            status = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
        finally:
            os.close(alive)
            os.close(ours)  # kills what it has left running
        return _rank(), status if status >= 0 else 128 - status

    @concurrent_endpoint
    async def end(self) -> None:
        """Let the command end by SIGTERM, and kill it if it does not."""
        self._ended = True
        if (child := self._child) is None or child.poll() is not None:
            return
        _signal(child, signal.SIGTERM)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(child.wait, GRACE + 1), GRACE)
        if child.poll() is None:
            _signal(child, signal.SIGKILL)

    @concurrent_endpoint
    async def tidy(self) -> None:
        """Remove the files that the command has left as they were, and the folder if it is empty then."""
        if _local_rank() == 0:
            await asyncio.to_thread(_remove_unchanged, self._folder)

    def _start(self, alive: int) -> subprocess.Popen[bytes]:
        environment = self._variables()
        program, *arguments = self._launch.command
        python = self._environment.python if self._environment else sys.executable
        if program.endswith(".py"):
            program, arguments = python, [program, *arguments]
        elif program in _PYTHONS:
            program = python
        elif (found := shutil.which(program, path=environment["PATH"])) is None and not (
            "/" in program and (self._folder / program).exists()
        ):
            raise FileNotFoundError(2, "no such program on this host", program)
        else:
            program = found or program
        return subprocess.Popen(
            killed_with_pipe([program, *arguments], alive),
            cwd=self._folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[alive],
        )

    def _variables(self) -> dict[str, str]:
        launch, given = self._launch, {name: one for name, one in os.environ.items() if name not in _OF_THE_MESH}
        members = ("", *(launch.packages.members if launch.packages else ()))
        sources = [root for member in members for root in (self._folder / member / "src", self._folder / member)]
        before = [one for one in given.get("PYTHONPATH", "").split(os.pathsep) if one and launch.tree not in one]
        programs = os.path.dirname(self._environment.python if self._environment else sys.executable)
        found = {
            **given,
            "PATH": os.pathsep.join([programs, given.get("PATH", os.defpath)]),
            "PYTHONPATH": os.pathsep.join(
                [str(_PACKAGE / "instrument" / "site"), *(str(one) for one in sources if one.is_dir()), *before]
            ),
            "PYTHONUNBUFFERED": "1",
            "LOOM_PACKAGES": os.pathsep.join({str(_PACKAGE.parent), str(Path(msgpack.__file__).parents[1])}),
            "LOOM_RUN": launch.name,
            START_VARIABLE: launch.run,
            **({COMMAND_VARIABLE: json.dumps(launch.shown)} if launch.shown else {}),
            CODE_VARIABLE: json.dumps({**launch.code, "tree": launch.tree}),
        }
        if (procs := os.environ.get("LOOM_PROCS")) is not None:
            found[PLACE_VARIABLE] = procs
        if weaver := weaver_address():
            found[ADDRESS_VARIABLE] = weaver
        if self._environment:
            found["VIRTUAL_ENV"] = self._environment.folder
        if launch.alone:
            found |= _for_torchrun(given)
        return found


def _for_torchrun(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which a ``torchrun`` on each host joins those on the others."""
    names = {
        "PET_NNODES": "WORLD_SIZE",
        "PET_NODE_RANK": "RANK",
        "PET_MASTER_ADDR": "MASTER_ADDR",
        "PET_MASTER_PORT": "MASTER_PORT",
    }
    return {name: given[source] for name, source in names.items() if source in given and name not in given}


def _rank() -> int:
    return int(os.environ["RANK"])


def _local_rank() -> int:
    return int(os.environ["LOCAL_RANK"])


def _signal(child: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


def _folder_on_this_host(launch: Launch) -> Path:
    """Return the run's folder on this host, a copy of the synced one: other runs keep theirs."""
    trees = (path for path in map(Path, sys.path) if launch.tree in path.parts)
    tree = next((Path(*path.parts[: path.parts.index(launch.tree) + 1]) for path in trees), None)
    base = usable_cache("runs")
    folder = base / launch.run
    with (base / f"{launch.run}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            making = base / f"{launch.run}.part"
            shutil.rmtree(making, ignore_errors=True)
            if tree is None:  # there is nothing in it
                making.mkdir()
            else:
                shutil.copytree(tree, making, symlinks=True)
            for path in making.rglob("*"):
                if path.is_file() and not path.is_symlink():
                    path.chmod(path.stat().st_mode | 0o200)
            making.rename(folder)
        (base / f"{launch.run}.lock").unlink(missing_ok=True)
    return folder / launch.inside


def _remove_unchanged(folder: Path) -> None:
    """Remove the files that are as they were synced, and empty folders."""
    for place, _, files in os.walk(folder, topdown=False):
        for name in files:
            path = os.path.join(place, name)
            with contextlib.suppress(OSError):
                if os.path.islink(path) or os.stat(path).st_mtime_ns == SYNCED_AT or "__pycache__" in place:
                    os.unlink(path)
        with contextlib.suppress(OSError):
            os.rmdir(place)


class EnvironmentMaker(Actor):
    """Makes environments on a host."""

    @endpoint
    def make(self, packages: PackageList) -> tuple[HostEnvironment | None, str]:
        """Return the environment, made if it is not there, or the error."""
        try:
            return environment_on_this_host(packages), ""
        except EnvironmentFailed as error:
            return None, str(error)


def enter_in_driver(packages: PackageList) -> None:
    """Make an environment on this machine, and let this process import from it."""
    enter(environment_on_this_host(packages))


async def run_ranks(procs: Any, ranks: Any) -> RanksEnd:
    """Run a command on ranks in the driver; return how it ended.

    When a rank fails, the others are ended, as ``torchrun`` does. When this run is cancelled, all are.

    Args:
        procs: the mesh of their processes, which is stopped at the end.
        ranks: the mesh of `LaunchedRank`.

    Raises:
        EnvironmentFailed: a host cannot make the environment, or the folder.
    """
    try:
        await _prepare(ranks)
        return await _run(ranks)
    except BaseException:
        await _within(GRACE + ANSWERS_WITHIN, ranks.end.call)
        raise
    finally:
        await _within(ANSWERS_WITHIN, procs.stop)


async def _within(seconds: float, work: Callable[[], Awaitable[object]]) -> None:
    """Wait for some seconds at most until ranks have done something: those on a host that is gone never will."""

    async def do() -> None:
        with contextlib.suppress(Exception):
            await work()

    doing = asyncio.ensure_future(do())
    await asyncio.wait((doing,), timeout=seconds)
    doing.cancel()


async def _prepare(ranks: Any) -> None:
    prepared = sorted((await ranks.prepare.call()).values(), key=lambda one: one[0])
    if errors := [text for _, _, text in prepared if text]:
        raise EnvironmentFailed(errors[0])
    made = [environment for _, environment, _ in prepared if environment is not None]
    for environment in made:
        if environment.tool:
            took = f"{environment.seconds:.0f} s"
            sys.stdout.write(
                fit_line(f"environment made by {environment.tool} on {environment.host} in {took}") + "\n"
            )
    if made and not any(environment.tool for environment in made):
        sys.stdout.write(fit_line(f"environment was there: {made[0].folder}") + "\n")


async def _run(ranks: Any) -> RanksEnd:
    found = RanksEnd(0)
    for ending in ranks.run.stream():
        try:
            rank, status = await ending
        except Exception:
            if found.rank is None:
                raise
            return found  # that which failed first explains the rest
        if status and found.rank is None:
            found = RanksEnd(status, rank)
            await _within(GRACE + ANSWERS_WITHIN, ranks.end.call)
    await _within(ANSWERS_WITHIN, ranks.tidy.call)
    return found
