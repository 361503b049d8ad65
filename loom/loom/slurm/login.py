"""`Login`: where Slurm's commands run and its user's home is, on this machine or behind ssh."""

from __future__ import annotations

import os
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from loom.errors import AllocationFailed, LoginUnreachable

COMMAND_TIMEOUT = 60.0
"""Default seconds that a command may take."""

NO_SUCH_COMMAND = 127
"""The exit code of a command that is not on the path, as shells have it."""

_NO_SUCH_FILE = 44  # the exit code of `_READ` for a missing file

_READ = f'if [ ! -e "$1" ]; then exit {_NO_SUCH_FILE}; fi; exec cat -- "$1"'

_WRITE = """
umask 077
new=$(mktemp -- "$1.XXXXXX") || exit 1
if cat >"$new" && chmod "$2" "$new" && mv -f -- "$new" "$1"; then exit 0; fi
rm -f -- "$new"
exit 1
"""


class CompletedCommand(NamedTuple):
    """A command that has ended. Bytes that are no UTF-8 are surrogates in its output."""

    code: int
    stdout: str
    stderr: str

    @property
    def said(self) -> str:
        """The last lines of its standard error, or else of its output, as one line."""
        lines = (self.stderr.strip() or self.stdout.strip()).splitlines()[-3:]
        return "; ".join(line.strip() for line in lines) or f"exit code {self.code}, without a word"


class Login(ABC):
    """A machine on which Slurm's commands run, as the user whose home is there."""

    name: str
    """The machine, in sentences: ``this machine``, or ``user@host``."""

    @abstractmethod
    def run(
        self, command: Sequence[str], *, input: bytes = b"", timeout: float = COMMAND_TIMEOUT
    ) -> CompletedCommand:
        """Run a command to its end, and return its code and output.

        A command that is not on the path has the code `NO_SUCH_COMMAND`, as in a shell.

        Args:
            input: what the command reads on standard input.
            timeout: seconds that it may take.

        Raises:
            Unavailable: the machine cannot be reached, or the command took too long; a later attempt may succeed.
            Denied: the machine does not let the user in.
        """

    @abstractmethod
    def close(self) -> None:
        """Close what connects to the machine, if anything does."""

    def read(self, path: str) -> bytes:
        """Return the content of a file; raise `FileNotFoundError` if there is none."""
        done = self.run(["sh", "-c", _READ, "sh", path])
        if done.code == _NO_SUCH_FILE:
            raise FileNotFoundError(f"there is no {path} on {self.name}")
        if done.code:
            raise AllocationFailed(f"cannot read {path} on {self.name}: {done.said}")
        return done.stdout.encode("utf-8", "surrogateescape")

    def write(self, path: str, data: bytes, mode: int = 0o600) -> None:
        """Replace a file as a whole, or make it in a folder that exists."""
        done = self.run(["sh", "-c", _WRITE, "sh", path, f"{mode:o}"], input=data)
        if done.code:
            raise AllocationFailed(
                f"cannot write {path} on {self.name}: {done.said}. Make room there, or choose another shared "
                "folder by LOOM_SLURM_FOLDER"
            )


_OF_SITE = {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT"}
"""Variables of Slurm's that hold outside of a job, too."""


class LocalLogin(Login):
    """This machine. Its commands do not see the job in which this program may run: ``sbatch`` passes it on."""

    name = "this machine"

    def run(
        self, command: Sequence[str], *, input: bytes = b"", timeout: float = COMMAND_TIMEOUT
    ) -> CompletedCommand:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or name in _OF_SITE
        }
        try:
            done = subprocess.run(
                command, input=input, capture_output=True, timeout=timeout, check=False, env=environment
            )
        except FileNotFoundError:
            return CompletedCommand(NO_SUCH_COMMAND, "", f"{command[0]}: command not found")
        except subprocess.TimeoutExpired as error:
            raise took_too_long(self, command, timeout) from error
        return CompletedCommand(done.returncode, _text(done.stdout), _text(done.stderr))

    def close(self) -> None:
        """Do nothing: each command is a process of its own."""


def took_too_long(login: Login, command: Sequence[str], timeout: float) -> LoginUnreachable:
    """Return the error for a command that did not end in time."""
    return LoginUnreachable(
        f"{os.path.basename(command[0])} on {login.name} did not end within {timeout:g} s",
        code="login_unreachable",
    )


def _text(output: bytes) -> str:
    return output.decode("utf-8", "surrogateescape")
