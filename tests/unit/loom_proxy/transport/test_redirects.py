"""No redirect leads a token to another program, whatever asks a gateway or a collector of spans."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import loom
from loom.rest_client import Gateway
from loom.tracing.otlp import Exporter

SECRET = "a secret"


class Elsewhere(BaseHTTPRequestHandler):
    """Where the redirects lead: a program that looks at all headers."""

    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        self.server.shown.append(str(self.headers))  # type: ignore[attr-defined]
        self.send_error(404)

    do_GET = do_POST = do_DELETE = do_PUT = answer

    def log_message(self, *what: object) -> None:
        pass


class Redirecting(Elsewhere):
    def answer(self) -> None:
        self.send_response(self.server.code)  # type: ignore[attr-defined]
        self.send_header("Location", f"{self.server.elsewhere}{self.path}")  # type: ignore[attr-defined]
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST = do_DELETE = do_PUT = answer


def serve(handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server


@pytest.fixture(params=[301, 302, 303, 307, 308])
def redirected(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[str]]]:
    """The address of a server that leads elsewhere, and the headers that came there."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"Authorization={SECRET.replace(' ', '%20')},x-api-key=abc")
    shown: list[str] = []
    elsewhere, server = serve(Elsewhere), serve(Redirecting)
    elsewhere.shown = shown  # type: ignore[attr-defined]
    server.code = request.param  # type: ignore[attr-defined]
    server.elsewhere = f"http://localhost:{elsewhere.server_port}"  # type: ignore[attr-defined]
    yield f"127.0.0.1:{server.server_port}", shown
    for each in (elsewhere, server):
        each.shutdown()
        each.server_close()


def export(address: str) -> None:
    exporter = Exporter(f"http://{address}/v1/traces")
    exporter._waiting.append({"kind": "span", "name": "span", "time": 1.0, "seconds": 1.0, "id": "1"})
    exporter.flush(5)
    if exporter.lost:
        raise loom.NotAGateway("the batch counts as lost")


WAYS: dict[str, Callable[[str], object]] = {
    "a session over a WebSocket": lambda to: loom.connect(f"ws://{to}", SECRET, transport="websocket", timeout=5),
    "a session over HTTP": lambda to: loom.connect(f"ws://{to}", SECRET, transport="http", timeout=5),
    "a session": lambda to: loom.connect(f"ws://{to}", SECRET, timeout=5),
    "REST": lambda to: Gateway(f"http://{to}", SECRET).status(),
    "REST that changes something": lambda to: Gateway(f"http://{to}", SECRET).end_session("session"),
    "the logs": lambda to: next(Gateway(f"http://{to}", SECRET).logs("session", follow=False)),
    "spans": export,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_no_redirect_leads_a_secret_elsewhere(
    way: Callable[[str], object], redirected: tuple[str, list[str]]
) -> None:
    address, shown = redirected

    with pytest.raises(loom.LoomError):
        way(address)

    assert shown == []
