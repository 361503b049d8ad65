"""``python -m loom_gateway``: the gateway process. `loom serve gateway` runs it."""

from __future__ import annotations

import argparse
import asyncio
import errno
import json
import logging
import os
import signal
import socket
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING

from loom.errors import InvalidAddress, LoomError, PortInUse, WrongArguments
from loom.extras import GATEWAY_MODULES, require
from loom.process.exit_codes import FAILURE, report
from loom.token_file import generate_token
from loom_gateway.settings import add_door_options, check_tls, driver_limits, make_doors
from loom_gateway.workers.sources import WorkerHosts, parse_source

if TYPE_CHECKING:
    from loom_gateway.access.control import Doors
    from loom_gateway.sessions.draining import Draining
    from loom_gateway.sessions.sessions import SessionManager
    from loom_gateway.sessions.state_dir import StateFolder
    from loom_gateway.weaver_process import WeaverKeeper


def main() -> int:
    """Run the gateway until it is told to end; return the exit code."""
    parser = argparse.ArgumentParser(prog="loom serve gateway", description="Run Loom's gateway.")
    parser.add_argument("--worker", action="append", default=[], metavar="[MESH=]tcp://HOST:PORT", dest="workers")
    parser.add_argument("--workers", action="append", metavar="[MESH=]dns://SERVICE:PORT?count=N|file:PATH")
    parser.add_argument("--workers-timeout", type=float, default=60.0, metavar="SECONDS",
                        help="how long a new session waits for workers that are missing")  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (0.0.0.0: every one)")
    parser.add_argument("--port", type=int, default=8470, help="port to listen on; 0 picks a free one")
    parser.add_argument("--token", default=None, help="the token (default: LOOM_TOKEN, else a new one is made)")
    parser.add_argument("--session-linger", type=float, default=3600.0, metavar="SECONDS",
                        help="how long a session lives without a client")  # fmt: skip
    parser.add_argument("--state-dir", default=None, help="where the next gateway finds the sessions of this one")
    parser.add_argument("--end-sessions", action="store_true", help="end the sessions on SIGTERM, too")
    parser.add_argument("--drain", type=float, default=0.0, metavar="SECONDS",
                        help="on SIGTERM, serve the sessions there are for so long, but no new ones")  # fmt: skip
    parser.add_argument("--tunnel-idle", type=float, default=60.0, metavar="SECONDS",
                        help="how long a client over HTTP may go without a poll")  # fmt: skip
    parser.add_argument("--weaver-listen", default=None, metavar="HOST:PORT",
                        help="where training processes find the weaver; default: this host, any port")  # fmt: skip
    parser.add_argument("--weaver-advertise", default=None, metavar="HOST",
                        help="the host that they are told, where it is another")  # fmt: skip
    parser.add_argument("--injectable", action="store_true", default=os.environ.get("LOOM_INJECTABLE") == "1",
                        help="allow that failures are injected into it, its weaver and its drivers")  # fmt: skip
    parser.add_argument("--log-level", default="warning", choices=["debug", "info", "warning", "error"])
    parser.add_argument("--exit-with-parent", action="store_true", help="end when standard input closes")
    add_door_options(parser)
    options = parser.parse_args()
    logging.basicConfig(level=options.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    try:
        require(GATEWAY_MODULES, "a gateway")
        if not options.workers:
            raise WrongArguments("a gateway needs workers: give --worker tcp://HOST:PORT, or --workers; see --help")
        hosts = WorkerHosts([parse_source(given) for given in options.workers])
        check_tls(options.tls_cert, options.tls_key)
        token = options.token or os.environ.get("LOOM_TOKEN") or generate_token()
        doors = make_doors(options, token)
        listener = _listen(options.host, options.port)
        folder = _state_folder(options, listener.getsockname()[1])
    except LoomError as error:
        return report(error)
    return _run(listener, folder, options, hosts, token, doors)


def _state_folder(options: argparse.Namespace, port: int) -> StateFolder | None:
    """Where drivers are found again; None where none is to outlive this process."""
    from loom_gateway.sessions.state_dir import StateFolder, default_path

    # Only Linux can tell for sure that a process is the one that was started.
    if sys.platform != "linux" or (options.exit_with_parent and options.state_dir is None):
        return None
    return StateFolder.open(options.state_dir or default_path(port))


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except (OSError, OverflowError) as error:
        listener.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise PortInUse(f"port {port} of {host} is in use: choose another with --port (0 picks one)") from error
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidAddress(f"cannot listen on {host}:{port}: {reason}") from error
    return listener


def _end_with_parent(manager: SessionManager, keeper: WeaverKeeper) -> None:
    """End at once when the parent is gone. The drivers end with this process, and the sessions' procs with them."""
    while os.read(0, 4096):
        pass
    keeper.abandon()
    manager.abandon()
    os._exit(FAILURE)


def _run(
    listener: socket.socket,
    folder: StateFolder | None,
    options: argparse.Namespace,
    hosts: WorkerHosts,
    token: str,
    doors: Doors,
) -> int:
    import uvicorn

    from loom.wire.frames import MAX_FRAME
    from loom_gateway.access.middleware import DoorKeeper
    from loom_gateway.app import create_app
    from loom_gateway.impatience import ImpatientProtocol
    from loom_gateway.relay.relay import RelaySocket
    from loom_gateway.sessions.sessions import SessionManager
    from loom_gateway.weaver_process import WeaverKeeper

    host, port = listener.getsockname()[:2]
    url = f"{'wss' if options.tls_cert else 'ws'}://{_connectable(host)}:{port}"

    class Server(uvicorn.Server):
        _drains: asyncio.Future[None] | None = None

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            self._loop = asyncio.get_running_loop()
            await super().startup(sockets)
            line = {"event": "listening", "url": url, "token": token, "pid": os.getpid()}
            print(json.dumps(line), flush=True)  # noqa: T201

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            # Ctrl-C is a person who is done. SIGTERM may be an upgrade, whose next gateway finds the sessions.
            manager.end_sessions |= sig == signal.SIGINT
            if sig == signal.SIGTERM and options.drain > 0 and self.started and self._drains is None:
                self._loop.call_soon_threadsafe(self._drain)
            else:  # the second time it ends at once
                super().handle_exit(sig, frame)

        def _drain(self) -> None:
            self._drains = self._drains or asyncio.ensure_future(self._drain_and_exit())

        async def _drain_and_exit(self) -> None:
            draining.begin(options.drain)
            await draining.over()
            super().handle_exit(signal.SIGTERM, None)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            draining.begin(0.0)
            await manager.end_all()  # while their clients can be told
            manager.logs.stop_following()  # uvicorn waits for answers that are under way
            app.state.tunnels.close()
            keeper.client.close()
            await super().shutdown(sockets)

    limits = driver_limits(doors.limits)
    of_drivers = options.session_linger, folder, options.exit_with_parent, limits
    manager = SessionManager(hosts, *of_drivers, options.workers_timeout)
    manager.end_sessions |= options.end_sessions
    where = options.weaver_listen, options.weaver_advertise
    keeper = WeaverKeeper(
        manager.folder.weaver, manager.worker_watch.there, *where, manager.exit_with_gateway, options.session_linger
    )
    if options.exit_with_parent:
        threading.Thread(
            target=_end_with_parent, args=(manager, keeper), name="exit-with-parent", daemon=True
        ).start()
    app = create_app(manager, doors, options.tunnel_idle, keeper, options.injectable)
    draining: Draining = app.state.draining
    config = uvicorn.Config(
        DoorKeeper(app, doors),
        loop="uvloop",
        ws=RelaySocket,  # uvicorn's websockets-sansio, with a short way for frames
        ws_max_size=MAX_FRAME + 4096,
        ws_ping_interval=20.0,
        ws_ping_timeout=60.0,  # a laptop may be busy for a while
        ws_per_message_deflate=False,  # arrays do not compress, and small calls would pay for it
        http=ImpatientProtocol,
        ssl_certfile=options.tls_cert,
        ssl_keyfile=options.tls_key,
        proxy_headers=bool(options.trusted_proxy),
        forwarded_allow_ips=options.trusted_proxy,
        # It warns of each malformed request, which an attack would fill the log with.
        log_level="error" if options.log_level == "warning" else options.log_level,
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=5,
    )
    Server(config).run(sockets=[listener])
    return 0


def _connectable(host: str) -> str:
    """An address that reaches a listener on ``host`` from this machine."""
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


if __name__ == "__main__":
    sys.exit(main())
