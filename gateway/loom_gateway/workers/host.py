"""``python -m loom_gateway.workers.host``: offers this machine to root clients as a Monarch host.

The process runs Monarch's worker loop. Sessions attach to it and spawn their processes on it, as its children. Once
a client can connect, it prints one line of JSON::

    {"event": "listening", "address": "tcp://127.0.0.1:26601", "pid": 4242}

It ends on SIGTERM, on SIGINT and, with ``--exit-with-parent``, when its standard input is closed. All its
descendants end with it. On SIGTERM those that train have ``--grace`` seconds to save their state; see
`loom_gateway.workers.end_notice`. SIGINT or a second signal ends them at once. After a SIGKILL only the processes
of sessions end: Monarch has asked the kernel for that.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from loom.errors import InvalidAddress, LoomError, PortInUse
from loom.extras import WORKER_MODULES, require
from loom.process.error_exit import report
from loom.process.host_notices import DRAINING_VARIABLE, ENDING_VARIABLE
from loom.process.listen import announce, bracketed, listen
from loom.process.orphans import adopt_orphans
from loom.process.parent_pipe import when_parent_ends
from loom.process.state_file import replace_file
from loom.process.threads import start_thread
from loom.wings import Part
from loom_gateway.workers.end_notice import EndNotice
from loom_gateway.workers.monarch_env import remove_own_place, service_address, set_monarch_environment
from loom_gateway.workers.sources import WorkerAddress, parse_worker_address

if TYPE_CHECKING:
    import psutil
    from monarch.actor import MeshFailure


GRACE = 25.0
"""Default seconds for which processes may go on after the worker's SIGTERM: Kubernetes kills all after 30 s."""

AT_ONCE = 0.5  # seconds between SIGTERM and SIGKILL without a grace, and the longest wait after SIGKILL
LOOK_AGAIN = 0.05  # seconds between two searches for descendants at the end

_ending = threading.Event()

_own_notices: list[str] = []  # paths of the files by which this worker tells its processes that it is left

UNDELIVERABLE_AFTER = "3650d"
"""The duration for which the host tries to deliver a message.

After Monarch's default the host gives up *and exits* (torchmonarch 0.7: ``hyperactor::client`` ends the process). A
killed root client would then, a minute later, end the host of every other session.
"""

PATIENCE = 60.0
"""Default of ``--patience``, as of the gateway's ``--worker-patience``."""

PROCESSES_GIVE_UP_LATER = 30.0
"""Seconds after the patience for which the processes that the host starts go on to try. Otherwise they would
inherit the driver's setting and never give up. Then a process ends whose host was killed before it had begun."""


_PORT_ADVICE = "end what listens there or choose another port"

LISTEN_CHECK = 0.005
"""Seconds between two checks whether Monarch listens. It has no event for that, but takes only milliseconds."""


def serve(address: WorkerAddress, patience: float = PATIENCE) -> None:
    """Run Monarch's worker loop at ``address`` until a client shuts the host down.

    ``patience``: seconds without network that the processes started here survive.
    """
    ip = _resolve(address)
    # Report a conflict before Monarch is loaded, which takes a second.
    listen(str(ip), address.port, _PORT_ADVICE).close()
    set_monarch_environment()
    remove_own_place()
    import monarch.actor
    from monarch.actor import ChannelTransport, enable_transport, start_worker_loop_forever
    from monarch.config import configure

    monarch.actor.unhandled_fault_hook = _on_fault
    # Monarch numbers the messages of each client to each actor, and the receiver waits for missing numbers. This
    # worker has the name of its predecessor, so it would wait forever for the earlier messages of a client that
    # knew the predecessor. One connection keeps the order anyway. Processes that are spawned here keep to the
    # numbers.
    configure(message_delivery_timeout=UNDELIVERABLE_AFTER, enable_dest_actor_reordering_buffer=False)
    # For the processes that are started here. This one has read its configuration already; the variable would
    # override it.
    give_up_after = f"{patience + PROCESSES_GIVE_UP_LATER:g}s"
    os.environ.setdefault("HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT", give_up_after)
    enable_transport(ChannelTransport.TcpWithLocalhost if ip.is_loopback else f"tcp://{bracketed(ip)}:0")
    url = str(address)
    served = start_worker_loop_forever(address=service_address(url), ca="trust_all_connections")
    try:
        _wait_until_listening(served, address.port)
        if not _ending.is_set():
            announce(address=url)
        served.get()
    except ValueError as error:
        if "Address already in use" in str(error):
            raise PortInUse(f"port {address.port} of {address.host} is in use: {_PORT_ADVICE}") from error
        raise


def _sweep() -> None:
    """Repair what injected faults have left here whose agents were killed, perhaps with the worker before."""
    try:
        for text in Part.FAULT_SWEEP.load()():
            _write_error(f"an injected fault was left: {text}\n")
    except (LoomError, OSError) as error:
        _write_error(f"what injected faults have left is not repaired: {error}\n")


def _wait_until_listening(served: Any, port: int) -> None:
    import psutil

    this_process = psutil.Process()
    # A connection attempt would not show who answers: another program may have taken the port meanwhile.
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


