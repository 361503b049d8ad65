"""A terminal on a rank, in a real terminal here: its keys, its size, and its life through cuts of the line."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import loom
from loom_proxy.local import LocalCluster
from loom_proxy.mesh.procs import ProcMeshProxy
from tests.integration.remote_exec.remains import await_gone
from tests.support.gateways import BOUND, await_true
from tests.support.network.gate import Gate

LOOM = "import sys; from loom.cli import main; main()"


class Screen:
    """A terminal, and a program that has it."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self._ours, self._theirs = pty.openpty()
        self.resize(30, 100)
        self._before = termios.tcgetattr(self._theirs)
        self.text = ""
        self.process = subprocess.Popen(
            [sys.executable, "-c", LOOM, *arguments],
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            env={**os.environ, "TERM": "dumb", "PYTHONFAULTHANDLER": "1", **environment},
            start_new_session=True,
        )

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def await_text(self, pattern: str) -> str:
        """Wait until the screen shows something, and return it."""
        until = time.monotonic() + BOUND
        while (found := re.search(pattern, self.text)) is None:
            ready, _, _ = select.select([self._ours], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"the screen never showed {pattern!r}, but {self.text[-2000:]!r}"
            self.text += os.read(self._ours, 1 << 16).decode(errors="replace")
        self.text = self.text[found.end() :]
        return found[0]

    def await_end(self) -> int:
        """Wait until the program has ended; return its exit status. The terminal is as it was before."""
        try:
            status = self.process.wait(BOUND)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # Python then says what each thread waits for
            threads = self.await_text(r"Fatal Python error[^\x00]*Extension modules")
            raise AssertionError(f"it has not ended: {threads}") from None
        assert termios.tcgetattr(self._theirs) == self._before
        return status

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)


@pytest.fixture
def shell(
    far: loom.Job, trainers: ProcMeshProxy, gate: Gate, cluster: LocalCluster
) -> Iterator[Callable[..., Screen]]:
    """Opens ``loom shell`` on rank 1, behind the gate."""
    screens = []

    def opened(*options: str) -> Screen:
        url = f"ws://127.0.0.1:{gate.port}"
        arguments = ["--session", far.session, "--mesh", "trainers", "--rank", "1", *options]
        screens.append(Screen("shell", *arguments, LOOM_URL=url, LOOM_TOKEN=cluster.token))
        return screens[-1]

    yield opened
    for screen in screens:
        screen.close()


@pytest.mark.slow
def test_a_terminal_has_the_size_the_keys_and_the_exit_status_of_the_one_here(shell: Callable[..., Screen]) -> None:
    screen = shell("--", "bash", "--norc")
    screen.type("stty size; echo rank=$RANK term=$TERM\r")
    screen.await_text("\n30 100\r\nrank=1 term=dumb\r\n")

    screen.resize(40, 120)
    screen.process.send_signal(signal.SIGWINCH)
    screen.type("until stty size | grep '40 120'; do :; done\r")
    screen.await_text("\n40 120\r\n")

    # Printed by what is interrupted: between two commands of a list, bash may lose an interrupt.
    screen.type("sh -c 'echo sle\"\"eps; exec sleep 1000'\r")
    screen.await_text("\nsleeps\r\n")
    screen.type("\x03")
    screen.type("echo status=$?\r")
    screen.await_text("\nstatus=130\r\n")

    screen.type("exit 7\r")
    assert screen.await_end() == 7


def test_a_terminal_goes_on_through_a_cut_and_shows_what_was_printed_meanwhile(
    shell: Callable[..., Screen], gate: Gate, tmp_path: Path
) -> None:
    down, printed = tmp_path / "down", tmp_path / "printed"
    screen = shell("--", "bash", "--norc")
    screen.type("echo pid=$$\r")
    pid = screen.await_text(r"\npid=\d+\r\n")
    screen.type(
        f"echo wa''its; until [ -e {down} ]; do sleep 0.02; done; seq -f 'line %.0f' 5000; touch {printed}\r"
    )
    screen.await_text("\nwaits\r\n")
    gate.shut()
    try:
        assert gate.knocked.wait(BOUND)
        down.touch()
        await_true(printed.exists)
    finally:
        gate.open()

    for number in range(1, 5001):
        screen.await_text(rf"line {number}\r\n")
    screen.type("echo pid=$$\r")
    assert screen.await_text(r"\npid=\d+\r\n") == pid
    screen.type("exit\r")
    assert screen.await_end() == 0


@pytest.mark.slow
def test_a_terminal_can_be_left_while_the_line_is_down_and_its_shell_ends(
    shell: Callable[..., Screen], gate: Gate
) -> None:
    screen = shell("--away", "1", "--", "bash", "--norc")
    screen.type("echo pid=$$\r")
    pid = int(screen.await_text(r"\npid=\d+\r\n").strip().removeprefix("pid="))
    gate.shut()
    try:
        screen.type("\r~.")
        assert screen.await_end() == 255
    finally:
        gate.open()

    await_gone(pid)


@pytest.mark.slow
def test_a_terminal_ends_with_its_rank(far: loom.Job, shell: Callable[..., Screen]) -> None:
    far.hosts.slice(hosts=0).spawn_procs(name="short-lived").initialized.get(BOUND)
    screen = shell("--mesh", "short-lived", "--rank", "0", "--", "bash", "--norc")
    screen.type("kill -KILL $PPID\r")

    screen.await_text("is gone")
    assert screen.await_end() == 1


def test_without_a_terminal_there_is_no_shell(trainers: ProcMeshProxy) -> None:
    with pytest.raises(loom.WrongState, match="needs a terminal"):
        trainers.shell()
