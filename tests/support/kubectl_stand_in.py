"""A stand-in for ``kubectl port-forward``, which needs a Kubernetes API server: it forwards on this machine.

``python -m tests.support.kubectl_stand_in port-forward --address ADDRESS -n NAMESPACE RESOURCE LOCAL:REMOTE`` takes
the same arguments, says the same, and leads to ``$FORWARDS/NAMESPACE/RESOURCE``, a file with ``HOST:PORT`` in it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["port-forward"])
    parser.add_argument("--address")
    parser.add_argument("-n", "--namespace")
    parser.add_argument("resource")
    parser.add_argument("ports")
    options = parser.parse_args()
    place = Path(os.environ["FORWARDS"], options.namespace, options.resource)
    if not place.exists():
        kind, _, name = options.resource.partition("/")
        kinds = {"svc": "services", "pod": "pods"}
        sys.exit(f'Error from server (NotFound): {kinds[kind]} "{name}" not found')
    host, _, port = place.read_text().rpartition(":")
    local, _, remote = options.ports.partition(":")
    asyncio.run(forward(options.address, int(local or 0), remote, host, int(port)))


async def forward(address: str, local: int, remote: str, host: str, port: int) -> None:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        print(f"Handling connection for {local}", flush=True)
        there = await asyncio.open_connection(host, port)
        await asyncio.gather(copy(reader, there[1]), copy(there[0], writer))

    server = await asyncio.start_server(accept, address, local)
    local = server.sockets[0].getsockname()[1]
    print(f"Forwarding from {address}:{local} -> {remote}", flush=True)
    await server.serve_forever()


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    writer.close()


if __name__ == "__main__":
    main()
