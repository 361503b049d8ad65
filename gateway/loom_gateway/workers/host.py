"""``python -m loom_gateway.workers.host``: offers this machine to root clients as a Monarch host.

The process runs Monarch's worker loop. Sessions attach to it and spawn their procs on it, as its children. It
prints one line of JSON once a client can connect::

    {"event": "listening", "address": "tcp://127.0.0.1:26601", "pid": 4242}

and ends on SIGTERM, on SIGINT and, with ``--exit-with-parent``, when its standard input is closed. Its procs and
what these have started end with it. After a SIGKILL only the procs end: Monarch asks the kernel for that.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from loom.errors import InvalidAddress, LoomError, PortInUse
from loom.extras import WORKER_MODULES, require
from loom.process.exit_codes import report
from loom.process.lifeline import when_parent_ends
from loom.process.listen import announce, bracketed, listen
from loom_gateway.workers.monarch_env import set_monarch_environment
from loom_gateway.workers.sources import WorkerAddress, parse_worker_address

if TYPE_CHECKING:
    import psutil
    from monarch.actor import MeshFailure


GRACE = 0.5
"""Seconds that the descendants have between SIGTERM and SIGKILL, and at most after that."""

LOOK_AGAIN = 0.05
"""Seconds between two looks for descendants at the end."""

_ending = threading.Event()
"""Set when this process is about to end."""

UNDELIVERABLE_AFTER = "3650d"
"""How long the host tries to deliver a message.

