"""A stand-in for Kubetorch's data store: a real rsync daemon, and the two ways to it. A test tool.

The client uploads code by rsync through a WebSocket (nginx's ``/rsync/NAMESPACE/``); pods ask over another
WebSocket from whom to fetch it, and fetch it by rsync. Here that is always the store, never another pod.
Run as ``python -m tests.support.cluster.data_store FOLDER``, on the network of the data store.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import uvicorn
from fastapi import FastAPI, WebSocket, WebSocketDisconnect

from tests.support.cluster.network import DATA_STORE

__all__ = ["make_app"]

TUNNEL_PORT, METADATA_PORT, RSYNC_PORT = 8080, 8081, 873


def make_app(folder: Path) -> FastAPI:
    """The data store whose files are in a folder."""
    data = folder / "data-store"
    ranks = itertools.count(1)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        data.mkdir()
        config = folder / "rsyncd.conf"
        config.write_text(
            "use chroot = no\nuid = 0\ngid = 0\nmax connections = 0\n"
            f"[data]\npath = {data}\nread only = no\nmunge symlinks = no\n"
        )
        daemon = await asyncio.create_subprocess_exec(
            *("setpriv", "--pdeathsig", "KILL", "rsync", "--daemon", "--no-detach"),
            *("--address", "0.0.0.0", "--port", str(RSYNC_PORT), "--config", str(config)),
        )
        yield
        daemon.terminate()
        await daemon.wait()

    app = FastAPI(lifespan=lifespan)

    @app.websocket("/rsync/{namespace}/")
    async def tunnel(websocket: WebSocket, namespace: str) -> None:
        (data / namespace).mkdir(exist_ok=True)
        await websocket.accept()
        reader, writer = await asyncio.open_connection("127.0.0.1", RSYNC_PORT)

        async def back() -> None:
            while received := await reader.read(65536):
                await websocket.send_bytes(received)
            await websocket.close()

        answering = asyncio.create_task(back())
        with contextlib.suppress(WebSocketDisconnect):
            while True:
                writer.write(await websocket.receive_bytes())
                await writer.drain()
        writer.close()
        answering.cancel()

    @app.websocket("/ws/fs-broadcast/{group}")
    async def broadcast(websocket: WebSocket, group: str) -> None:
        await websocket.accept()
        key = (await websocket.receive_json())["key"].strip("/")
        namespace = group.removeprefix("workdir-sync-")
        found = [path for path in data.iterdir() if namespace.startswith(path.name) and (path / key).exists()]
        if not found:
            await websocket.send_json({"event": "error", "message": f"key {key} not found"})
        else:
            await websocket.send_json(
                {
                    "event": "ready",
                    "rank": next(ranks),
                    "parent_rank": 0,
                    "parent_ip": DATA_STORE,
                    "source_ip": DATA_STORE,
                    "source_path": f"{found[0].name}/{key}",
                }
            )
        with contextlib.suppress(WebSocketDisconnect):
            await websocket.receive_text()

    @app.get("/api/v1/keys/{key:path}/source")
    async def source(key: str) -> dict[str, Any]:
        return {"found": False, "key": unquote(key)}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    return app


async def _serve(folder: Path) -> None:
    server = uvicorn.Server(uvicorn.Config(make_app(folder), log_level="warning", timeout_graceful_shutdown=1))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: setattr(server, "should_exit", True))
    await server.serve([socket.create_server(("0.0.0.0", port)) for port in (TUNNEL_PORT, METADATA_PORT)])


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1])))
