"""The redirection of a process's output to the driver; see `loom_gateway.driver.output.pump`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import subprocess
import sys
import threading

from loom_gateway.driver.output import pump as log_pump

CONNECT_TIMEOUT = 10.0  # seconds that the driver has to accept the connection

PIPE_SIZE = 256 << 10
"""Bytes that a process can print before it waits for its pump to run. Linux limits the sum over all pipes of a
user."""

logger = logging.getLogger(__name__)


def capture_output(address: tuple[str, int], procs: int, rank: int) -> None:
    """Send the output of this process and its children also to the driver at ``address``, if possible."""
    try:
        _capture(address, procs, rank)
    except OSError as error:
        logger.warning("the output of this process is not sent to its session: %s", error)


def _capture(address: tuple[str, int], procs: int, rank: int) -> None:
    with contextlib.ExitStack() as opened:
        driver = opened.enter_context(socket.create_connection(address, CONNECT_TIMEOUT))
        driver.sendall(json.dumps([procs, rank, "logs"]).encode() + b"\n")
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        for descriptor in (out, out_end, err, err_end):
            opened.callback(os.close, descriptor)
        _enlarge(out_end, err_end)
        passed = (out, err, driver.fileno())
        pump = subprocess.Popen(
            [sys.executable, "-I", "-S", log_pump.__file__, *map(str, passed)],
            stdin=subprocess.DEVNULL,
            pass_fds=passed,
            start_new_session=True,  # so that Ctrl-C reaches only the process that prints
        )
        originals = os.dup(1), os.dup(2)
        _redirect(out_end, err_end)
    threading.Thread(target=_restore_after, args=(pump, *originals), name="loom-log-pump", daemon=True).start()


def _enlarge(*pipes: int) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # the user is over the kernel's limit of pipe memory
            for pipe in pipes:
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_SIZE)


def _redirect(out: int, err: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # the user may have replaced the stream
            stream.flush()
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.dup2(out, 1)
    os.dup2(err, 2)


def _restore_after(pump: subprocess.Popen[bytes], out: int, err: int) -> None:
    """Restore the original streams when the pump dies. Otherwise `print` would raise."""
    pump.wait()
    _redirect(out, err)
