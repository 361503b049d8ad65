"""`Host`: a computer of its own on this machine, made of the kernel's namespaces."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from loom.process.parent_pipe import ParentPipe
from tests.support.network.netns import run
from tests.support.paths import ROOT

__all__ = ["FREEZER", "Host", "inner", "missing_freezer"]

STARTED_IN_TIME = 30.0
"""Seconds that a host, and a program on it, may take to start."""

NAMESPACES = ("mount", "uts", "ipc", "net", "pid")

FREEZER = Path("/sys/fs/cgroup/freezer")
"""Where control groups of version 1 are that freeze processes."""

PATH = f"{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
"""The program search path on a host: with this interpreter and the commands of its environment."""

_INIT = ["tini", "--", "sh", "-c", "echo ready; exec cat"]
"""The first process of a host. It ends when its standard input does, and with it all processes of the host."""

_HOLD = """
group=$1
shift
[ -z "$group" ] || mkdir "$group" || exit
"$@"
[ -z "$group" ] || exec find "$group" -depth -type d -exec rmdir {} +
"""
"""What holds a host: the kernel removes no control group by itself."""


class Host:
    """A computer of its own: it has a network, processes, and parts of the file system that no other host sees.

    It ends with this process, however that ends, since it holds a pipe to the first process of the host. Nothing of
    it has a name outside: what the kernel made for it is gone with its last process.

    Args:
        folder: for files of the host's own; it is made.
        mounts: folders and files of this machine, and where they appear on the host instead of what is there.
            The interpreter and this checkout stay where they are, and every user can read them.
        freezer: a control group to make for the host, which takes it for that of all processes; removed after it.
    """

    def __init__(self, name: str, folder: Path, mounts: Mapping[Path, str], freezer: Path | None = None) -> None:
        self.name = name
        self._freezer = freezer
        self._pipe = ParentPipe()
        for own in ("tmp", "open"):
            (folder / own).mkdir(parents=True, exist_ok=True)
        (folder / "tmp").chmod(0o1777)
        if freezer is not None:
            mounts = {**mounts, freezer: str(FREEZER)}
        script = "\n".join(["set -e", *_commands(name, folder, mounts), f"exec {shlex.join(_INIT)}"])
        separate = [f"--{namespace}" for namespace in NAMESPACES]
        apart = ["unshare", *separate, "--fork", "--kill-child", "--mount-proc", "sh", "-c", script]
        try:
            self._process = subprocess.Popen(
                ["sh", "-c", _HOLD, "sh", str(freezer or ""), *apart],
                stdin=self._pipe.child_end,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        finally:
            self._pipe.given()
        assert self._process.stdout
        if self._process.stdout.readline() != "ready\n":
            raise AssertionError(f"the host {name} did not start")
        (holder,) = psutil.Process(self._process.pid).children()
        (first,) = holder.children()
        self.pid = first.pid
        """The process id, on this machine, of the first process of the host."""
        self._own = [first, *first.children()]
        self.ip("link", "set", "lo", "up")

    def ip(self, *command: str) -> str:
        """Run iproute2's command on the host's network."""
        return run(*self._enter(["net"]), "ip", *command)

    def filter(self, rules: str) -> None:
        """Load nftables rules on the host."""
        run(*self._enter(["net"]), "nft", "-f", "-", given=rules)

    def link(self, other: Host, here: str, there: str) -> None:
        """Put a cable between two hosts, with the names of its ends."""
        self.ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", str(other.pid))
        self.ip("link", "set", here, "up")
        other.ip("link", "set", there, "up")

    def command(
        self, command: Sequence[str], user: str = "root", environment: Mapping[str, str] | None = None
    ) -> list[str]:
        """The command to start on this machine for one to run on the host, with a fresh environment.

        It starts in the user's home, and is killed when the command that is started ends.
        """
        home = "/root" if user == "root" else f"/home/{user}"
        variables = {
            "HOME": home,
            "USER": user,
            "LOGNAME": user,
            "SHELL": "/bin/bash",
            "PATH": PATH,
            "LANG": "C.UTF-8",
        }
        named = [f"{name}={value}" for name, value in {**variables, **(environment or {})}.items()]
        become = [] if user == "root" else ["setpriv", "--reuid", user, "--regid", user, "--init-groups"]
        bound = ["setpriv", "--pdeathsig", "KILL", "env", "-i", f"--chdir={home}", *named]
        return [*self._enter(NAMESPACES), *become, *bound, *command]

    def popen(
        self,
        command: Sequence[str],
        user: str = "root",
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[str]:
        """Start a program on the host; options are those of subprocess.Popen."""
        return subprocess.Popen(self.command(command, user, environment), **{"text": True, **options})

    def run(
        self,
        command: Sequence[str],
        user: str = "root",
        environment: Mapping[str, str] | None = None,
        timeout: float = 120.0,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on the host to its end, in ``timeout`` seconds at most; its output is captured."""
        options = {"text": True, "capture_output": True, **options}
        if "input" not in options:
            options.setdefault("stdin", subprocess.DEVNULL)
        return subprocess.run(self.command(command, user, environment), timeout=timeout, **options)

    def processes(self) -> list[psutil.Process]:
        """The living processes of the host, without those that are the host."""
        ours, found = _namespace(self.pid), []
        for one in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                if _namespace(one.pid) == ours and one not in self._own and one.status() != psutil.STATUS_ZOMBIE:
                    found.append(one)
        return found

    def close(self) -> None:
        """Kill all processes of the host, as if its power cord were pulled."""
        self._pipe.close()
        if self._freezer is not None:
            for group, _, _ in os.walk(self._freezer):  # what is frozen does not die
                with suppress(OSError):  # it is gone
                    Path(group, "freezer.state").write_text("THAWED")
        self._process.wait(STARTED_IN_TIME)
        assert self._process.stdout
        self._process.stdout.close()

    def _enter(self, namespaces: Sequence[str]) -> list[str]:
        return ["nsenter", f"--target={self.pid}", *[f"--{one}" for one in namespaces], "--"]


