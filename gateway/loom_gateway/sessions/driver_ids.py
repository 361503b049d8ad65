"""User ids for drivers: each driver runs user code, and reaches no file or process of another driver's id.

Every driver has its own, also those of one user. A spare driver has an id before its user is known, and what a
session has left behind is found by its id, and ended or removed, when the session's driver has ended. While
something of an id is left, no driver gets it.
"""

from __future__ import annotations

import asyncio
import contextlib
import grp
import logging
import os
import pwd
import re
import resource
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Sequence

from loom.errors import LimitReached, WrongArguments
from loom.process.linux_capabilities import Capability, held, keep_only
from loom_gateway.sessions import id_sweep
from loom_gateway.sessions.state_dir import DriverFiles

logger = logging.getLogger(__name__)

NEEDED = (Capability.SETUID, Capability.SETGID, Capability.KILL, Capability.CHOWN)
"""The rights that a gateway needs: to start drivers with other ids, to end them, and to give them their folders."""

MONARCHS_LOGS = "/tmp/unknown"
"""Monarch's folder of logs for processes whose user id has no name. Nothing can change that but the level."""

_LARGEST = 2**32 - 2
_RLIMIT_MSGQUEUE = 12  # the kernel's number
_LEFT_SHOWN = 5
_SWEEP_TIMEOUT = 120.0  # seconds to end an id's processes and remove its files

RETURNS_WITHIN = 5.0
"""Seconds in which an id is free again whose session has ended, unless the session has left a lot."""

MOST_THREADS = 16_384
"""Threads of one driver's user id, in all of its processes: a fork bomb leaves room for others."""

SHARED_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", "/run/lock")
"""Folders that every user id may write to, as may be the one of ``TMPDIR``."""


class DriverIds:
    """The user ids of a range, given to one driver at a time. The group id is the same number."""

    def __init__(self, low: int, high: int) -> None:
        self._range = range(low, high + 1)
        self._free = deque(self._range)
        self._used: set[int] = set()
        self._clean: set[int] = set()  # the free ones of which nothing is left
        self._returned = asyncio.Event()  # set when an id is free again

    @classmethod
    def of(cls, text: str) -> DriverIds:
        """Parse ``LOW-HIGH``. Raise `WrongArguments` if it is none, or has an id that is in use."""
        match = re.fullmatch(r"(\d{1,10})-(\d{1,10})", text)
        if match is None or not 0 < int(match[1]) <= int(match[2]) <= _LARGEST:
            raise WrongArguments(f"--driver-uids {text!r} is no range of user ids: write LOW-HIGH, as 20000-29999")
        ids = range(int(match[1]), int(match[2]) + 1)
        taken = {group.gr_gid: f"the group {group.gr_name}" for group in grp.getgrall()}
        taken |= {user.pw_uid: f"the user {user.pw_name}" for user in pwd.getpwall()}
        taken |= {os.geteuid(): "the gateway itself", os.getegid(): "the gateway itself"}
        for number, name in sorted(taken.items()):
            if number in ids:
                raise WrongArguments(
                    f"--driver-uids {text} has the id {number}, which is that of {name}: choose a range that "
                    f"nothing else uses"
                )
        return cls(ids[0], ids[-1])

    def __len__(self) -> int:
        return len(self._range)

    def take(self) -> int:
        """Return the id that has been free for longest. Raise `LimitReached` if all are in use."""
        while self._free:
            if (uid := self._free.popleft()) not in self._used:
                self._used.add(uid)
                return uid
        raise LimitReached(
            f"all {len(self)} user ids of --driver-uids are in use by sessions: end one, or give the gateway a "
            f"larger range"
        )

    async def take_clean(self) -> int:
        """Return an id as `take` does, of which no process, file or shared memory is left.

        An id that this gateway has not swept may have been in use before. An id that cannot be swept is tried
        again when all others have been given. Raises as `take`, after `RETURNS_WITHIN` seconds.
        """
        unclean: list[int] = []
        try:
            while (uid := await self._take_soon()) not in self._clean:
                if await asyncio.to_thread(sweep, uid):
                    break
                unclean.append(uid)
        finally:
            for each in unclean:
                self.give_back(each, clean=False)
        self._clean.discard(uid)
        return uid

    async def _take_soon(self) -> int:
        """Return an id as `take` does, and if all are in use wait a moment: a session may just have ended."""
        self._returned.clear()
        with contextlib.suppress(LimitReached):
            return self.take()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._returned.wait(), RETURNS_WITHIN)
        return self.take()

    def adopt(self, uid: int) -> None:
        """Note that a driver of an earlier gateway has an id, or that something of it is left."""
        self._used.add(uid)

    def give_back(self, uid: int, clean: bool = True) -> None:
        """Note that no process has an id any more; ``clean`` says that nothing else of it is left."""
        self._used.discard(uid)
        if clean:
            self._clean.add(uid)
        if uid in self._range:
            self._free.append(uid)
        self._returned.set()