After Monarch's default of 60 s it gives up *and exits* (torchmonarch 0.7: ``hyperactor::client`` ends the process),
so that a root client that was killed would take every other session's host with it a minute later. To go on trying
costs a connection attempt now and then.
"""

PROCESSES_GIVE_UP_AFTER = "30s"
"""The same for the processes that the host starts: Monarch's default. It has to be said, since they would otherwise
have it from the driver, which does not give up either. One whose host was killed before it had begun ends by it."""

REAP_EVERY = 0.1
"""Seconds between two looks for orphans that have ended, while there is something that has ended."""

_PORT_ADVICE = "end what listens there or choose another port"

LISTEN_CHECK = 0.005
"""Seconds between two looks at whether Monarch listens. It has no event for that, but does so in milliseconds."""


def serve(address: WorkerAddress) -> None:
    """Run Monarch's worker loop at ``address`` until a client shuts the host down.

    Raises:
        InvalidAddress: the host of the address is not one of this machine that others can connect to.
        PortInUse: something else listens there.
    """
    ip = _resolve(address)
    _check_free(address, ip)
    set_monarch_environment()
    import monarch.actor
    from monarch.actor import ChannelTransport, enable_transport, start_worker_loop_forever
    from monarch.config import configure

    monarch.actor.unhandled_fault_hook = _on_fault
    # Monarch numbers what each client sends to each of its actors, and whoever receives waits for the numbers in
    # between. This worker has the name of the one that was here before: a client that counts on from that one would
    # never be heard. One connection keeps the order. Processes that are spawned here keep to the numbers.
    configure(message_delivery_timeout=UNDELIVERABLE_AFTER, enable_dest_actor_reordering_buffer=False)
    # For the processes that are started here; this one has read its own already, over which it would prevail.
    os.environ.setdefault("HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT", PROCESSES_GIVE_UP_AFTER)
    enable_transport(ChannelTransport.TcpWithLocalhost if ip.is_loopback else f"tcp://{bracketed(ip)}:0")
    url = str(address)
    served = start_worker_loop_forever(address=url, ca="trust_all_connections")
    try:
        _wait_until_listening(served, address.port)
        if not _ending.is_set():
            announce(address=url)
        served.get()
    except ValueError as error:
        if "Address already in use" in str(error):
            raise PortInUse(f"port {address.port} of {address.host} is in use: {_PORT_ADVICE}") from error
        raise


def _wait_until_listening(served: Any, port: int) -> None:
    import psutil

    this_process = psutil.Process()
    # A connection would not tell who answers it: a program that took the port meanwhile would do as well.
    while not any(
        connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        for connection in this_process.net_connections("tcp")
    ):
        with contextlib.suppress(TimeoutError):
            served.get(timeout=LISTEN_CHECK)


def _resolve(address: WorkerAddress) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        ip = ipaddress.ip_address(socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][4][0])
    except socket.gaierror as error:
        raise InvalidAddress(
            f"the host {address.host!r} is not known on this machine ({error.strerror})"
        ) from error
    if ip.is_unspecified:
        raise InvalidAddress(
            f"{address.host} is no address that a client could connect to: give the one of this machine instead, "
            f"such as tcp://{socket.gethostname()}:{address.port}"
        )
    return ip


def _check_free(address: WorkerAddress, ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    """Bind the port and let it go: says what is wrong before Monarch is loaded, which takes a second."""
    listen(str(ip), address.port, _PORT_ADVICE).close()


def _end_with_descendants(status: int = 0) -> NoReturn:
    """End every descendant, then this process, without unwinding what runs in other threads."""
    _ending.set()
    import psutil

    with contextlib.suppress(psutil.Error):
        told: set[psutil.Process] = set()
        kill_at = time.monotonic() + GRACE
        looks_in_vain = 0
        while looks_in_vain < 2 and time.monotonic() < kill_at + GRACE:
            descendants = _living_descendants()
            # A look misses what is adopted meanwhile, from a parent that has just ended: the next one finds it.
            looks_in_vain = 0 if descendants else looks_in_vain + 1
            for process in descendants:
                with contextlib.suppress(psutil.NoSuchProcess):
                    if time.monotonic() >= kill_at:
                        process.kill()
                    elif process not in told:
                        process.terminate()
            told.update(descendants)
            if descendants:
                psutil.wait_procs(descendants, timeout=LOOK_AGAIN)
            else:
                time.sleep(LOOK_AGAIN)
    os._exit(status)


def _living_descendants() -> list[psutil.Process]:
    import psutil

    living = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


def _adopt_orphans() -> None:
    """Become the parent of what the procs leave behind when they end, so that it ends with this process.

    What users' code starts would otherwise go to init. Where the kernel is not Linux it does.
    """
    if sys.platform == "linux":
        import ctypes

        pr_set_child_subreaper = 36
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)
        threading.Thread(target=_reap_orphans, name="reap-orphans", daemon=True).start()


def _reap_orphans() -> None:
    """Take note of the ends of orphans that lead a session, as the pumps of the procs' output do.

    Each would stay a zombie for as long as this process runs. Monarch reaps the procs, which lead none.
    """
    while True:
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)  # until there is a zombie, whoever is to reap it
        except ChildProcessError:
            time.sleep(REAP_EVERY)  # no children: there is nothing to wait for
            continue
        for pid in _children():
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                if os.getsid(pid) == pid:
                    os.waitpid(pid, os.WNOHANG)
        time.sleep(REAP_EVERY)  # what is left is Monarch's to reap


def _children() -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process().children()]


def _on_signal(number: int, _frame: FrameType | None) -> None:
    # Monarch, too, raises SIGINT here, for a fault that it knows nobody to tell of.
    _say_why(f"the worker ends: {signal.Signals(number).name}\n")
    _end_with_descendants()


def _say_why(line: str) -> None:
    # Not with print(): a handler may run while this thread is writing, and whoever read it may be gone.
    with contextlib.suppress(OSError):
        os.write(2, line.encode())


def _on_fault(failure: MeshFailure) -> None:
    """Say it, where Monarch's own hook would end the process, and with it the hosts of all sessions."""
    _say_why(f"Monarch: {failure.report()}\n")


def _exit_with_parent() -> None:
    """Watch standard input, whose other end the parent holds, and end when it is closed."""
    lifeline = os.dup(0)  # not inheritable, as every descriptor that Python makes
    # The procs inherit standard input: theirs is empty, so that input() in an actor does not wait for the parent.
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)

    def end() -> None:
        _say_why("the worker ends: its parent is gone\n")
        _end_with_descendants()

    when_parent_ends(end, lifeline)


def main(arguments: Sequence[str] | None = None) -> int:
    """Offer this machine as a Monarch host until it is told to end; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m loom_gateway.workers.host",
        description="Offer this machine as a Monarch host. Prints one line of JSON when it listens.",
    )
    parser.add_argument(
        "--address", required=True, metavar="tcp://HOST:PORT", help="where to listen, as the clients will name it"
    )
    parser.add_argument(
        "--exit-with-parent",
        action="store_true",
        help="end when standard input, a pipe that the parent holds, is closed",
    )
    options = parser.parse_args(arguments)
    try:
        require(WORKER_MODULES, "a worker")
        address = parse_worker_address(options.address)
        _adopt_orphans()
        signal.signal(signal.SIGTERM, _on_signal)
        signal.signal(signal.SIGINT, _on_signal)
        if options.exit_with_parent:
            _exit_with_parent()
        serve(address)
    except LoomError as error:
        return report(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
