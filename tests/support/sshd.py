"""A login node: a real OpenSSH server on a port of 127.0.0.1, with keys of its own. Nothing of ~/.ssh is used."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from loom.process.listen import free_ports
from tests.support.needs import skip_because

__all__ = ["LoginNode", "login_node"]

BOUND = 30.0

_SERVER = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
AuthorizedKeysFile {folder}/key.pub
PidFile none
LogLevel VERBOSE
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PermitRootLogin yes
PrintMotd no
{more}
"""

_CLIENT = """
Host login
    HostName 127.0.0.1
    Port {port}
    User {user}
    IdentityFile {folder}/key
    IdentitiesOnly yes
    IdentityAgent none
    UserKnownHostsFile {folder}/known
    GlobalKnownHostsFile none
{more}
"""


@dataclass
class LoginNode:
    """A login node, whose name for ssh is ``login``."""

    folder: Path
    port: int
    process: psutil.Popen

    @property
    def logins(self) -> int:
        """The number of connections that were let in."""
        return (self.folder / "log").read_text().count("Accepted publickey")

    @property
    def clients(self) -> list[psutil.Process]:
        """The processes of ssh that are connected to the login node, or connect; zombies have no command line."""
        found = psutil.process_iter(["name", "cmdline"])
        ours = f"{self.folder}/config"
        return [one for one in found if one.info["name"] == "ssh" and ours in (one.info["cmdline"] or ())]

    def configure(self, *lines: str) -> None:
        """Give the user's configuration of ssh more lines for this login node."""
        more = "\n".join(f"    {line}" for line in lines)
        text = _CLIENT.format(folder=self.folder, port=self.port, user=getpass.getuser(), more=more)
        (self.folder / "config").write_text(text)

    def forget_key(self) -> None:
        """Let the user not know the server's key any more."""
        (self.folder / "known").unlink()

    @contextmanager
    def shared_connection(self) -> Iterator[None]:
        """Open a connection of the user's own that programs may share."""
        with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a short path
            self.configure(f"ControlPath {folder}/%n")
            # What stays has to let go of the test's output.
            subprocess.run(
                ["ssh", "-fNM", "login"], check=True, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            yield
            subprocess.run(["ssh", "-O", "exit", "login"], check=True, capture_output=True)

    def cut(self) -> int:
        """Kill all connections, and return how many there were."""
        connections = self.process.children(recursive=True)
        for process in connections:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(connections, BOUND)
        return len(connections)


@contextmanager
def login_node(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: Mapping[str, str] | None = None,
    server: str = "",
) -> Iterator[LoginNode]:
    """Run a login node, and put an ``ssh`` on PATH that reads the configuration for it alone.

    Args:
        environment: variables of the commands that run there.
        server: more lines of its configuration.
    """
    program = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin")
    ssh = shutil.which("ssh")
    if program is None or ssh is None:
        skip_because("the programs sshd and ssh (Debian package openssh-server) are not installed")
    folder.mkdir()
    for name in ("host", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    (port,) = free_ports(1)
    host_key = " ".join((folder / "host.pub").read_text().split()[:2])
    (folder / "known").write_text(f"[127.0.0.1]:{port} {host_key}\n")
    if environment:
        server += "\nSetEnv " + " ".join(f'"{name}={value}"' for name, value in environment.items())
    (folder / "sshd_config").write_text(_SERVER.format(folder=folder, port=port, more=server))
    wrapper = folder / "bin" / "ssh"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {ssh} -F {folder}/config "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # which the server wants when it runs as root
    command = [program, "-D", "-f", str(folder / "sshd_config"), "-E", str(folder / "log")]
    node = LoginNode(folder, port, psutil.Popen(command, stdin=subprocess.DEVNULL))
    node.configure()
    try:
        _await_port(node)
        yield node
    finally:
        connections = node.process.children(recursive=True)
        for process in [node.process, *connections]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs([node.process, *connections], BOUND)


def _await_port(node: LoginNode) -> None:
    deadline = time.monotonic() + BOUND
    while True:
        try:
            socket.create_connection(("127.0.0.1", node.port), BOUND).close()
            return
        except ConnectionRefusedError:
            if node.process.poll() is not None or time.monotonic() > deadline:
                log = (node.folder / "log").read_text()
                raise RuntimeError(f"sshd does not listen; its log:\n{log}") from None
            time.sleep(0.01)