def give_up_other_rights() -> None:
    """Keep no capability but `NEEDED`. Raise `WrongArguments` if one of these is missing."""
    if sys.platform != "linux":
        raise WrongArguments("--driver-uids needs Linux")
    missing = [capability for capability in NEEDED if capability not in held()]
    if missing:
        names = ", ".join(f"CAP_{capability.name}" for capability in missing)
        raise WrongArguments(
            f"--driver-uids needs the right to change user ids, and this process lacks {names}: run the gateway as "
            f"root, in a container with the capabilities SETUID, SETGID, KILL and CHOWN added, or leave the option "
            f"out, and all sessions share the gateway's user id"
        )
    keep_only(NEEDED)


def hold_folder_of_logs(folder: str = MONARCHS_LOGS) -> None:
    """Make the folder of Monarch's logs, so that no driver has it.

    The first driver would own it. The others would read its log, and write theirs wherever it leads them. Without a
    folder that is theirs, Monarch writes to standard error (torchmonarch 0.7), which is the driver's own log.
    """
    try:
        os.mkdir(folder, 0o755)
    except FileExistsError:
        owner = os.lstat(folder).st_uid
        if owner != os.geteuid():
            why = "who can read Monarch's logs there: remove it, and start the gateway again"
            logger.warning("%s belongs to user id %d, %s", folder, owner, why)
    except OSError as error:
        logger.warning("%s cannot be made, where drivers would read each other's logs: %s", folder, error)


def make_folder(folder: str, uid: int) -> None:
    """Make the folder of a driver, which only its user id and the gateway can open."""
    os.mkdir(folder, 0o700)
    for name in ("home", "tmp"):
        os.mkdir(os.path.join(folder, name), 0o700)
        os.chown(os.path.join(folder, name), uid, uid)
    # Files in it have the gateway's group, of which the driver is no member.
    os.chmod(folder, 0o2770)
    os.chown(folder, uid, os.getegid())


_CREDENTIALS = (
    "LOOM_TOKENS",
    *("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "HF_TOKEN", "DATABRICKS_TOKEN"),
    *("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_URI"),
)
"""Variables with which a gateway asks others: trackers, whose URI may have a password."""


def environment(folder: str) -> dict[str, str]:
    """Return the environment of a driver that has a folder of its own, without the gateway's credentials."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("XDG_") and name not in ("USER", "LOGNAME", "PWD", "OLDPWD", *_CREDENTIALS)
    }
    return {**inherited, "HOME": os.path.join(folder, "home"), "TMPDIR": os.path.join(folder, "tmp")}


def bound_leftovers() -> None:
    """Bound, in a driver, what its user id may start, and forbid what no sweep would find: POSIX message queues."""
    _, most = resource.getrlimit(resource.RLIMIT_NPROC)
    threads = MOST_THREADS if most == resource.RLIM_INFINITY else min(MOST_THREADS, most)
    resource.setrlimit(resource.RLIMIT_NPROC, (threads, threads))
    resource.setrlimit(_RLIMIT_MSGQUEUE, (0, 0))


def clear_away(files: DriverFiles, uid: int) -> bool:
    """End every process of a driver's user id, and remove what the id has left and the driver's folder.

    The log, and what the session's next driver starts again, are kept. Return whether it was done. Otherwise no
    other driver may have the id.
    """
    folder = files.folder if files.folder is not None and os.path.isdir(files.folder) else None
    kept = [os.path.basename(path) for path in files.kept]
    if not sweep(uid, folder, kept):
        return False
    try:
        if folder is not None:
            _take_over(folder)
            files.keep()
    except OSError as error:
        logger.error("the folder %s stays, and its user id %d is not used for now: %s", folder, uid, error)
        return False
    return True


def sweep(uid: int, folder: str | None = None, kept: Sequence[str] = ()) -> bool:
    """End every process of a user id, and remove its files and its shared memory; return whether nothing is left.

    Args:
        folder: another folder of the id's, which is emptied except for the files that are ``kept``.
    """
    if uid in (0, os.geteuid()):
        raise ValueError(f"{uid} is no driver's user id")
    command = [sys.executable, "-I", "-S", id_sweep.__file__, str(uid), folder or "", ",".join(kept)]
    try:
        done = subprocess.run(
            [*command, *SHARED_FOLDERS, tempfile.gettempdir()],
            check=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd="/",
            env={},
            timeout=_SWEEP_TIMEOUT,
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or b""
        logger.error(
            "the user id %d is not used for now, because what it has left could not be removed: %s %s",
            uid,
            error,
            said.decode(errors="replace"),
        )
        return False
    if left := done.stdout.decode().splitlines():
        shown = ", ".join(left[:_LEFT_SHOWN])
        logger.error(
            "the user id %d is not used for now, because %d things of it are left: %s", uid, len(left), shown
        )
    return not left


def _take_over(folder: str) -> None:
    """Make the gateway the owner of a driver's folder, which was emptied, and of the log in it."""
    own, group = os.geteuid(), os.getegid()
    os.chown(folder, own, group)
    os.chmod(folder, 0o700)
    for entry in os.scandir(folder):
        os.chown(entry, own, group, follow_symlinks=False)
        if entry.is_file(follow_symlinks=False):
            os.chmod(entry, 0o600)  # the state folder, where the log goes, is open to drivers that know its name
