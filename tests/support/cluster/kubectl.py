"""A stand-in for kubectl on the laptop: ``port-forward``, ``config view`` and ``get pods -o json``. A test tool.

Like kubectl, ``port-forward`` to a Service picks one pod at its start, stays with it, says so in the words that
programs look for, and ends when the pod is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

import websockets
import yaml

CHECK = 1.0
"""Seconds between looks at whether the pod is still there."""

_KINDS = {"svc": "services", "service": "services", "services": "services", "pod": "pods", "pods": "pods"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="kubectl")
    parser.add_argument(
        "--kubeconfig", default=os.environ.get("KUBECONFIG", str(Path("~/.kube/config").expanduser()))
    )
    parser.add_argument("-n", "--namespace", default="default")
    commands = parser.add_subparsers(dest="command", required=True)
    forward = commands.add_parser("port-forward")
    forward.add_argument("target")
    forward.add_argument("ports")
    forward.add_argument("--address", default="127.0.0.1")
    view = commands.add_parser("config")
    view.add_argument("action", choices=["view", "current-context"])
    view.add_argument("--minify", action="store_true")
    get = commands.add_parser("get")
    get.add_argument("what", choices=["pods", "pod"])
    get.add_argument("-l", "--selector", default="")
    for command in (forward, view, get):
        command.add_argument("-n", "--namespace", default=argparse.SUPPRESS)
        command.add_argument("-o", "--output", default="")
    options = parser.parse_args()
    server = yaml.safe_load(Path(options.kubeconfig).read_text())["clusters"][0]["cluster"]["server"]
    if options.command == "config":
        print("default" if options.action == "view" else "one-machine")
    elif options.command == "get":
        print(_get(f"{server}/api/v1/namespaces/{options.namespace}/pods?labelSelector={options.selector}"))
    else:
        kind, _, name = options.target.rpartition("/")
        local, _, remote = options.ports.partition(":")
        path = f"{options.namespace}/{_KINDS[kind or 'pod']}/{name}"
        asyncio.run(_forward(server, path, options.address, int(local or 0), int(remote or local)))


def _get(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=10.0) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        sys.exit(f"Error from server: {error.read().decode()}")
    except OSError as error:
        sys.exit(f"Unable to connect to the server: {error}")


async def _forward(server: str, path: str, address: str, local: int, remote: int) -> None:
    found = yaml.safe_load(
        await asyncio.to_thread(_get, f"{server}/api/v1/namespaces/{path}/forwarded?port={remote}")
    )
    namespace, pod = path.split("/")[0], found["pod"]
    of_pod = f"/api/v1/namespaces/{namespace}/pods/{pod}"
    url = f"{server.replace('http', 'ws', 1)}{of_pod}/portforward?port={found['port']}"

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, websockets.WebSocketException):
            await _through_socket(url, reader, writer)
        writer.close()

    listening = await asyncio.start_server(accepted, address, local)
    local = listening.sockets[0].getsockname()[1]
    print(f"Forwarding from {address}:{local} -> {found['port']}", flush=True)
    alive = True
    while alive:
        await asyncio.sleep(CHECK)
        alive = await asyncio.to_thread(_lives, f"{server}{of_pod}")
    sys.exit(f"error: lost connection to pod {pod}")


def _lives(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=30.0):
            return True
    except urllib.error.HTTPError:
        return False
    except OSError:  # the link is dead, which says nothing of the pod
        return True


async def _through_socket(url: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    async with websockets.connect(url, max_size=None) as socket:

        async def out() -> None:
            while data := await reader.read(65536):
                await socket.send(data)
            await socket.close()

        sending = asyncio.create_task(out())
        async for message in socket:
            writer.write(message)  # type: ignore[arg-type]
            await writer.drain()
        sending.cancel()


if __name__ == "__main__":
    main()
