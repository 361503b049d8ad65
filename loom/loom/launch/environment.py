"""Environments on a host: one folder for each list of packages, made once, and used by many processes.

A process that uses an environment holds a shared lock on the file next to it. Its maker holds the exclusive one,
together with the programs that it runs. An environment counts as made when it has `_COMPLETE`, which is written
last: after the death of a maker it is made again. Layout::

    environments/<key>/       a virtual environment
    environments/<key>.lock
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib
import inspect
import os
import platform
import shutil
import site
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from loom.errors import EnvironmentFailed, LoomError
from loom.launch.project import PackageFile, PackageList
from loom.process.state_file import cache_folders

Bootstrap = Callable[[], None] | Callable[[], Awaitable[None]]

KEPT = 16
"""Environments of a host that are kept while no process uses them; then those that were used longest ago go."""

LAST_LINES = 20
"""Lines of a failed program's output in an error."""

_COMPLETE = "loom-complete"

_LEFT_OUT = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LOOM_WEAVER", "UV_PROJECT_ENVIRONMENT")
"""Variables of this process that would lead a maker astray, or that are secret."""


class HostEnvironment(NamedTuple):
    """An environment on a host."""

    host: str
    folder: str
    tool: str
    """The program that has made it now, ``uv`` or ``pip``; "" if it was there."""
    seconds: float
    """Duration until it was ready, with the wait for another maker."""

    @property
    def python(self) -> str:
        """Path of its interpreter."""
        return os.path.join(self.folder, "bin", "python")

    @property
    def packages(self) -> str:
        """Path of its ``site-packages``."""
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        return os.path.join(self.folder, "lib", version, "site-packages")


def environment_on_this_host(packages: PackageList | str, base: Path | None = None) -> HostEnvironment:
    """Return the environment of a list of packages, and hold it until this process ends.

    Args:
        packages: the list, whose environment is made if it is missing; or its digest, if it has to be there.
        base: the folder of all environments; default that in the cache of this machine.

    Raises:
        EnvironmentFailed: it cannot be made; the text has the last lines of the program that failed.
    """
    begun = time.monotonic()
    try:
        return _held(packages, base or usable_cache("environments"), begun)
    except OSError as error:
        raise _failed(f"{error.filename}: {error.strerror or error}") from error


def usable_cache(part: str, *, shared: bool = True) -> Path:
    """Return a folder in this machine's cache, which only its user can read. Raise `OSError` if there is none.

    Args:
        shared: whether it may lie in the user's home, which other machines may share.
    """
    problem = OSError(0, "no folder for the cache: set LOOM_CACHE to one")
    for cache in cache_folders(shared=shared):
        try:
            (cache / part).mkdir(mode=0o700, parents=True, exist_ok=True)
            # Another user may have made the folder in /tmp before, and could replace what is in it.
            if cache.stat().st_uid in (0, os.geteuid()) and (cache / part).stat().st_uid == os.geteuid():
                return cache / part
        except OSError as error:
            problem = error
    raise problem


