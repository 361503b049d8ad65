"""The process's part of its link: the first connection to the driver, and the start of the agent.

It needs nothing of Monarch, whose part of a process's start is in `loom_gateway.driver.monarch.liveness`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from typing import NamedTuple

import msgpack

import loom
import loom_gateway
from loom.errors import ProtocolMismatch
from loom.tracing import clock
from loom.wire.bodies import Untied
from loom_gateway.driver.process_link.agent import Setup, introduction
from loom_gateway.driver.process_link.link import REFUSED_FOR, RETRY, ProcessLinkAddress

CONNECT_TIMEOUT = 10.0  # seconds that the driver has to answer one greeting of a new process
MOST_AGENTS = 10  # how often an agent that was killed is started again

PIPE_SIZE = 256 << 10
"""Bytes that a process can print before it waits for its agent to run. Linux limits the sum over all pipes of a
user."""

_PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from loom_gateway.driver.process_link.agent import main; main()"

logger = logging.getLogger(__name__)


class DriverGone(Exception):
    """The driver does not answer any more, or does not know this process."""


class Captured(NamedTuple):
    """The output of this process while an agent reads it."""

    originals: tuple[int, int]
    """Descriptors of the standard output and error that this process had before."""
    pipes: tuple[int, int]
    """The ends that the agent reads. This process has them too, so no `print` fails when the agent is killed."""


class DriverTie:
    """This process's tie to its driver. It ends the process when the driver is gone.

    Args:
        procs: id of the process's proc mesh.
        output: whether the driver also gets the output of this process and its children.
        meets: whether to agree with the mesh's other processes where to meet; see `master`.
    """

    def __init__(
        self, address: ProcessLinkAddress, procs: int, rank: int, output: bool, meets: bool = False
    ) -> None:
        self._address = address
        self._procs = procs
        self._rank = rank
        self._output = output
        self.weaver = ""  # the weaver's address, perhaps empty
        self.master: tuple[str, str] | None = None
        """Host and port where the processes of the mesh may meet; None if its first process is gone."""
        self._meets = meets
        self._reserved = _reserve_port() if meets and rank == 0 else None
        try:
            agent, captured = self._start(again=False)
        except DriverGone:
            os._exit(1)
        threading.Thread(target=self._keep, args=(agent, captured), name="loom-process-link", daemon=True).start()

    def _start(self, again: bool) -> tuple[subprocess.Popen[bytes], Captured | None]:
        """Connect and start an agent. Return it, and what was captured for it if the output is."""
        address, name, pid = self._address, secrets.token_hex(16), os.getpid()
        setup = Setup(*address[:3], name, address.patience, self._procs, self._rank, pid, -1, None)
        with contextlib.ExitStack() as opened:
            driver = opened.enter_context(self._connect(setup, again))
            passed = [driver.fileno()]
            process = _descriptor_of(pid)
            if process is not None:
                opened.callback(os.close, process)
                passed.append(process)
            ends: tuple[int, int] | None = None
            pipes: tuple[int, int] | None = None
            if self._output:
                (out, out_end), (err, err_end) = os.pipe(), os.pipe()
                for descriptor in (out_end, err_end):
                    opened.callback(os.close, descriptor)
                _enlarge(out_end, err_end)
                pipes, ends = (out, err), (out_end, err_end)
                passed += pipes
            agent = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _PROGRAM, *_import_path()],
                stdin=subprocess.PIPE,
                pass_fds=passed,
                start_new_session=True,  # so that Ctrl-C reaches only the process that prints
            )
            assert agent.stdin is not None
            with agent.stdin as given, contextlib.suppress(BrokenPipeError):  # it was killed already
                told = {**asdict(setup), "connection": driver.fileno(), "pipes": pipes, "process": process}
                given.write(json.dumps(told).encode() + b"\n")
            captured = None
            if ends is not None and pipes is not None:
                captured = Captured((os.dup(1), os.dup(2)), pipes)
                _redirect(*ends)
        return agent, captured

    def _connect(self, setup: Setup, again: bool) -> socket.socket:
        """Return a connection on which the driver has accepted this process. Raise `DriverGone` if none is."""
        now = time.monotonic()
        until, refused_until = now + self._address.patience, now + min(self._address.patience, REFUSED_FOR)
        while True:
            try:
                return self._greet(setup, again)
            except ConnectionRefusedError:
                if time.monotonic() >= refused_until:
                    raise DriverGone from None
            except (OSError, ProtocolMismatch):
                if time.monotonic() >= until:
                    raise DriverGone from None
            time.sleep(RETRY)

    def _greet(self, setup: Setup, again: bool) -> socket.socket:
        before = clock.monotonic()
        driver = socket.create_connection((setup.host, setup.port), CONNECT_TIMEOUT)
        try:
            introduced = introduction(setup, again, master=self._meeting(driver))
            # One byte at a time: what follows the answer is the agent's.
            while introduced.answer is None:
                proof = introduced.feed(driver.recv(1) or _closed())
                if proof and introduced.clock is not None and not again:
                    exchange = clock.ClockExchange(before, introduced.clock, clock.monotonic())
                    clock.adopt(clock.measured([exchange]))
                driver.sendall(proof)
            if isinstance(introduced.answer, Untied):
                raise DriverGone
            self.weaver = introduced.answer.weaver
            if introduced.answer.master:
                host, _, port = introduced.answer.master.partition(" ")
                self.master = host, port
            return driver
        except BaseException:
            driver.close()
            raise

    def _meeting(self, driver: socket.socket) -> str | None:
        """Return this process's `Tie.master`: the first one is met at its address on the route to the driver."""
        if self._reserved is None:
            return "" if self._meets else None
        return f"{driver.getsockname()[0]} {self._reserved.getsockname()[1]}"

    def _keep(self, agent: subprocess.Popen[bytes], captured: Captured | None) -> None:
        """Start another agent whenever one was killed."""
        for _ in range(MOST_AGENTS):
            agent.wait()
            if captured is not None:
                _redirect(*captured.originals)
                for descriptor in (*captured.originals, *captured.pipes):
                    os.close(descriptor)
            logger.warning("the agent of this process's link has ended with %s: starting another", agent.returncode)
            try:
                agent, captured = self._start(again=True)
            except DriverGone:
                break
            except Exception:
                logger.exception("no agent can be started: this process ends")
                break
        os._exit(1)


def _reserve_port() -> socket.socket:
    """Return a socket that keeps a free port from everyone who asks for any port.

    It does not listen: a server that names the port, and reuses addresses as torch's stores do, can have it.
    """
    reserved = socket.socket(socket.AF_INET)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    return reserved


def _descriptor_of(pid: int) -> int | None:
    """Return a descriptor of a process, by which its end can be told; None on a machine that has none."""
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            return os.pidfd_open(pid)
    return None


def _closed() -> bytes:
    raise ConnectionResetError("the driver closed the connection")


def _import_path() -> list[str]:
    """Return the folders from which the agent imports: the standard library's, and those of its few packages."""
    packages = [os.path.dirname(os.path.dirname(module.__file__ or "")) for module in (loom, loom_gateway, msgpack)]
    library = os.path.dirname(os.__file__)
    return list(dict.fromkeys([library, os.path.join(library, "lib-dynload"), *packages]))


def _enlarge(*pipes: int) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # the user is over the kernel's limit of pipe memory
            for pipe in pipes:
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_SIZE)


def _redirect(out: int, err: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # the user may have replaced the stream
            stream.flush()
            # The agent reads UTF-8, whatever the locale of the host is.
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    os.dup2(out, 1)
    os.dup2(err, 2)
