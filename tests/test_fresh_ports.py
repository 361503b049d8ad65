"""No two drivers of a gateway listen on the same port: the workers would not answer the second."""

from __future__ import annotations

import contextlib
import socket

import psutil
import pytest

import loom
from loom_gateway.driver.root_client import _is_free
from loom_gateway.fresh_ports import TRIES, FreshPorts


class Kernel:
    """Picks one of a few ports after the other."""

    def __init__(self, count: int) -> None:
        self._ports = []
        for _ in range(count):
            with socket.socket() as sock:
                sock.bind(("", 0))
                self._ports.append(sock.getsockname()[1])

    def bind(self) -> socket.socket:
        self._ports.append(self._ports.pop(0))  # what was asked for last is asked for again last of all
        sock = socket.socket()
        sock.bind(("", self._ports[-1]))
        return sock


def test_no_port_is_given_twice() -> None:
    ports = FreshPorts(Kernel(10).bind)
    assert len({ports.take() for _ in range(10)}) == 10


def test_a_port_that_was_given_is_free_to_be_listened_on() -> None:
    port = FreshPorts().take()
    assert _is_free("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", port)):
        assert not _is_free("127.0.0.1", port)


def test_when_none_is_left_they_are_given_again() -> None:
    ports = FreshPorts(Kernel(TRIES).bind)
    taken = [ports.take() for _ in range(TRIES)]
    assert len(set(taken)) == TRIES
    assert ports.take() in taken


@pytest.mark.timeout(120)
def test_a_driver_listens_on_the_port_that_it_was_given(cluster: loom.LocalCluster) -> None:
    with loom.connect(cluster.url, cluster.token) as job:
        job.hosts.initialized.get(timeout=60)
        given = {}
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):  # one of an earlier session is just ending
                line = process.cmdline()
                if "loom_gateway.driver" in line:
                    connections = process.net_connections("tcp")
                    listens = {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
                    given[int(line[line.index("--port") + 1])] = listens
        assert any(port in listens for port, listens in given.items())
