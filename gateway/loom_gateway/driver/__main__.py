"""``python -m loom_gateway.driver``: the process of one session. Started by the gateway, not by hand."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import sys
import threading

from loom.wire.mux import MAX_MESSAGE
from loom_gateway.monarch_env import set_monarch_environment

set_monarch_environment()  # before Monarch is imported

SWITCH_INTERVAL = 0.0005
"""Seconds after which a thread that pickles a gigabyte lets the next one run. A small call meanwhile needs three
turns, which would take 5 ms each with Python's own interval."""


async def _serve(
    socket_path: str, workers: list[str], port: int, log_spool: str | None, max_message: int, max_in_flight: int
) -> None:
    from loom_gateway.driver.log_spool import LogSpool
    from loom_gateway.driver.server import DriverServer, prepare

    loop = asyncio.get_running_loop()
    prepare(workers, port)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(socket_path)
        os.chmod(socket_path, 0o600)
        listener.listen()
        spool = LogSpool(log_spool) if log_spool else None
        server = DriverServer(workers, listener, spool, max_message, max_in_flight)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.end, f"the driver was told to stop ({number.name})")
        print(json.dumps({"event": "listening", "socket": socket_path, "pid": os.getpid()}), flush=True)  # noqa: T201
        await server.ended.wait()


def _exit_with_parent() -> None:
    """End when the gateway is gone: it holds the other end of standard input."""
    while os.read(0, 4096):
        pass
    os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loom_gateway.driver", description=__doc__)
    parser.add_argument("--socket", required=True, help="path of the unix socket to listen on")
    parser.add_argument("--worker", action="append", default=[], help="address of a worker, tcp://HOST:PORT")
    parser.add_argument("--port", type=int, default=0, help="TCP port for Monarch; 0: any")
    parser.add_argument("--log-spool", help="path of the file that what the session prints is written to")
    parser.add_argument("--max-message", type=int, default=MAX_MESSAGE, help="bytes of one message of the client")
    parser.add_argument("--max-in-flight", type=int, default=0, help="unanswered operations; 0: any number")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    sys.setswitchinterval(SWITCH_INTERVAL)
    threading.Thread(target=_exit_with_parent, name="exit-with-parent", daemon=True).start()

    from monarch.actor import shutdown_context

    limits = options.max_message, options.max_in_flight
    asyncio.run(_serve(options.socket, options.worker, options.port, options.log_spool, *limits))
    shutdown_context(host_timeout=0.5).get(timeout=2.0)
    # Threads may still run user code from run(); the session is over all the same.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
