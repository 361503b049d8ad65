"""Every command that asks a gateway finds it by `loom_proxy.contexts.choose_gateway`, and reaches ``kube://``.

The forwarded port is a stand-in: kubectl itself is in `tests/system/test_kube_commands.py`, and all of these
commands in a cluster are in `tests/system/cluster/test_kube_commands.py`.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from loom.errors import GatewayUnreachable
from loom_proxy.contexts import ContextFile, GatewayContext
from loom_proxy.kubernetes import port_forward
from loom_proxy.kubernetes.port_forward import KubeAddress
from tests.support.cli_page import commands
from tests.support.gateway_commands import ARGUMENTS, arguments, commands_that_ask

pytestmark = pytest.mark.usefixtures("config")

URL = "kube://training/loom-gateway"


class StandIn:
    """A stand-in for a forwarded port, on which nobody answers."""

    opened: list[StandIn]

    def __init__(self, address: KubeAddress) -> None:
        self.name = str(address)
        self.token = None
        self.closed = False
        self.opened.append(self)
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.url = f"ws://127.0.0.1:{server.getsockname()[1]}"

    def renew(self) -> None:
        pass

    def why_not(self) -> None:
        return None

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[StandIn]]:
    """The ports that were forwarded."""
    StandIn.opened = []
    monkeypatch.setattr(port_forward, "PortForward", StandIn)
    yield StandIn.opened
    assert all(one.closed for one in StandIn.opened)


def test_every_command_that_asks_a_gateway_has_a_row() -> None:
    assert sorted(commands_that_ask()) == sorted(ARGUMENTS)


@pytest.mark.parametrize("command", commands_that_ask())
def test_a_command_reaches_the_current_context_in_kubernetes(
    command: str, forwards: list[StandIn], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ContextFile().add(GatewayContext("prod", URL), "secret")

    with pytest.raises(GatewayUnreachable, match="from the context prod"):
        commands()[f"loom {command}"].main(arguments(command, tmp_path, "none"), standalone_mode=False)

    assert {one.name for one in forwards} == {URL}
