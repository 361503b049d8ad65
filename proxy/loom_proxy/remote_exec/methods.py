"""`RankMethods`: the methods by which meshes of processes and actors reach the processes of their ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from loom.errors import LoomError, WrongArguments
from loom_proxy.mesh.base import MeshProxy
from loom_proxy.remote_exec import copies
from loom_proxy.remote_exec.copies import CopyProgress
from loom_proxy.remote_exec.execution import Execution
from loom_proxy.remote_exec.forward import Forward
from loom_proxy.remote_exec.rank import AWAY, rank_process, rank_processes


class RankMethods(MeshProxy):
    """A mesh whose elements have processes. Its methods need a token that may drive, and are audited."""

    def exec(
        self,
        command: str | Sequence[str],
        rank: int | None = None,
        *,
        env: Mapping[str, str] | None = None,
        away: float = AWAY,
    ) -> Execution:
        """Run a command in the environment and the working folder of ranks. Its leftover processes end with it.

        Args:
            command: a program and its arguments, or a text for ``/bin/sh``.
            rank: the rank in this mesh; every rank without it.
            env: environment variables in addition to those of the rank.
            away: seconds without a sign of life of this program after which the command is ended. A command goes on
                through a shorter cut of the connection, and loses nothing that it prints.

        Returns:
            The running command, whose `Execution.results` waits for its end.

        Raises:
            NoSuchRank: this mesh has no such rank.
        """
        return Execution(rank_processes(self, rank), _words(command), env or {}, away)

    def copy_to(
        self,
        source: str | os.PathLike[str],
        path: str,
        rank: int = 0,
        *,
        on_progress: Callable[[CopyProgress], object] = lambda progress: None,
    ) -> str:
        """Copy a file or a folder of this machine to a rank's host, with the permissions of the files.

        Each file gets its name when it is whole. Symbolic links in a folder are copied as they are.

        Args:
            path: the name of the copy, or a folder for it. A relative one is from the rank's working folder.
            on_progress: called after each piece.

        Returns:
            The absolute path of the copy.

        Raises:
            NotFound: a file or folder is not there. The error names it, and so do the next ones.
            Denied: it must not be read or written.
            WrongState: it cannot be written for another reason, such as a full disk.
            FileChanged: a file became shorter meanwhile.
        """
        return copies.copy_to(rank_process(self, rank), os.fspath(source), path, on_progress, AWAY)

    def copy_from(
        self,
        path: str,
        destination: str | os.PathLike[str],
        rank: int = 0,
        *,
        on_progress: Callable[[CopyProgress], object] = lambda progress: None,
    ) -> str:
        """Copy a file or a folder of a rank's host to this machine, as `copy_to` does in the other direction.

        Args:
            path: the file or folder to copy. A relative one is from the rank's working folder.
            destination: the name of the copy, or a folder for it.

        Returns:
            The absolute path of the copy. Raises the errors of `copy_to`.
        """
        return copies.copy_from(rank_process(self, rank), path, os.fspath(destination), on_progress, AWAY)

    def forward(
        self,
        port: int,
        rank: int = 0,
        *,
        local_port: int | None = None,
        address: str = "127.0.0.1",
        on_refused: Callable[[LoomError], object] | None = None,
    ) -> Forward:
        """Forward a port of a rank's host to this machine, for any number of connections.

        Args:
            port: a TCP port on which a program listens there, on the loopback address or on all.
            local_port: the port of this machine, 0 for a free one; the same number without it.
            address: the address of this machine. Other machines reach no loopback address.
            on_refused: called, on a thread, with the error of a connection that nothing takes there. Without it,
                the error is logged.

        Returns:
            The forwarded port, open until `Forward.close`.

        Raises:
            PortInUse: the local port is taken.
            NoSuchRank: this mesh has no such rank.
        """
        for number in (port, local_port):
            if number is not None and not (isinstance(number, int) and 0 <= number < 1 << 16):
                raise WrongArguments(f"a port is a number below 65536, not {number!r:.80}")
        local = port if local_port is None else local_port
        return Forward(rank_process(self, rank), port, local, address, on_refused)

    def shell(
        self,
        rank: int = 0,
        command: str | Sequence[str] = (),
        *,
        away: float = AWAY,
    ) -> int:
        """Give this program's terminal to a shell in the environment and the working folder of a rank.

        The shell goes on through a cut of the connection, and keeps what it prints meanwhile. ``~.`` at the
        beginning of a line leaves it.

        Args:
            command: another command than the shell of the rank's environment, as in `exec`.
            away: seconds without a sign of life of this program after which the shell is ended.

        Returns:
            The exit status of the shell, or 255 if it was left.

        Raises:
            WrongState: this program has no terminal.
            NoSuchRank: this mesh has no such rank.
        """
        from loom_proxy.remote_exec.terminal import Terminal  # needs termios, which Windows lacks

        return Terminal(rank_process(self, rank), _words(command), away).interact()


def _words(command: str | Sequence[str]) -> list[str]:
    return ["/bin/sh", "-c", command] if isinstance(command, str) else [str(word) for word in command]
