"""``slurm://``: the gateway of an allocation, through a real ssh. Slurm's squeue is a stand-in here."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import loom
from loom.cli.app import app
from loom_proxy.contexts import ContextFile, GatewayChoice, GatewayContext, Origin
from loom_proxy.local import LocalCluster
from tests.support.gateways import await_true
from tests.support.made_allocation import MadeAllocation
from tests.support.network.gate import Gate
from tests.support.sshd import LoginNode, login_node

BOUND = 60.0


@pytest.fixture
def allocation(tmp_path: Path, cluster: LocalCluster) -> MadeAllocation:
    """An allocation whose gateway is the cluster's."""
    made = MadeAllocation(tmp_path / "slurm")
    made.make(cluster.token, port_of(cluster))
    return made


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allocation: MadeAllocation) -> Iterator[LoginNode]:
    """A login node that has the allocation."""
    with login_node(tmp_path / "node", monkeypatch, allocation.environment) as node:
        yield node


def port_of(cluster: LocalCluster) -> int:
    return int(cluster.url.rpartition(":")[2])


def test_a_gateway_is_reached_by_its_allocation_and_a_cut_of_ssh_loses_nothing(node: LoginNode) -> None:
    with loom.connect("slurm://login/train") as job:
        assert job.url == "slurm://login/train"
        run = [job.run(lambda number=number: number) for number in range(3)]
        assert node.cut()
        run += [job.run(lambda number=number: number) for number in range(3, 6)]

        assert run == list(range(6))
        assert job.weaver.status() is not None
    assert not psutil.wait_procs(node.clients, BOUND)[1]


@pytest.mark.slow
def test_a_gateway_that_moves_is_followed(
    node: LoginNode, allocation: MadeAllocation, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a requeue, during which there is none."""
    monkeypatch.setattr("loom_proxy.forwarded_port.RENEW_AFTER", 0.0)
    with Gate(port_of(cluster)) as before, Gate(port_of(cluster)) as after:
        allocation.move_gateway(before.port)
        with loom.connect("slurm://login/train") as job:
            assert job.run(lambda: 1) == 1
            allocation.end_gateway()
            before.shut()
            threading.Timer(1.0, allocation.move_gateway, [after.port]).start()

            assert job.run(lambda: 2) == 2


def test_within_the_cluster_it_is_reached_without_ssh_and_followed_when_it_moves(
    allocation: MadeAllocation, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocation.use(monkeypatch)
    with Gate(port_of(cluster)) as before, Gate(port_of(cluster)) as after:
        allocation.move_gateway(before.port)
        with loom.connect("slurm://train") as job:
            assert job.run(lambda: 1) == 1
            before.shut()
            allocation.move_gateway(after.port)

            assert job.run(lambda: 2) == 2


def test_a_gateway_that_is_to_come_is_waited_for(
    allocation: MadeAllocation, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm has requeued the job, and what a lost node has left names a gateway that does not answer."""
    allocation.use(monkeypatch)
    with Gate(port_of(cluster)) as gate:
        gate.shut()
        allocation.move_gateway(gate.port)
        allocation.is_in_queue("PENDING", "BeginTime")

        def start() -> None:
            await_true(lambda: allocation.is_asked_for)
            allocation.is_in_queue("RUNNING")
            allocation.move_gateway(port_of(cluster))

        starting = threading.Thread(target=start)
        starting.start()
        with loom.connect("slurm://train") as job:
            assert job.run(lambda: 1) == 1
        starting.join()


def test_lists_of_runs_take_the_address(allocation: MadeAllocation, monkeypatch: pytest.MonkeyPatch) -> None:
    allocation.use(monkeypatch)

    assert list(loom.runs(url="slurm://train")) is not None
    assert GatewayChoice("slurm://train", None, None, False, Origin.ARGUMENT).weaver_address(BOUND)


def test_a_session_whose_allocation_has_ended_says_so(
    allocation: MadeAllocation, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocation.use(monkeypatch)
    with Gate(port_of(cluster)) as gate:
        allocation.move_gateway(gate.port)
        job = loom.connect("slurm://train")
        allocation.is_in_queue("TIMEOUT")
        gate.shut()

        with pytest.raises(loom.LoomError, match="its job 17 reached its time limit"):
            job.run(lambda: 1)
        gate.open()
    with loom.connect(cluster.url, cluster.token, job.session) as again:
        again.close()


@pytest.mark.slow
def test_the_users_own_connection_is_left_as_it_was(node: LoginNode) -> None:
    with node.shared_connection():
        with loom.connect("slurm://login/train") as job:
            assert job.run(lambda: 1) == 1
            assert node.logins == 1
            port = int(job._connection.url.removesuffix("/ws/v1").rpartition(":")[2])
        assert port not in listening()


@pytest.mark.slow
@pytest.mark.usefixtures("config")
def test_commands_take_the_address_and_find_the_token(node: LoginNode, capsys: pytest.CaptureFixture[str]) -> None:
    ContextFile().add(GatewayContext("hpc", "slurm://login/train"), None)

    app(["status"], standalone_mode=False)

    assert "at slurm://login/train (from the context hpc" in capsys.readouterr().out
    assert not node.clients


def listening() -> set[int]:
    """The ports of 127.0.0.1 on which a program listens."""
    return {one.laddr.port for one in psutil.net_connections("tcp4") if one.status == psutil.CONN_LISTEN}


@pytest.mark.slow
class TestLoginNodeThatForwardsNothing:
    @pytest.fixture
    def node(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allocation: MadeAllocation
    ) -> Iterator[LoginNode]:
        refusing = "AllowTcpForwarding no"
        with login_node(tmp_path / "node", monkeypatch, allocation.environment, refusing) as node:
            yield node

    def test_it_is_told(self, node: LoginNode) -> None:
        with pytest.raises(loom.PortForwardFailed, match="login forwards no ports"):
            loom.connect("slurm://login/train")
