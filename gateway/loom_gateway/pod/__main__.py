"""``python -m loom_gateway.pod FOLDER``: the keeper of a pod, with the settings in the folder.

It prints a line of JSON when it listens. SIGTERM ends it with the processes that it keeps. The sessions live on for
the pod's next session host for as long as their drivers do.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from loom.errors import LoomError
from loom.extras import GATEWAY_MODULES, require
from loom.process.error_exit import report
from loom.process.listen import announce, listen
from loom.process.parent_pipe import when_parent_ends
from loom_gateway.pod.settings_and_peers import PodSettings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the keeper of a pod until a signal ends it. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m loom_gateway.pod", description="Look after a pod of a job.")
    parser.add_argument(
        "folder", type=Path, help="folder with settings.json, in which the keeper also keeps its state"
    )
    parser.add_argument("--address", default=os.environ.get("POD_IP"), help="the pod's IP address; default POD_IP")
    name = os.environ.get("POD_NAME") or socket.gethostname()
    parser.add_argument("--name", default=name, help="the pod's name; default POD_NAME")
    parser.add_argument("--exit-with-parent", action="store_true", help="end when standard input closes")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="loom pod: %(message)s")
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    try:
        require(GATEWAY_MODULES, "a pod")
        settings = PodSettings.read(options.folder)
        address = options.address or socket.gethostbyname(socket.gethostname())
        listener = listen("0.0.0.0", settings.keeper_port, "by another keeper or by something else")
        asyncio.run(_serve(settings, options, address, listener))
    except LoomError as error:
        return report(error)
    return 0


async def _serve(settings: PodSettings, options: argparse.Namespace, address: str, listener: socket.socket) -> None:
    import uvicorn

    from loom_gateway.pod.app import KeeperProtocol, create_app
    from loom_gateway.pod.settings_and_peers import make_pod_key
    from loom_gateway.pod.supervisor import PodSupervisor

    keeper = PodSupervisor(settings, options.folder, address, options.name)
    end_sessions = False

    def end() -> None:
        nonlocal end_sessions
        end_sessions = True
        server.should_exit = True

    app = create_app(keeper, end, make_pod_key(options.folder))
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        proxy_headers=False,
        http=KeeperProtocol,
    )
    server = uvicorn.Server(config)
    if options.exit_with_parent:
        loop = asyncio.get_running_loop()
        when_parent_ends(lambda: loop.call_soon_threadsafe(end))
    keeper.start()
    announce()
    try:
        await server.serve([listener])
    finally:
        await keeper.close(end_sessions=end_sessions)


if __name__ == "__main__":
    sys.exit(main())
