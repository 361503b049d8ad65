"""Watching a weaver whose gateway does not answer any more."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest
from websockets.sync.server import ServerConnection, serve

from loom.weaver.views import Away
from loom_proxy.weaver.watch import WeaverWatch

BOUND = 30.0


@pytest.fixture
def silent_gateway() -> Iterator[str]:
    """Accepts, reads nothing (no ping either), and goes on when it is over."""
    over = threading.Event()

    def stall(socket: ServerConnection) -> None:
        socket.recv_messages.pause()
        over.wait(BOUND)

    with serve(stall, "127.0.0.1", 0, ping_interval=None) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        host, port = server.socket.getsockname()[:2]
        yield f"ws://{host}:{port}"
        over.set()
        server.shutdown()
        thread.join(BOUND)


def test_a_connection_that_is_lost_is_an_update_and_prints_nothing(
    silent_gateway: str, caplog: pytest.LogCaptureFixture
) -> None:
    watch = WeaverWatch(silent_gateway, None)
    watch._options |= {"ping_interval": 0.05, "ping_timeout": 0.05, "close_timeout": 0.1}
    with caplog.at_level(logging.WARNING):
        first = next(watch.updates(timeout=BOUND))
    assert isinstance(first, Away)
    assert "keepalive ping timeout" in first.reason
    assert caplog.records == []
