"""``python -m loom_gateway.driver``: the process of one session. Started by the gateway, not by hand."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import sys
import threading
import traceback
from typing import NoReturn

from loom.process.linux_capabilities import forbid_new_privileges, keep_only
from loom.process.listen import announce
from loom.process.parent_pipe import take_standard_input
from loom.tracing import flush
from loom.wire.bodies import OpenSession
from loom.wire.mux import MAX_MESSAGE
from loom_gateway.driver.lifetime import Lifetime
from loom_gateway.driver.output.own_log import (
    keep_small,
    log_own_lines,
    share_root_logger,
    survive_full_disk,
)
from loom_gateway.driver.process_link.link import PATIENCE
from loom_gateway.driver.runs.forked_children import keep_apart
from loom_gateway.driver.runs.main_thread import main_thread
from loom_gateway.driver.runs.output import current_run, route_output
from loom_gateway.sessions.driver_ids import bound_leftovers
from loom_gateway.sessions.lease_file import end_with_lease
from loom_gateway.sessions.state_dir import DriverFiles
from loom_gateway.workers.monarch_env import set_monarch_environment

set_monarch_environment()  # before Monarch is imported

SWITCH_INTERVAL = 0.0005
"""Seconds after which a thread that pickles a gigabyte lets the next one run. A small call needs three turns
meanwhile, which would take 5 ms each with Python's default interval."""


async def _serve(files: DriverFiles, lifetime: Lifetime, options: argparse.Namespace) -> None:
    from loom_gateway.driver.clients.connection import DriverServer
    from loom_gateway.driver.clients.unread_results import StoredResults
    from loom_gateway.driver.output.spool import LogSpool
    from loom_gateway.driver.runs.restart_file import RestartFile
    from loom_gateway.driver.session.session import DrivenSession
    from loom_gateway.driver.weaver_link import DriverWeaverLink

    loop = asyncio.get_running_loop()

    def new_session(opening: OpenSession) -> DrivenSession:
        weaver = DriverWeaverLink(options.weaver, opening, loop)
        session = DrivenSession(
            weaver,
            options.worker,
            options.workers_file,
            loop,
            lifetime,
            LogSpool(files.log, mode=files.mode),
            options.max_message,
            options.max_in_flight,
            options.worker_patience,
            StoredResults(os.path.dirname(files.base), options.keep_results),
            RestartFile(files.restart, 0o600 if options.gateway_uid == os.geteuid() else 0o640),
        )
        keep_apart(f"{os.path.dirname(files.base)}/", weaver.descriptors)
        return session

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(files.socket)
        os.chmod(files.socket, 0o600 if options.gateway_uid == os.geteuid() else 0o660)
        listener.listen()
        server = DriverServer(listener, lifetime, new_session, options.gateway_uid)
        main_thread.heed(lifetime.end_on_signal, lifetime.told_by_gateway)
        lifetime.watch_socket()
        announce(socket=files.socket)
        os.dup2(2, 1)  # from now on, standard output goes where standard error does
        keep_small(loop)
        await server.ended.wait()
    with contextlib.suppress(FileNotFoundError):  # the gateway was faster
        os.unlink(files.socket)


def main() -> None:
    """Run the driver of one session until the session ends."""
    parser = argparse.ArgumentParser(prog="python -m loom_gateway.driver", description=__doc__)
    parser.add_argument("--socket", required=True, help="path of the unix socket to listen on")
    parser.add_argument("--worker", action="append", default=[], help="address of a worker, tcp://HOST:PORT")
    parser.add_argument(
        "--workers-file",
        default=None,
        metavar="FILE",
        help="file in which the gateway keeps the workers' addresses",
    )
    parser.add_argument("--port", type=int, default=0, help="TCP port for Monarch; 0: any")
    parser.add_argument("--max-message", type=int, default=MAX_MESSAGE, help="bytes of one message of the client")
    parser.add_argument("--max-in-flight", type=int, default=0, help="unanswered operations; 0: any number")
    parser.add_argument("--keep-results", type=int, default=0, help="bytes of results on the disk; 0: any number")
    parser.add_argument(
        "--worker-patience", type=float, default=PATIENCE, help="seconds without network that processes survive"
    )
    parser.add_argument(
        "--linger", type=float, default=3600.0, help="seconds that a session lives when nothing goes on in it"
    )
    parser.add_argument("--most", type=float, default=0.0, help="seconds that a session lives at most; 0: any")
    parser.add_argument("--idle", type=float, default=0.0, help="seconds that an idle session lives; 0: any")
    parser.add_argument("--weaver", default=None, metavar="PLACE", help="the weaver's socket, or HOST:PORT")
    parser.add_argument(
        "--gateway-uid", type=int, default=os.geteuid(), help="user id of the gateway; default: this process's own"
    )
    parser.add_argument(
        "--lease", default=None, metavar="FILE", help="file that says until when functions run here"
    )
    parser.add_argument("--exit-with-gateway", action="store_true", help="end when standard input is closed")
    parser.add_argument("--remove-folder", action="store_true", help="then also remove the folder of the socket")
    options = parser.parse_args()
    survive_full_disk()
    sys.argv = [""]  # what a run parses is its own
    with contextlib.suppress(FileNotFoundError):
        sys.path.append(os.getcwd())  # for runs, behind all that Loom imports
    route_output()
    log_own_lines()
    share_root_logger(current_run)
    sys.setswitchinterval(SWITCH_INTERVAL)
    alike = options.gateway_uid == os.geteuid()
    if not alike:
        keep_only()
        forbid_new_privileges()
        bound_leftovers()
    files = DriverFiles(options.socket.removesuffix(".sock"), closed=alike)
    lifetime = Lifetime(
        files, options.linger, options.exit_with_gateway, options.remove_folder, options.most, options.idle
    )
    lifetime.watch_gateway(take_standard_input())
    if options.lease is not None:
        end_with_lease(options.lease, files)

    from loom_gateway.driver.monarch.root_client import prepare

    prepare(options.worker, options.port, options.worker_patience)
    threading.Thread(target=_drive, args=(files, lifetime, options), name="driver").start()
    main_thread.serve()


def _drive(files: DriverFiles, lifetime: Lifetime, options: argparse.Namespace) -> NoReturn:
    """Run the driver's event loop, and end the process with it."""
    try:
        asyncio.run(_serve(files, lifetime, options))
    except BaseException:  # noqa: BLE001 - the main thread waits for runs, and would never end
        traceback.print_exc()
        os._exit(1)
    # Monarch's `shutdown_context` would close this process's channel. A worker that has something for an actor here
    # takes that for a failure, and ends (torchmonarch 0.7: ``hyperactor::client``). The rest here ends anyway.
    # Threads may still run user code from run(); the session is over all the same.
    flush()
    sys.stdout.flush()
    sys.stderr.flush()
    lifetime.over()
    os._exit(0)


if __name__ == "__main__":
    main()
