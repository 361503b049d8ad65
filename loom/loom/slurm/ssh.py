"""`SshLogin`: a login node behind OpenSSH, with the user's own configuration, agent and hops."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

from loom.errors import Denied, InvalidAddress, LoomError, MissingDependency, Unavailable
from loom.process.listen import bracketed
from loom.slurm.login import COMMAND_TIMEOUT, CompletedCommand, LocalLogin, Login, took_too_long

FORWARDS = "loom: forwards"
"""The line that the command of `SshLogin.forwarding` prints when the port is forwarded."""

_OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": "15",
    "ServerAliveInterval": "10",
    "ServerAliveCountMax": "3",
    "RequestTTY": "no",
    "RemoteCommand": "none",
}

CONTROL_TIMEOUT = 5.0
"""Seconds that ssh may take to speak to a connection that is open already."""

_KEPT_FOR = 60  # seconds that the shared connection outlives the last command

_USERS = ["-o", "ControlMaster=no"]  # the options with which ssh uses a connection that is open, and opens none

_FAILED = 255  # the exit code of ssh when it is not that of the command

_RUNS = "loom: runs"  # printed before a command runs: what came before is of the user's shell and its profile

# Slurm is often only on the path of a login shell. Its profile reads and prints nothing of the command's.
_RUN = f"""
run='printf "%s\\n" "{_RUNS}"; exec "$@" <&3 3<&-'
exec 3<&0 </dev/null
if command -v sbatch >/dev/null 2>&1 || ! command -v bash >/dev/null 2>&1; then eval "$run"; fi
exec bash -lc "$run" loom "$@"
"""

_ADDRESS = re.compile(
    r"ssh://(?:(?P<user>[\w.%+][\w.%+-]*)@)?(?P<host>[A-Za-z0-9_][\w.-]*|\[[0-9A-Fa-f:.%]+\])(?::(?P<port>\d+))?/?"
)

_HOW_TO_GET_IN = (
    "load your key with `ssh-add`, or have it accepted there with ssh-copy-id. If each connection needs a password "
    "or a code, open one that programs may share: set ControlMaster, ControlPath and ControlPersist for this host "
    "in ~/.ssh/config, and log in once with `{typed}`"
)


class SshAddress(NamedTuple):
    """The address of a login node."""

    host: str
    user: str | None = None
    port: int | None = None

    def __str__(self) -> str:
        user = f"{self.user}@" if self.user else ""
        return f"{user}{bracketed(self.host)}{f':{self.port}' if self.port else ''}"


def parse_ssh_address(address: str) -> SshAddress:
    """Read ``ssh://[USER@]HOST[:PORT]``.

    Raises:
        InvalidAddress: the address has another form.
    """
    match = _ADDRESS.fullmatch(address)
    port = int(match["port"]) if match and match["port"] else None
    if match is None or (port is not None and not 0 < port < 65536):
        raise InvalidAddress(
            f"{address!r} is no login node: write ssh://USER@HOST, ssh://USER@HOST:PORT or ssh://HOST with a host "
            "of your ~/.ssh/config"
        )
    return SshAddress(match["host"].strip("[]"), match["user"], port)


def login_of(via: str | None) -> Login:
    """Return the machine of an address ``ssh://[USER@]HOST[:PORT]``; this machine for None."""
    return LocalLogin() if via is None else SshLogin(parse_ssh_address(via))


