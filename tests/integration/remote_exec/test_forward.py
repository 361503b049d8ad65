"""Ports of ranks' hosts are reached through ports of this machine."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator

import pytest

import loom
from loom.process.listen import free_ports
from loom_proxy.local import LocalCluster
from loom_proxy.mesh.procs import ProcMeshProxy
from tests.support.gateways import BOUND
from tests.support.network.gate import Gate
from tests.support.processes import LOOM, start


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that sends back all that it has got when its client has sent everything."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    def answer(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)
    server.close()


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), BOUND)


def received(connection: socket.socket) -> bytes:
    """Return all that comes until the other side has sent everything."""
    data = b""
    while piece := connection.recv(1 << 16):
        data += piece
    return data


def test_several_connections_carry_data_both_ways(trainers: ProcMeshProxy, echo: int) -> None:
    large = bytes(range(256)) * 8192

    with trainers.forward(echo, 1, local_port=0) as forward:
        first, second = connected(forward.port), connected(forward.port)
        with first, second:
            sending = threading.Thread(target=lambda: (second.sendall(large), second.shutdown(socket.SHUT_WR)))
            sending.start()
            first.sendall(b"small")
            assert first.recv(16) == b"small"
            assert received(second) == large
            sending.join(BOUND)
            first.sendall(b"again")
            assert first.recv(16) == b"again"


def test_a_connection_survives_a_cut_of_the_line(gate: Gate, trainers: ProcMeshProxy, echo: int) -> None:
    with trainers.forward(echo, local_port=0) as forward, connected(forward.port) as connection:
        connection.sendall(b"before")
        assert connection.recv(16) == b"before"
        gate.cut()
        connection.sendall(b"after")
        assert connection.recv(16) == b"after"


def test_a_port_on_which_nothing_listens_ends_the_connection_and_is_reported(trainers: ProcMeshProxy) -> None:
    (nothing,) = free_ports(1)
    errors: list[loom.LoomError] = []

    with (
        trainers.forward(nothing, 1, local_port=0, on_refused=errors.append) as forward,
        connected(forward.port) as connection,
    ):
        assert connection.recv(16) == b""

    assert [str(error) for error in errors] == ["rank 1 of 'trainers': Connection refused"]


def test_only_this_machine_reaches_the_port_and_nobody_after_the_end(trainers: ProcMeshProxy, echo: int) -> None:
    with trainers.forward(echo, local_port=0) as forward:
        assert forward._listener.getsockname()[0] == "127.0.0.1"
        connection = connected(forward.port)
        connection.sendall(b"here")
        assert connection.recv(16) == b"here"

    assert connection.recv(16) == b""
    with pytest.raises(ConnectionRefusedError):
        connected(forward.port)


def test_a_local_port_that_is_taken_is_an_error(trainers: ProcMeshProxy, echo: int) -> None:
    with pytest.raises(loom.PortInUse, match=f"127.0.0.1:{echo}"):
        trainers.forward(echo)
    with pytest.raises(loom.WrongArguments, match="below 65536"):
        trainers.forward(70000)


def test_the_server_there_learns_that_the_port_was_closed(trainers: ProcMeshProxy) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(BOUND)
        with trainers.forward(server.getsockname()[1], local_port=0) as forward:
            here = connected(forward.port)
            there, _ = server.accept()

        with here, there:
            there.settimeout(BOUND)
            assert there.recv(16) == b""
            assert here.recv(16) == b""


@pytest.mark.slow
def test_the_command_line_forwards_until_it_is_interrupted(
    far: loom.Job, trainers: ProcMeshProxy, cluster: LocalCluster, echo: int
) -> None:
    options = ["--url", cluster.url, "--token", cluster.token, "--session", far.session, "--mesh", "trainers"]
    process = start("-c", LOOM, "forward", str(echo), *options, "--rank", "1", "--local", "0")
    assert process.stdout
    try:
        port = int(process.stdout.readline().split()[0].rpartition(":")[2])
        with connected(port) as connection:
            connection.sendall(b"through")
            assert connection.recv(16) == b"through"
        process.send_signal(signal.SIGINT)
        assert process.wait(BOUND) == 0
    finally:
        process.kill()
        process.communicate()
