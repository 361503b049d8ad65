"""User ids for drivers: each driver runs user code, and reaches no file or process of another driver's id.

Every driver has its own, also those of one user. A spare driver has an id before its user is known, and a process
that a session has left behind is found by its id, and ended, when the session's driver has ended.
"""

from __future__ import annotations

import grp
import logging
import os
import pwd
import re
import subprocess
import sys
from collections import deque
from collections.abc import Sequence

from loom.errors import LimitReached, WrongArguments
from loom.process.capabilities import Capability, held, keep_only
from loom_gateway.sessions.driver_files import DriverFiles

logger = logging.getLogger(__name__)

NEEDED = (Capability.SETUID, Capability.SETGID, Capability.KILL, Capability.CHOWN)
"""What a gateway needs: to start drivers with other ids, to end them, and to give them their folders."""

MONARCHS_LOGS = "/tmp/unknown"
"""Where Monarch writes the logs of processes whose user id has no name. Nothing can change that but the level."""

_LARGEST = 2**32 - 2
_CLEAR_TIMEOUT = 30.0  # seconds to end a driver's processes and remove its files

_CLEAR = """
import contextlib, os, shutil, signal, sys
folder, *kept = sys.argv[1:]
with contextlib.suppress(ProcessLookupError):
    os.kill(-1, signal.SIGKILL)  # every other process of this user id
os.chmod(folder, 0o770)
for entry in list(os.scandir(folder)):
    if entry.name in kept:
        continue
    if not entry.is_dir(follow_symlinks=False):
        os.unlink(entry)
        continue
    os.chmod(entry, 0o700)
    for place, folders, _ in os.walk(entry):
        for name in folders:
            if not os.path.islink(os.path.join(place, name)):
                os.chmod(os.path.join(place, name), 0o700)
    shutil.rmtree(entry, ignore_errors=True)
"""
"""Run with a driver's user id: without CAP_DAC_OVERRIDE, its private folders are closed to the gateway too."""


class DriverIds:
    """The user ids of a range, given to one driver at a time. The group id is the same number."""

    def __init__(self, low: int, high: int) -> None:
        self._range = range(low, high + 1)
        self._free = deque(self._range)
        self._used: set[int] = set()

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

    def adopt(self, uid: int) -> None:
        """Note that a driver of an earlier gateway has an id."""
        self._used.add(uid)

    def give_back(self, uid: int) -> None:
        """Note that no process has an id any more."""
        self._used.discard(uid)
        if uid in self._range:
            self._free.append(uid)


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


def environment(folder: str) -> dict[str, str]:
    """Return the environment of a driver that has a folder of its own."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("XDG_") and name not in ("LOOM_TOKENS", "USER", "LOGNAME", "PWD", "OLDPWD")
    }
    return {**inherited, "HOME": os.path.join(folder, "home"), "TMPDIR": os.path.join(folder, "tmp")}


def clear_away(files: DriverFiles, uid: int) -> bool:
    """End every process of a driver's user id and remove the driver's folder, except for the log.

    Return whether it was done. Otherwise no other driver may have the id.
    """
    if files.folder is None or not os.path.isdir(files.folder):
        return True
    try:
        _clear(files.folder, uid, [os.path.basename(files.log) + part for part in ("", ".1")])
        files.keep_log()
    except OSError as error:
        logger.error("the folder %s stays, and its user id %d is not used again: %s", files.folder, uid, error)
        return False
    return True


def _clear(folder: str, uid: int, kept: Sequence[str]) -> None:
    """End every process of a user id, remove its files from its folder except for ``kept``, and take over these."""
    command = [sys.executable, "-I", "-S", "-c", _CLEAR, folder, *kept]
    try:
        subprocess.run(
            command,
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd="/",
            env={},
            user=uid,
            group=uid,
            extra_groups=[],
            timeout=_CLEAR_TIMEOUT,
        )
    except subprocess.SubprocessError as error:
        said = getattr(error, "stderr", None) or b""
        raise OSError(
            f"the processes and files of user id {uid} remain: {error} {said.decode(errors='replace')}"
        ) from error
    own, group = os.geteuid(), os.getegid()
    os.chown(folder, own, group)
    os.chmod(folder, 0o700)
    for entry in os.scandir(folder):
        os.chown(entry, own, group, follow_symlinks=False)
        if entry.is_file(follow_symlinks=False):
            os.chmod(entry, 0o600)  # the state folder, where the log goes, is open to drivers that know its name
