"""How long a peer may be silent."""

from __future__ import annotations

import socket
import sys

import pytest

from loom_gateway.driver.process_link.link import break_after


@pytest.mark.guarantees(
    "process link", "A host or process that was idle when its network went away has the whole patience"
)
@pytest.mark.skipif(sys.platform != "linux", reason="the options are Linux's")
@pytest.mark.parametrize("seconds", [0.5, 20.0, 60.0])
def test_a_connection_that_was_idle_before_the_network_went_away_has_the_whole_time(seconds: float) -> None:
    with socket.socket() as sock:
        break_after(sock, seconds)

        # The kernel counts from the last that came: from before the last probe that was not due yet.
        idle = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        allowed = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) / 1000
        between = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)

    assert seconds + idle <= allowed
    assert allowed + between <= 1.2 * seconds + 2  # and little more
