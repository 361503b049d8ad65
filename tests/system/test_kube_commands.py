"""Commands with a context in Kubernetes, on a real gateway; a stand-in for kubectl forwards the port."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path

import nats
import psutil
import pytest

import loom
from loom.errors import PortForwardFailed
from loom.nats.subjects import EnvelopeKind
from loom.weaver.views import Away
from loom_proxy.contexts import ContextFile, GatewayContext
from loom_proxy.kubernetes.port_forward import PortForward, parse_kube_address
from loom_proxy.local import LocalCluster
from loom_proxy.weaver.client import WeaverProxy
from tests.integration.nats.bridges import Bridge
from tests.integration.nats.nats_server import NatsServer, Said, require_nats_server
from tests.support.actors import Counter
from tests.support.cli_page import commands
from tests.support.forwards import forwarding, lead_to, put_on_path
from tests.support.gateways import await_true
from tests.support.processes import start, still_there, tree

LOOM = "from loom.cli import main; main()"
BOUND = 30.0


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return put_on_path(tmp_path, monkeypatch)


@pytest.fixture
def service(config: Path, kubectl: Path, cluster: LocalCluster) -> str:
    """The address of the gateway's service, which is the current context."""
    address = lead_to(cluster, kubectl)
    ContextFile().add(GatewayContext("prod", address), cluster.token)
    return address


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    line = process.stdout.readline()
    assert line, f"the command ended with code {process.wait()}"
    return line


def status(*options: str) -> None:
    """``loom status`` in this process."""
    commands()["loom status"].main(list(options), standalone_mode=False)


def test_status_says_which_gateway_it_asked(service: str, capsys: pytest.CaptureFixture[str]) -> None:
    status()

    assert f"at {service} (from the context prod)" in capsys.readouterr().out
    assert not forwarding(os.getpid())


@pytest.mark.usefixtures("service")
def test_connect_without_arguments_takes_the_current_context() -> None:
    with loom.connect() as job:
        assert job.run(lambda: 7) == 7
        assert job.url == "kube://research/loom-gateway"


@pytest.mark.usefixtures("service")
@pytest.mark.parametrize("words", [("watch", "--json"), ("dashboard", "--no-browser")])
def test_ctrl_c_ends_the_forward_of_a_command_that_goes_on(words: tuple[str, ...]) -> None:
    command = start("-c", LOOM, *words, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    first_line(command)
    processes = tree(command.pid)
    assert len(forwarding(command.pid)) == 1

    command.send_signal(signal.SIGINT)

    assert command.wait(BOUND) == 0
    assert not still_there(processes)


def test_ctrl_c_while_kubectl_starts_leaves_no_kubectl(
    kubectl: Path, monkeypatch: pytest.MonkeyPatch, service: str
) -> None:
    (kubectl / "bin" / "kubectl").write_text("#!/bin/sh\nexec sleep 1000\n")
    started: list[psutil.Process] = []

    def interrupted(*_: object) -> None:
        started.extend(set(psutil.Process().children(recursive=True)) - before)
        raise KeyboardInterrupt

    before = set(psutil.Process().children(recursive=True))
    monkeypatch.setattr("concurrent.futures.Future.result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        PortForward(parse_kube_address(service))
    monkeypatch.undo()

    assert started
    assert not psutil.wait_procs(started, BOUND)[1]


@pytest.mark.usefixtures("config")
def test_what_kubectl_says_comes_with_the_context(kubectl: Path) -> None:
    ContextFile().add(GatewayContext("prod", "kube://default/nothing"), "secret")

    with pytest.raises(PortForwardFailed, match=r'"nothing" not found.*from the context prod'):
        loom.connect()
    with pytest.raises(PortForwardFailed, match="from the context prod"):
        status()
    assert not forwarding(os.getpid())


@pytest.mark.usefixtures("service")
def test_a_wrong_token_is_told_with_its_context(cluster: LocalCluster) -> None:
    with pytest.raises(loom.AuthenticationError, match="from the context prod") as told:
        status("--token", "wrong")

    assert (cluster.token or "") not in str(told.value)
    assert not forwarding(os.getpid())


def test_a_watch_and_requests_go_on_when_the_forwarded_port_moves(
    service: str, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = PortForward(parse_kube_address(service))
    try:
        weaver = WeaverProxy(forward, cluster.token)
        watch = weaver.watch(timeout=BOUND)
        next(watch)
        (kubectl,) = forwarding(os.getpid())
        before = forward.port
        monkeypatch.setattr(forward, "port", 0)  # as if another program had taken it
        kubectl.send_signal(signal.SIGKILL)
        await_true(lambda: forward.port not in (0, before))

        assert isinstance(weaver.replicas(), dict)
        assert next(update for update in watch if not isinstance(update, Away)) is not None
    finally:
        forward.close()


@pytest.mark.slow
@pytest.mark.usefixtures("service")
async def test_a_bridge_goes_on_when_kubectl_ends(service: str, cluster: LocalCluster) -> None:
    require_nats_server()
    with NatsServer() as server, Bridge(service, cluster.token or "", server.url) as bridge:
        client = await nats.connect(server.url)
        updates = await Said.on(client, EnvelopeKind.UI_UPDATE)
        await asyncio.to_thread(spawn_one, cluster)
        first = await updates.next_event("spawned")
        (kubectl,) = forwarding(bridge.process.pid)
        kubectl.send_signal(signal.SIGKILL)
        bridge.await_log("has ended, and is started again")
        await asyncio.to_thread(spawn_one, cluster)

        assert (await updates.next_event("spawned"))["id"] > first["id"]
        (again,) = forwarding(bridge.process.pid)
        assert again.pid != kubectl.pid
        processes = tree(bridge.process.pid)
        await client.close()
        assert bridge.end(signal.SIGINT) == 0
        assert not still_there(processes)


def spawn_one(cluster: LocalCluster) -> None:
    """Do what the weaver has an event about."""
    with loom.connect(cluster.url, cluster.token) as job:
        assert job.hosts.spawn_procs(per_host={"gpus": 1}).spawn("counters", Counter, 1).add.call(1).get(BOUND)
