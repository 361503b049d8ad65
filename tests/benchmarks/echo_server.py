"""A WebSocket server that sends every message back: uvicorn as the gateway runs it, and nothing else."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from typing import Any

import uvicorn


async def echo(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """The ASGI application."""
    assert scope["type"] == "websocket"
    assert (await receive())["type"] == "websocket.connect"
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "bytes": message["bytes"]})


def _exit_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


class _AnnouncingServer(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert sockets
        port = sockets[0].getsockname()[1]
        print(json.dumps({"event": "listening", "url": f"ws://127.0.0.1:{port}"}), flush=True)


def main() -> None:
    if "--exit-with-parent" in sys.argv:
        threading.Thread(target=_exit_with_parent, name="exit-with-parent", daemon=True).start()
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        echo,
        ws="websockets-sansio",
        loop="uvloop",
        lifespan="off",
        log_level="warning",
        ws_max_size=2**30,
        ws_per_message_deflate=False,
        ws_ping_interval=None,
    )
    _AnnouncingServer(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