class SshLogin(Login):
    """A login node behind ssh, which never asks for anything.

    Commands share one connection: the user's own if one is open already, as ssh's option ControlMaster has it, or
    else one of this object, which ends with this process.

    Raises:
        MissingDependency: there is no ssh on this machine.
    """

    def __init__(self, address: SshAddress) -> None:
        ssh = shutil.which("ssh")
        if ssh is None:
            raise MissingDependency(f"ssh://{address} needs ssh, which is not on PATH: install OpenSSH's client")
        self.name = str(address)
        self._ssh = [ssh, "-T"]
        for option, value in _OPTIONS.items():
            self._ssh += ["-o", f"{option}={value}"]
        if address.port:
            self._ssh += ["-p", str(address.port)]
        host = f"{address.user}@{address.host}" if address.user else address.host
        self._host = ["--", host]
        self._typed = f"ssh -p {address.port} {host}" if address.port else f"ssh {host}"
        self._shared: list[str] = []  # the options for the connection that commands share
        self._end: Callable[[], object] = lambda: None  # ends that connection
        self._lock = threading.Lock()

    def run(
        self, command: Sequence[str], *, input: bytes = b"", timeout: float = COMMAND_TIMEOUT
    ) -> CompletedCommand:
        script = f"set -- {shlex.join(command)}\n{_RUN}"
        ssh = [*self._ssh, "-o", "ClearAllForwardings=yes", *self._sharing(), *self._host, _quoted(script)]
        # The connection that stays may keep standard error open, and a pipe would not end.
        with tempfile.TemporaryFile() as errors:
            try:
                done = subprocess.run(
                    ssh,
                    input=input,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    timeout=timeout,
                    check=False,
                    start_new_session=True,  # Ctrl-C is for the caller alone
                )
            except subprocess.TimeoutExpired as error:
                raise took_too_long(self, command, timeout) from error
            errors.seek(0)
            said = errors.read().decode("utf-8", "surrogateescape")
        before, runs, stdout = done.stdout.partition(f"{_RUNS}\n".encode())
        if not runs:
            raise self._not_run(CompletedCommand(done.returncode, before.decode(errors="replace"), said))
        return CompletedCommand(done.returncode, stdout.decode("utf-8", "surrogateescape"), said)

    def forwarding(self, port: int, host: str, to: int) -> list[str]:
        """Return the command that forwards a port of this machine's 127.0.0.1 to one that the login node reaches.

        It prints `FORWARDS` when the port is forwarded, and ends when its standard input does.
        """
        shared = _USERS if self._uses_users() else ["-o", "ControlPath=none"]
        options = ["-o", "ExitOnForwardFailure=yes", "-L", _forward(port, host, to)]
        return [*self._ssh, *shared, *options, *self._host, f"echo '{FORWARDS}'; exec cat"]

    def unforward(self, port: int, host: str, to: int) -> None:
        """Take a forwarded port back from the user's own connection, which keeps it when the command has ended."""
        if self._uses_users():
            _control([*self._ssh, "-O", "cancel", "-L", _forward(port, host, to), *self._host])

    def why_not(self, said: str) -> LoomError:
        """Return the error for what ssh said when it did not connect."""
        said = said.strip()
        if "IDENTIFICATION HAS CHANGED" in said:
            return Denied(
                f"the host key of {self.name} is another than at earlier connections: ask the site whether it has "
                f"changed, and only then remove the old key by `ssh-keygen -R` and run `{self._typed}`; ssh said: "
                f"{said}",
                code="login_refused",
            )
        if "Host key verification failed" in said:
            return Denied(
                f"the host key of {self.name} is not known here: run `{self._typed}` once, and compare the "
                f"fingerprint that it shows with the site's; ssh said: {_last(said)}",
                code="login_refused",
            )
        if re.search("Permission denied|authentication (?:failures|methods)|Authentication failed", said):
            advice = _HOW_TO_GET_IN.format(typed=self._typed)
            return Denied(
                f"{self.name} lets ssh in only with a password or another key: {advice}; ssh said: {_last(said)}",
                code="login_refused",
            )
        return Unavailable(
            f"ssh does not reach {self.name}: {_last(said) or 'it said nothing'}; check the name, and that "
            f"`{self._typed}` works from here",
            code="login_unreachable",
        )

    def close(self) -> None:
        """End the connection that commands share, unless it is the user's own."""
        with self._lock:
            if self._shared:
                self._end()
                self._shared, self._end = [], lambda: None

    def _uses_users(self) -> bool:
        """Return whether commands share the user's own connection."""
        return self._sharing() == _USERS

    def _sharing(self) -> list[str]:
        """Return the options for the connection that commands share."""
        with self._lock:
            if not self._shared:
                self._shared = _USERS
                if not _control([*self._ssh, "-O", "check", *self._host]):
                    # A short path: sockets have at most about 100 characters, and ssh needs 17 of them for itself.
                    folder = tempfile.mkdtemp(prefix="loom-ssh-", dir="/tmp")
                    path = ["-o", f"ControlPath={folder}/c"]
                    self._shared = [*path, "-o", "ControlMaster=auto", "-o", f"ControlPersist={_KEPT_FOR}"]
                    leave = [*self._ssh, *path, "-O", "exit", *self._host]
                    self._end = weakref.finalize(self, _leave, leave, folder, os.getpid())
            return self._shared

    def _not_run(self, done: CompletedCommand) -> LoomError:
        if done.code == _FAILED:
            return self.why_not(done.stderr)
        return Unavailable(
            f"the shell of {self.name} does not run commands that ssh gives it: {done.said}",
            code="login_unreachable",
        )


def _quoted(script: str) -> str:
    """Return a command that runs a shell script, in any shell that a user may have, with line feeds or not."""
    escaped = "".join(f"\\0{byte:03o}" for byte in script.encode("utf-8", "surrogateescape"))
    return f"""sh -c 'eval "$(printf %b "$1")"' loom '{escaped}'"""


def _forward(port: int, host: str, to: int) -> str:
    return f"127.0.0.1:{port}:{bracketed(host)}:{to}"


def _last(said: str) -> str:
    """Return the last lines of what ssh said, as one line."""
    return "; ".join(line.strip() for line in said.splitlines()[-3:])


def _leave(command: Sequence[str], folder: str, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked copy
        _control(command)
        shutil.rmtree(folder, ignore_errors=True)


def _control(command: Sequence[str]) -> bool:
    """Run ssh to speak to a connection that is open already. Return whether there is one, and it does as told."""
    try:
        said = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=CONTROL_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return said.returncode == 0
