"""Sessions over plain HTTP, through proxies that break something."""

# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import loom
from loom import Actor, endpoint
from loom.wire.length_prefix import TUNNELS
from loom_proxy.local import LocalCluster
from loom_proxy.transport.http import HttpTransport
from tests.support.network.delay_proxy import DelayProxy
from tests.support.network.http_proxy import HttpProxy

BOUND = 30.0

MIB = 2**20


class Talker(Actor):
    """Sends, prints and streams."""

    @endpoint
    def count(self, port: Any, numbers: int) -> None:
        for number in range(numbers):
            port.send(number)

    @endpoint
    def say(self, text: str) -> None:
        print(text)

    @endpoint
    def ranks(self) -> int:
        return int(loom.current_rank().rank)


def port_of(cluster: LocalCluster) -> int:
    port = urlsplit(cluster.url).port
    assert port is not None
    return port


@contextlib.contextmanager
def through(
    proxy: HttpProxy | DelayProxy, cluster: LocalCluster, transport: str | None = None
) -> Iterator[loom.Job]:
    with loom.connect(f"ws://127.0.0.1:{proxy.port}", cluster.token, transport=transport) as job:
        yield job


def lose_tunnel(job: loom.Job) -> None:
    """Close a job's tunnel behind its back."""
    transport = job._connection._transport
    assert isinstance(transport, HttpTransport)
    transport._up.ask("DELETE", transport._path, timeout=BOUND, connect_timeout=BOUND)


def request(
    cluster: LocalCluster, method: str, path: str, body: Any = None, token: str | None = None, **options: Any
) -> tuple[int, Any]:
    """Status and error code of a request to a tunnel; what it answers, where there is no error."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port_of(cluster), timeout=BOUND)) as connection:
        headers = {"Authorization": f"Bearer {cluster.token if token is None else token}"}
        connection.request(method, TUNNELS + path, body, headers, **options)
        response = connection.getresponse()
        answer = response.read()
    if response.headers.get_content_type() != "application/json":
        return response.status, answer
    decoded = json.loads(answer)
    return response.status, decoded["error"]["code"] if "error" in decoded else decoded
