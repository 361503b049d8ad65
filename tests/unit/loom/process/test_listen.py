"""`loom.process.listen`: a socket that listens, or an error that says why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loom.errors import InvalidAddress, PortInUse
from loom.process.listen import announce, bracketed, free_ports, listen, reachable


def test_a_port_in_use_is_an_error_with_advice() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=f"port {port} of 127.0.0.1 is in use: take another"):
            listen("127.0.0.1", port, "take another")


@pytest.mark.parametrize(("host", "port"), [("192.0.2.1", 0), ("no such host", 0), ("127.0.0.1", 70_000)])
def test_an_address_that_is_none_of_this_machine_is_an_error(host: str, port: int) -> None:
    with pytest.raises(InvalidAddress, match=f"cannot listen on {host}:{port}: "):
        listen(host, port)


def test_a_listener_on_every_address_is_reached_at_another() -> None:
    assert reachable("0.0.0.0", "127.0.0.1") == "127.0.0.1"
    assert reachable("::", "127.0.0.1") == "127.0.0.1"
    assert reachable("10.0.0.1", "127.0.0.1") == "10.0.0.1"


def test_only_an_ipv6_address_gets_brackets() -> None:
    assert (bracketed("10.0.0.1"), bracketed("::1")) == ("10.0.0.1", "[::1]")


def test_the_announcement_is_a_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    announce(address="tcp://127.0.0.1:1")

    said = json.loads(capsys.readouterr().out)
    assert said.pop("pid") > 0
    assert said == {"event": "listening", "address": "tcp://127.0.0.1:1"}


def test_free_ports_differ_and_can_be_listened_on() -> None:
    ports = free_ports(8)

    assert len(set(ports)) == 8
    for port in ports:
        listen("127.0.0.1", port).close()


@pytest.mark.skipif(not Path("/proc/sys/net/ipv4/ip_local_port_range").exists(), reason="tells the kernel's range")
def test_no_connection_can_be_given_a_free_port() -> None:
    first, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())

    assert max(free_ports(100)) < first


@pytest.mark.parametrize("ephemeral", ["{after} 65535", "not a number"])
def test_a_port_that_is_listened_on_is_not_free(monkeypatch: pytest.MonkeyPatch, ephemeral: str) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr("loom.process.listen._LOWEST", port)
        monkeypatch.setattr("loom.process.listen._KUBERNETES", port + 1)
        monkeypatch.setattr("loom.process.listen._EPHEMERAL", port + 1)
        monkeypatch.setattr("loom.process.listen.Path.read_text", lambda _: ephemeral.format(after=port + 1))

        (free,) = free_ports(1)

    assert free != port
