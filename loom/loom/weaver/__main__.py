"""``python -m loom.weaver``: the weaver's process, which a gateway starts, or ``loom serve weaver``."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import math
import os
import resource
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

import uvloop

from loom.errors import Conflict, InvalidAddress, LoomError, PortInUse
from loom.process import tasks
from loom.process.error_exit import report
from loom.process.linux_capabilities import keep_only
from loom.process.listen import announce, bracketed, host_and_port, listen, reachable
from loom.process.parent_pipe import parent_releases, when_parent_ends
from loom.terminal_text import fit_log_records, limit_log
from loom.weaver.keys import secret_in
from loom.weaver.liveness import LivenessTimeouts
from loom.weaver.server.server import Server, monotonic_clock
from loom.weaver.server.session_leases import SessionLeases
from loom.weaver.server.users import Users
from loom.weaver.storage.folder import Remembered, WeaverFolder
from loom.weaver.storage.store import Store
from loom.wings import Part

_log = logging.getLogger("loom.weaver")

LOOK_EVERY = 1.0  # seconds between two checks that the folder still exists

MOVED_GRACE = 60.0
"""Seconds in which no replica fails for want of a connection after the start of a weaver that may have moved to
another host. A threadlet notices within 30 s that the host before is gone, and a name leads there for a while."""


def main() -> int:
    """Run the weaver until a signal or a reason of its own ends it; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m loom.weaver", description="Run Loom's weaver.")
    parser.add_argument("--state", required=True, metavar="FOLDER", help="folder of the stores and the socket")
    parser.add_argument("--local", action="store_true",
                        help="be a gateway's on its machine: only the folder's socket takes requests, and status "
                             "reports do not wait for the disk")  # fmt: skip
    parser.add_argument(
        "--secret-file", type=Path, metavar="FILE", help="where the secret is, if not in the folder"
    )
    operator = Part.ALERT_OPERATOR.load()
    parser.add_argument("--alert-mail", metavar="COMMAND", help="sends an alert's e-mail")
    parser.add_argument("--alert-network", action="append", default=[], metavar="CIDR",
                        help="network of addresses that are not public, and that webhooks may reach")  # fmt: skip
    parser.add_argument("--alert-page", default="", metavar="URL", help="address of the page, for alerts")
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT",
                        help="where threadlets connect; port 0: the previous port, or a free one")  # fmt: skip
    parser.add_argument("--advertise", default=None, metavar="HOST", help="the host in the address, if it differs")
    parser.add_argument(
        "--beat", type=float, default=1.0, metavar="SECONDS", help="seconds between a replica's heartbeats"
    )
    parser.add_argument("--linger", type=float, default=math.inf, metavar="SECONDS",
                        help="seconds that it lives without a gateway, a driver or a threadlet")  # fmt: skip
    parser.add_argument("--log-level", default="warning", choices=["debug", "info", "warning", "error"])
    parser.add_argument(
        "--passable", action="store_true", help="let drivers of other user ids connect to the socket"
    )
    parser.add_argument("--await-release", action="store_true",
                        help="begin when a byte comes on standard input, and end if it closes before")  # fmt: skip
    parser.add_argument("--exit-with-parent", action="store_true", help="end when standard input closes")
    options = parser.parse_args()
    logging.basicConfig(level=options.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    fit_log_records()
    limit_log()
    if options.await_release and not parent_releases():
        return 1  # no gateway would ever find this weaver
    if options.exit_with_parent:
        # End the same way as on SIGTERM, so that there is one way to stop.
        when_parent_ends(lambda: os.kill(os.getpid(), signal.SIGTERM))
    _allow_many_connections()
    os.umask(0o077)
    if options.passable:  # its gateway has rights that a weaver does not need
        keep_only()
    try:
        host, port = host_and_port(options.listen, "an address to listen on: write HOST:PORT, such as 127.0.0.1:0")
        if not options.beat > 0:
            raise InvalidAddress(f"--beat {options.beat:g} makes no sense")
        secret = None if options.secret_file is None else secret_in(options.secret_file)
        folder = WeaverFolder(options.state, options.passable, secret)
        before = folder.remembered()
        tcp = _listen_as_before(host, port, before)
        bound = tcp.getsockname()
        folder.remember(Remembered(host, bound[1], before.key if before else None))
        place = f"tcp://{bracketed(options.advertise or reachable(host, socket.gethostname()))}:{bound[1]}"
        if not options.local:  # the gateway has written what it allows
            operator.made(options.alert_mail, options.alert_network, options.alert_page).write(folder.path)
        folder.take()
        timing = LivenessTimeouts(beat=options.beat)
        clock = monotonic_clock()
        users = Users(
            lambda user: Store(folder.store(user), folder.check, each_waits=not options.local),
            list(folder.users()),
            folder.keys,
            clock,
            place,
            timing if options.local else replace(timing, restart_grace=MOVED_GRACE),
            folder.path / operator.FILE,
            SessionLeases(clock, folder.path / "moved-sessions.json", folder.check),
        )
    except LoomError as error:
        return report(error)
    failure = uvloop.run(_serve(users, tcp, folder, place, options.local, options.linger))
    if isinstance(failure, LoomError):
        return report(failure)
    return 0 if failure is None else report(LoomError(f"the weaver cannot store anything any more: {failure}"))


async def _serve(
    users: Users, tcp: socket.socket, folder: WeaverFolder, place: str, local: bool, linger: float
) -> Exception | None:
    loop = asyncio.get_running_loop()
    # Imported modules live as long as the process: keep the garbage collector from scanning them again and again.
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    server = Server(users, linger)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, users.ended.set)
    await server.start(tcp, _listen_unix(folder) if local else None)
    users.tasks.add(tasks.run_to_end("watch the folder", lambda: _end_with(folder, users)))
    announce(address=place)  # without a key: the line may end up in a log
    await users.ended.wait()
    await server.stop()
    if local and not isinstance(users.failure, Conflict):
        folder.socket.unlink(missing_ok=True)
    return users.failure


async def _end_with(folder: WeaverFolder, users: Users) -> None:
    """End the weaver when its folder is removed, or another one's: no later weaver would find what it stored."""
    while True:
        await asyncio.sleep(LOOK_EVERY)
        try:
            if await asyncio.to_thread(folder.is_there):  # a network's volume may not answer for long
                continue
            _log.error("the folder %s is gone, and the weaver ends with it", folder.path)
            users.ended.set()
        except Conflict as error:
            users.fail(error)
        return


def _allow_many_connections() -> None:
    """Raise the limit of open files: each replica has a connection."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _listen_as_before(host: str, port: int, before: Remembered | None) -> socket.socket:
    """Listen on the address of the weaver before this one, where threadlets look for it, unless a port is given."""
    if port == 0 and before is not None and before.host == host:
        try:
            return listen(host, before.port)
        except PortInUse as error:
            _log.warning("threadlets of the weaver before will not find this one: %s", error)
    return listen(host, port)


def _listen_unix(folder: WeaverFolder) -> socket.socket:
    folder.socket.unlink(missing_ok=True)  # a killed weaver leaves its socket
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder.socket))
    folder.socket.chmod(0o666 if folder.passable else 0o600)
    listener.listen(128)
    return listener


if __name__ == "__main__":
    sys.exit(main())
