"""``python -m loom.weaver``: the weaver's process, which a gateway starts."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import math
import os
import re
import resource
import signal
import socket
import sys

import uvloop

from loom.control.address import WeaverAddress
from loom.errors import InvalidAddress, LoomError, PortInUse
from loom.process import tasks
from loom.process.error_exit import report
from loom.process.linux_capabilities import keep_only
from loom.process.listen import announce, listen, reachable
from loom.process.parent_pipe import parent_releases, when_parent_ends
from loom.terminal_text import fit_log_records, limit_log
from loom.token_file import ADMIN
from loom.weaver.liveness import LivenessTimeouts
from loom.weaver.server.server import Server, monotonic_clock
from loom.weaver.server.users import Users
from loom.weaver.storage.folder import Remembered, WeaverFolder
from loom.weaver.storage.store import Store
from loom.wings import Part

_log = logging.getLogger("loom.weaver")

LOOK_EVERY = 1.0  # seconds between two checks that the folder still exists


def main() -> int:
    """Run the weaver until a signal or a reason of its own ends it; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m loom.weaver", description="Run Loom's weaver.")
    parser.add_argument("--folder", required=True, help="folder of the stores and the socket")
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
        host, port = _host_and_port(options.listen)
        if not options.beat > 0:
            raise InvalidAddress(f"--beat {options.beat:g} makes no sense")
        folder = WeaverFolder(options.folder, options.passable)
        before = folder.remembered()
        tcp = _listen_as_before(host, port, before)
        bound = tcp.getsockname()
        folder.remember(Remembered(host, bound[1], before.key if before else None))
        place = options.advertise or reachable(host, socket.gethostname())
        address = WeaverAddress(place, bound[1], folder.keys.of(ADMIN))
        users = Users(
            lambda user: Store(folder.store(user)),
            list(folder.users()),
            folder.keys,
            monotonic_clock(),
            str(address).rpartition("/")[0],
            LivenessTimeouts(beat=options.beat),
            folder.path / Part.ALERT_OPERATOR.load().FILE,
        )
    except LoomError as error:
        return report(error)
    failure = uvloop.run(_serve(users, tcp, folder, address, options.linger))
    return 0 if failure is None else report(LoomError(f"the weaver cannot store anything any more: {failure}"))


async def _serve(
    users: Users, tcp: socket.socket, folder: WeaverFolder, address: WeaverAddress, linger: float
) -> Exception | None:
    loop = asyncio.get_running_loop()
    # Imported modules live as long as the process: keep the garbage collector from scanning them again and again.
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    server = Server(users, linger)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, users.ended.set)
    await server.start(tcp, _listen_unix(folder))
    users.tasks.add(tasks.run_to_end("watch the folder", lambda: _end_with(folder, users)))
    announce(address=str(address), socket=str(folder.socket))
    await users.ended.wait()
    await server.stop()
    folder.socket.unlink(missing_ok=True)
    return users.failure


async def _end_with(folder: WeaverFolder, users: Users) -> None:
    """End the weaver when its folder is removed: no gateway could find it then, and no later weaver its store."""
    while True:
        await asyncio.sleep(LOOK_EVERY)
        if not folder.is_there():
            _log.error("the folder %s is gone, and the weaver ends with it", folder.path)
            users.ended.set()
            return


def _allow_many_connections() -> None:
    """Raise the limit of open files: each replica has a connection."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _host_and_port(text: str) -> tuple[str, int]:
    match = re.fullmatch(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>\d{1,5})", text)
    if match is None or int(match["port"]) > 65535:
        raise InvalidAddress(f"{text!r} is not an address to listen on: write HOST:PORT, such as 127.0.0.1:0")
    return match["host"].strip("[]"), int(match["port"])


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