def _end_with_descendants(why: str, grace: float = AT_ONCE, notice: EndNotice | None = None) -> NoReturn:
    """End every descendant, then this process, without unwinding other threads.

    Args:
        grace: seconds until SIGKILL.
        notice: given first; processes that heed it get no signal before SIGKILL, and their children none before
            they have ended. None: everything gets SIGTERM.
    """
    _ending.set()
    _write_error(f"the worker ends: {why}\n")
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        if notice is not None:
            with contextlib.suppress(OSError):  # a full disk: then it is not told why processes end
                replace_file(os.environ[ENDING_VARIABLE], f"its worker was told to end: {why}\n")
            notice.give()
        told: set[psutil.Process] = set()
        kill_at = time.monotonic() + grace
        looks_in_vain = 0
        while looks_in_vain < 2 and time.monotonic() < kill_at + AT_ONCE:
            descendants = _living_descendants()
            # A search misses processes that are adopted during it, after their parent has ended. The next one finds
            # them.
            looks_in_vain = 0 if descendants else looks_in_vain + 1
            for process in descendants:
                with contextlib.suppress(psutil.NoSuchProcess):
                    if time.monotonic() >= kill_at:
                        process.kill()
                    elif process not in told and (notice is None or _is_to_be_told(process, notice)):
                        process.terminate()
                        told.add(process)
            if descendants:
                psutil.wait_procs(descendants, timeout=LOOK_AGAIN)
            else:
                time.sleep(LOOK_AGAIN)
    for path in _own_notices:
        with contextlib.suppress(OSError):
            os.unlink(path)
    os._exit(0)


def _is_to_be_told(process: psutil.Process, notice: EndNotice) -> bool:
    """Return whether a process gets SIGTERM now. A training process ends its own children when it is ready to.

    The children of a process that has ended become this one's (on Linux), and are told then.
    """
    return not notice.heeded_by(process) and (sys.platform != "linux" or process.ppid() == os.getpid())


def _living_descendants() -> list[psutil.Process]:
    import psutil

    living = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


def _end_on_signals(grace: float, notice: EndNotice) -> None:
    def end(number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        # Monarch raises SIGINT too, for a fault that it can report to no client.
        if number != signal.SIGTERM or grace <= 0 or _ending.is_set():
            _end_with_descendants(name)
        _ending.set()
        # On a thread, because this one goes on with Monarch's work, and hears a second signal.
        why = f"{name}; what trains may go on for {grace:g} s"
        threading.Thread(target=_end_with_descendants, args=(why, grace, notice), name="end").start()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)


def _own_notice(variable: str) -> str:
    """Set an environment variable to the path of a notice of this worker, which nobody else can guess."""
    path = os.path.join(tempfile.gettempdir(), f"loom-worker-{secrets.token_hex(8)}")
    _own_notices.append(path)
    os.environ[variable] = path
    return path


def _read_taints(node: str) -> None:
    from loom_gateway.workers.node_taints import DrainingFile, OwnNode

    if (own := OwnNode.of(node, os.environ)) is None:
        _write_error(f"the taints of {node} are not read: this is no pod with the token of a service account\n")
    else:
        start_thread("node-taints", DrainingFile(own, _own_notice(DRAINING_VARIABLE)).keep)


def _write_error(line: str) -> None:
    # Not with print(): a handler may interrupt a write of this thread, and the reader may be gone.
    with contextlib.suppress(OSError):
        os.write(2, line.encode())


def _on_fault(failure: MeshFailure) -> None:
    """Report a fault. Monarch's own hook would end this process, and with it the hosts of all sessions."""
    _write_error(f"Monarch: {failure.report()}\n")


def _exit_with_parent() -> None:
    """Watch standard input, whose other end the parent holds. End when it is closed."""
    parent_pipe = os.dup(0)  # not inheritable, like every descriptor that Python makes
    # Give the sessions' processes an empty standard input, so that input() in an actor does not wait for the
    # parent.
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    when_parent_ends(lambda: _end_with_descendants("its parent is gone"), parent_pipe)


def main(arguments: Sequence[str] | None = None) -> int:
    """Offer this machine as a Monarch host until a signal ends it. Return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m loom_gateway.workers.host",
        description="Offer this machine as a Monarch host. Prints one line of JSON when it listens.",
    )
    parser.add_argument(
        "--address", required=True, metavar="tcp://HOST:PORT", help="where to listen, as the clients will name it"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE,
        metavar="SECONDS",
        help="how long the processes here survive without network, as the gateway's --worker-patience",
    )
    parser.add_argument(
        "--exit-with-parent",
        action="store_true",
        help="end when standard input, a pipe that the parent holds, is closed",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=GRACE,
        metavar="SECONDS",
        help="how long processes that train may go on after SIGTERM, to save their state; default: %(default)g",
    )
    told_by = parser.add_mutually_exclusive_group()
    told_by.add_argument(
        "--draining-file",
        metavar="PATH",
        help="while there is a file at this path, trainings leave this host for others",
    )
    told_by.add_argument(
        "--node",
        metavar="NAME",
        help="the node of this pod; trainings leave while it has a taint by which it is announced to go away",
    )
    options = parser.parse_args(arguments)
    try:
        if options.draining_file is not None:
            os.environ[DRAINING_VARIABLE] = os.path.abspath(options.draining_file)
        require(WORKER_MODULES, "a worker")
        _own_notice(ENDING_VARIABLE)
        if options.node is not None:
            _read_taints(options.node)
        address = parse_worker_address(options.address)
        adopt_orphans()
        _sweep()
        _end_on_signals(options.grace, EndNotice())
        if options.exit_with_parent:
            _exit_with_parent()
        serve(address, options.patience)
    except LoomError as error:
        return report(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