def _held(packages: PackageList | str, base: Path, begun: float) -> HostEnvironment:
    key = _key(packages if isinstance(packages, str) else packages.digest)
    folder, lock, tool = base / key, base / f"{key}.lock", ""
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    while True:
        descriptor = os.open(lock, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if (folder / _COMPLETE).exists() and _is_at(lock, descriptor):
                os.utime(lock)  # used now
                _holds.append(os.dup(descriptor))
                break
            if isinstance(packages, str):
                raise _failed("it is gone from the cache of this host: call job.env again, then spawn")
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # others may have made it, or removed it, meanwhile
            if _is_at(lock, descriptor) and not (folder / _COMPLETE).exists():
                tool = _make(packages, folder, descriptor)
        finally:
            os.close(descriptor)
    if tool:
        _trim(base)
    return HostEnvironment(socket.gethostname(), str(folder), tool, time.monotonic() - begun)


_holds: list[int] = []
"""Descriptors of the locks of the environments that this process uses."""


def _key(digest: str) -> str:
    """Return the name of an environment: by its packages, this Python and this kind of machine."""
    here = f"{digest} {sys.implementation.cache_tag} {sys.base_prefix} {platform.machine()}"
    return hashlib.sha256(here.encode()).hexdigest()[:32]


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether an open file is still the one at a path."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_ino == os.fstat(descriptor).st_ino
    return False


def _make(packages: PackageList, folder: Path, lock: int) -> str:
    """Make an environment; return the program that has made it."""
    beside = os.path.dirname(sys.executable)
    uv = shutil.which("uv", path=f"{beside}{os.pathsep}{os.environ.get('PATH', '')}")
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="project-", dir=folder.parent) as project:
        for name, content in packages.files:
            path = Path(project, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        try:
            for command in _commands(packages, folder, uv):
                _run(command, project, {"UV_PROJECT_ENVIRONMENT": str(folder)}, lock)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    (folder / _COMPLETE).touch()
    return "uv" if uv else "pip"


def _commands(packages: PackageList, folder: Path, uv: str | None) -> list[list[str]]:
    """Return the commands that make an environment. Raise `EnvironmentFailed` if nothing here can."""
    python, base = str(folder / "bin" / "python"), sys.executable
    if packages.kind is PackageFile.UV_LOCK:
        if uv is None:
            raise _failed(
                "uv.lock needs uv, which is not there: install it on the host (`pip install uv`). Or write "
                "`uv export --no-emit-project -o requirements.txt`, which pip can install, and name that file"
            )
        own = ["--no-install-project", "--no-install-workspace"]
        return [[uv, "sync", "--frozen", *own, "--python", base]]
    if uv is not None:
        return [
            [uv, "venv", "--python", base, str(folder)],
            [uv, "pip", "install", "--python", python, "-r", packages.main],
        ]
    quiet = "--disable-pip-version-check"
    return [
        [base, "-I", "-m", "venv", str(folder)],
        [python, "-I", "-m", "pip", "install", quiet, "-r", packages.main],
    ]


def _run(command: Sequence[str], folder: str, variables: Mapping[str, str], lock: int) -> None:
    """Run a program, which holds the lock with this process: it may outlive it."""
    environment = {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}
    done = subprocess.Popen(
        command,
        cwd=folder,
        env={**environment, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=[lock],
    )
    assert done.stdout is not None
    with done.stdout as output:
        lines = deque((line.decode(errors="replace").rstrip() for line in output), LAST_LINES)
    if done.wait():
        program = " ".join([os.path.basename(command[0]), *command[1:3]])
        raise _failed(f"`{program} …` ended with {done.returncode}:\n" + "\n".join(lines))


def become_python(environment: HostEnvironment, arguments: Sequence[str]) -> NoReturn:
    """Let an environment's Python take this process's place. It holds the environment until its end."""
    for hold in _holds:
        os.set_inheritable(hold, True)
    os.execv(environment.python, [environment.python, *arguments])


def _trim(base: Path) -> None:
    """Remove the environments that were used longest ago, except those in use."""
    locks = sorted(base.glob("*.lock"), key=lambda lock: lock.stat().st_mtime, reverse=True)
    for lock in locks[KEPT:]:
        with contextlib.suppress(OSError):
            descriptor = os.open(lock, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (lock.with_suffix("") / _COMPLETE).unlink(missing_ok=True)
                shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
                lock.unlink()
            finally:
                os.close(descriptor)


def enter(environment: HostEnvironment) -> None:
    """Let this process, and Python programs that it starts, import from an environment.

    Its packages come behind synced folders and before the installed ones. What was imported stays.
    """
    before = [path for path in sys.path if path not in _entered]
    sys.path[:] = before
    site.addsitedir(environment.packages)  # runs its .pth files
    added = [path for path in sys.path if path not in before]
    place = next((n for n, path in enumerate(before) if "site-packages" in path), len(before))
    sys.path[:] = [*before[:place], *added, *before[place:]]
    known = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in _entered]
    os.environ["PYTHONPATH"] = os.pathsep.join([*known, *added])
    _entered[:] = added
    importlib.invalidate_caches()


_entered: list[str] = []
"""The folders on ``sys.path`` of the environment that this process has entered."""


class EnvironmentEntry:
    """An object whose unpickling lets its process import from an environment.

    Later objects in the same pickle can be imported from there. `check` raises if it is not there: an error while
    unpickling would not reach the client unchanged.
    """

    def __init__(self, digest: str, error: LoomError | None = None) -> None:
        self._digest = digest
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return _enter_by, (self._digest,)

    def check(self) -> None:
        if self._error is not None:
            raise self._error


def _enter_by(digest: str) -> EnvironmentEntry:
    try:
        enter(environment_on_this_host(digest))
    except LoomError as error:
        return EnvironmentEntry(digest, error)
    return EnvironmentEntry(digest)


def bootstrap_in(entry: EnvironmentEntry, bootstrap: Bootstrap | None) -> Bootstrap:
    """Return a bootstrap function that enters an environment, and then runs the user's."""
    if inspect.iscoroutinefunction(bootstrap):
        return functools.partial(_begin_async, entry, bootstrap)
    return functools.partial(_begin, entry, bootstrap)  # type: ignore[arg-type]


def _begin(entry: EnvironmentEntry, bootstrap: Callable[[], None] | None) -> None:
    entry.check()
    if bootstrap is not None:
        bootstrap()


async def _begin_async(entry: EnvironmentEntry, bootstrap: Callable[[], Awaitable[None]]) -> None:
    entry.check()
    await bootstrap()


def _failed(text: str) -> EnvironmentFailed:
    return EnvironmentFailed(f"host {socket.gethostname()} cannot make the environment: {text}")
