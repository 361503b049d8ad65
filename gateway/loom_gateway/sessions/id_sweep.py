"""``python -I -S id_sweep.py UID FOLDER KEEP,… ROOT…``: end everything of a user id, and remove what it has left.

A program of its own, which the gateway starts with its own rights. It takes the user id as its *effective* one, so
that the kernel lets it signal and remove what is the id's, and nothing else. Its real and saved ids are another
number, which no process has: so no process of the user id may signal it. ``kill(-1)`` reaches every process that it
may signal in one step of the kernel, in which none can fork: whoever forks all the time is not faster.

It prints what is left, one line each, and nothing if the user id may be given again.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import pwd
import signal
import stat
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

PATIENCE = 15.0
"""Seconds in which the processes have to be gone; one in the kernel's hands, as of a dead disk, dies later."""

MOST_ENTRIES = 500_000
"""Names of others in shared folders that are looked at. Beyond them, something of the id's may be left."""

_IPC_RMID = 0
_KEYCTL_CLEAR, _KEYCTL_GET_PERSISTENT = 7, 22
_PROCESS_KEYRING, _USER_KEYRING, _USER_SESSION_KEYRING = -2, -4, -5
_KEYCTL = {"x86_64": 250, "aarch64": 219}
"""The number of the system call, which the C library does not have."""


def main() -> None:
    """Sweep as the arguments say."""
    uid, folder, kept, *roots = sys.argv[1:]
    _become(int(uid))
    left = [f"process {pid}" for pid in end_processes(int(uid))]
    if not left:
        with contextlib.suppress(OSError):  # nobody is there any more who could signal this process
            os.setresuid(int(uid), int(uid), int(uid))
        if folder:
            _clear_folder(folder, kept.split(","))
        left += [*_remove_ipc(int(uid)), *_remove_files(int(uid), roots)]
        _clear_keyrings()
    sys.stdout.write("".join(f"{one!a}\n" for one in left))


def _become(uid: int) -> None:
    """Take a user id as the effective one, with real and saved ids that no process of it may signal."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    named, running = {user.pw_uid for user in pwd.getpwall()}, {each for _, ids, _ in _processes() for each in ids}
    for own in (uid ^ 1 << 30, *range(65533, 65500, -1)):
        if own != uid and own not in named and own not in running:
            with contextlib.suppress(OSError):  # a container may have no such number
                os.setresuid(own, uid, own)
                break
    else:
        os.setresuid(uid, uid, uid)
    with open("/proc/self/status") as file:
        if not any(line.split() == ["CapEff:", "0" * 16] for line in file):
            raise SystemExit("this process kept a capability, with which it would kill everything")


def end_processes(uid: int) -> list[int]:
    """Kill every process of a user id; return the ids of those that are there after `PATIENCE` seconds."""
    deadline, wait = time.monotonic() + PATIENCE, 0.001
    while True:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        left = [pid for pid, ids, lives in _processes() if uid in ids and lives and pid != os.getpid()]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(wait)
        wait = min(0.1, 2 * wait)


def _processes() -> Iterator[tuple[int, list[int], bool]]:
    """Yield the id and the user ids of each process, and whether a thread of it lives: the first may have ended."""
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError, KeyError), open(f"/proc/{name}/status", errors="replace") as file:
                status = dict(line.split(":", 1) for line in file if ":" in line)
                lives = status["State"].strip()[0] not in "ZX" or int(status["Threads"]) > 1
                yield int(name), [int(each) for each in status["Uid"].split()], lives


def _clear_folder(folder: str, kept: list[str]) -> None:
    """Empty a driver's folder, except for some files. Another file's second name is not kept."""
    os.chmod(folder, 0o770)
    for entry in list(os.scandir(folder)):
        status = entry.stat(follow_symlinks=False)
        if entry.name not in kept or not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            _remove(entry.path)


def _remove_files(uid: int, roots: list[str]) -> Iterator[str]:
    """Remove the user id's files in folders that everyone may write to; yield what stays, or was not looked at."""
    folders, others = deque(dict.fromkeys(map(os.path.realpath, roots))), 0
    while folders:
        with contextlib.suppress(OSError):  # closed to the user id, so that nothing of it is in there
            for entry in list(os.scandir(folders.popleft())):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if status.st_uid == uid:
                        _remove(entry.path)
                        if os.path.lexists(entry.path):
                            yield entry.path
                        continue
                    others += 1
                    if stat.S_ISDIR(status.st_mode):
                        folders.append(entry.path)
        if others > MOST_ENTRIES:
            yield f"whatever is in {len(folders)} folders, behind {others} names of others"
            return