def missing_freezer() -> str:
    """Why no control groups can be made here that freeze processes; empty if they can."""
    group = FREEZER / f"loom-trial-{os.getpid()}"
    try:
        group.mkdir()
        (group / "freezer.state").write_text("THAWED")
    except OSError as error:
        return f"{FREEZER} takes no control groups: {error.strerror}"
    finally:
        with suppress(OSError):
            group.rmdir()
    return ""


def inner(process: subprocess.Popen[Any]) -> psutil.Process:
    """The program itself that `Host.popen` started: a signal to the process that it returned does not reach it."""
    deadline = time.monotonic() + STARTED_IN_TIME
    while time.monotonic() < deadline:
        for program in psutil.Process(process.pid).children():
            return program
        time.sleep(0.01)
    raise AssertionError("the program did not start")


def _namespace(pid: int) -> int:
    return os.stat(f"/proc/{pid}/ns/pid").st_ino


def _commands(name: str, folder: Path, mounts: Mapping[Path, str]) -> Iterator[str]:
    """The shell commands that make the host's view of the file system."""
    yield shlex.join(["hostname", name])
    yield "mount -t tmpfs -o mode=755 tmpfs /run"
    yield "mount -t tmpfs -o mode=1777 tmpfs /dev/shm"
    places = {place: source for source, place in mounts.items()}
    for closed in _closed():
        if not any(closed.is_relative_to(place) for place in (*places, "/tmp")):
            places[str(closed)] = folder / "open" / closed.name
    places["/tmp"] = folder / "tmp"  # the last one, since other sources may lie in this machine's
    for place, source in places.items():
        for kept in _needed():
            if kept.is_relative_to(place):
                seen = source / kept.relative_to(place)
                seen.mkdir(parents=True, exist_ok=True)
                yield shlex.join(["mount", "--bind", str(kept), str(seen)])
    for place, source in places.items():
        if source.is_dir() and place.startswith("/run/"):
            yield shlex.join(["mkdir", "-p", place])
        yield shlex.join(["mount", "--rbind", str(source), place])


def _needed() -> list[Path]:
    """The folders of this machine that a host needs: those of Python and its packages, and this checkout."""
    packages = [entry for entry in sys.path if entry.endswith("-packages")]
    found = [Path(entry).resolve() for entry in (ROOT, sys.prefix, sys.base_prefix, *packages)]
    found = [entry for entry in dict.fromkeys(found) if entry.is_dir()]
    return [entry for entry in found if not any(entry != other and entry.is_relative_to(other) for other in found)]


def _closed() -> list[Path]:
    """The outermost folders that only their owners can open, and in which something is that a host needs."""
    outermost = [
        next((parent for parent in reversed(needed.parents) if not parent.stat().st_mode & 0o001), None)
        for needed in _needed()
    ]
    return [closed for closed in dict.fromkeys(outermost) if closed is not None]