def _remove(path: str) -> None:
    """Remove a file, or a folder with everything in it, as far as that is possible.

    The content of a folder's folders is moved up, so that no path is too long and no recursion too deep, however
    deep they are.
    """
    with contextlib.suppress(OSError):
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
            return
        os.chmod(path, 0o700)
        top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        stay: set[str] = set()
        while names := set(os.listdir(top)) - stay:
            stay |= {name for name in names if not _remove_or_move_up(name, top, top)}
        os.rmdir(path)


def _remove_or_move_up(name: str, folder: int, top: int) -> bool:
    """Remove a file in an open folder. Empty a folder of the top one, and move another one there.

    Return whether that was possible.
    """
    try:
        if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=folder)
            return True
        with contextlib.suppress(PermissionError):  # another user's, which may be empty
            os.chmod(name, 0o700, dir_fd=folder)
        if folder != top:
            os.rename(name, f"loom-sweep-{os.urandom(12).hex()}", src_dir_fd=folder, dst_dir_fd=top)
            return True
        with contextlib.suppress(PermissionError):
            inside = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            try:
                for each in os.listdir(inside):
                    _remove_or_move_up(each, inside, top)
            finally:
                os.close(inside)
        os.rmdir(name, dir_fd=folder)
    except OSError:
        return False
    return True


def _remove_ipc(uid: int) -> Iterator[str]:
    """Remove the user id's shared memory, semaphores and message queues of System V; yield those that stay."""
    libc = ctypes.CDLL(None)
    removes: dict[str, Callable[[int], int]] = {
        "shm": lambda ident: int(libc.shmctl(ident, _IPC_RMID, None)),
        "sem": lambda ident: int(libc.semctl(ident, 0, _IPC_RMID)),
        "msg": lambda ident: int(libc.msgctl(ident, _IPC_RMID, None)),
    }
    for kind, remove in removes.items():
        for ident, owners in _ipc(kind):
            if uid in owners and remove(ident) != 0 and any(ident == one for one, _ in _ipc(kind)):
                yield f"System V {kind} {ident}"


def _ipc(kind: str) -> list[tuple[int, set[int]]]:
    """Return the id, and the user ids of owner and creator, of each System V object of a kind."""
    try:
        with open(f"/proc/sysvipc/{kind}") as file:
            names, *rows = (line.split() for line in file)
    except OSError:  # a kernel without them
        return []
    columns = names.index("uid"), names.index("cuid")
    return [(int(row[1]), {int(row[column]) for column in columns}) for row in rows]


def _clear_keyrings() -> None:
    """Empty the keyrings that the kernel keeps for this process's user id, if it lets programs have any.

    The persistent one outlives all processes for days.
    """
    number = _KEYCTL.get(platform.machine())
    if number is not None:
        keyctl = partial(ctypes.CDLL(None).syscall, number)
        for keyring in (_USER_KEYRING, _USER_SESSION_KEYRING, keyctl(_KEYCTL_GET_PERSISTENT, -1, _PROCESS_KEYRING)):
            keyctl(_KEYCTL_CLEAR, keyring)


if __name__ == "__main__":
    main()
