"""``slurm://NAME`` where no gateway answers. Slurm's squeue is a stand-in here."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

import loom
from loom.slurm.address import SlurmAddress, parse_slurm_address
from loom.slurm.ssh import SshAddress
from loom_proxy.gateway_address import way_to
from tests.support.made_allocation import MadeAllocation

TOKEN = "the token of the allocation"


@pytest.fixture
def allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MadeAllocation:
    """An allocation, of this machine, at whose port nobody listens."""
    made = MadeAllocation(tmp_path / "slurm")
    with socket.create_server(("127.0.0.1", 0)) as server:
        made.make(TOKEN, server.getsockname()[1])
    made.use(monkeypatch)
    return made


def test_an_allocation_that_there_is_not_is_told_with_those_that_there_are(allocation: MadeAllocation) -> None:
    with pytest.raises(loom.UnknownAllocation, match=r"no allocation 'trian' in .*; there are: train") as raised:
        loom.connect("slurm://trian")
    assert raised.value.code == "unknown_allocation"


def test_a_folder_that_cannot_be_read_is_told(allocation: MadeAllocation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOM_SLURM_FOLDER", str(allocation.folder / "token"))

    with pytest.raises(loom.AllocationFailed, match=r"cannot look for allocations in .*token on this machine"):
        loom.connect("slurm://train", timeout=0)


def test_an_allocation_that_waits_in_the_queue_is_told_with_the_reason(allocation: MadeAllocation) -> None:
    allocation.end_gateway()
    allocation.is_in_queue("PENDING", "Resources")

    with pytest.raises(loom.GatewayUnreachable, match=r"does not run yet: train: job 17 waits.*\(Resources\)"):
        loom.connect("slurm://train", timeout=0)


def test_an_allocation_that_starts_is_told(allocation: MadeAllocation) -> None:
    allocation.end_gateway()

    with pytest.raises(loom.GatewayUnreachable, match="job 17 runs on n1; the gateway starts"):
        loom.connect("slurm://train", timeout=0)


@pytest.mark.parametrize("gateway_is_told", [False, True])
def test_an_allocation_that_has_ended_is_told_with_how(allocation: MadeAllocation, gateway_is_told: bool) -> None:
    """A gateway whose node was lost is told still."""
    if not gateway_is_told:
        allocation.end_gateway()
    allocation.is_in_queue("CANCELLED")

    with pytest.raises(loom.AllocationFailed, match="allocation train has ended: its job 17 was cancelled"):
        loom.connect("slurm://train", timeout=0)


def test_a_gateway_that_does_not_answer_and_whose_job_waits_again_is_told(allocation: MadeAllocation) -> None:
    allocation.is_in_queue("PENDING", "BeginTime")

    with pytest.raises(loom.GatewayUnreachable, match=r"waits in the queue: .*\(BeginTime\)"):
        loom.connect("slurm://train", timeout=0)


def test_a_gateway_of_a_job_that_runs_and_does_not_answer_is_told_with_its_address(
    allocation: MadeAllocation,
) -> None:
    with pytest.raises(loom.GatewayUnreachable, match="no gateway at") as raised:
        loom.connect("slurm://train")
    assert raised.value.__cause__ is not raised.value


def test_a_machine_without_slurm_tells_what_a_login_node_is(
    allocation: MadeAllocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocation.end_gateway()
    (allocation.root / "bin" / "squeue").unlink()
    for name in ("sh", "cat"):
        (allocation.root / "bin" / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", f"{allocation.root}/bin")

    with pytest.raises(loom.MissingDependency, match="no squeue on this machine, so that it is no login node"):
        loom.connect("slurm://train", timeout=0)


def test_the_way_follows_a_gateway_that_has_moved(allocation: MadeAllocation) -> None:
    way = way_to("slurm://train")
    assert way is not None
    assert (way.name, way.token) == ("slurm://train", TOKEN)

    allocation.move_gateway(4711)
    way.renew()
    assert way.url == "ws://127.0.0.1:4711"

    allocation.end_gateway()
    way.renew()
    assert way.url == "ws://127.0.0.1:4711"

    way.close(loom.SessionClosed("over"))
    with pytest.raises(loom.SessionClosed):
        way.renew()


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("slurm://train", SlurmAddress("train")),
        ("slurm://login/train", SlurmAddress("train", SshAddress("login"))),
        ("slurm://ann@hpc.example:2222/loom-12", SlurmAddress("loom-12", SshAddress("hpc.example", "ann", 2222))),
    ],
)
def test_an_address_names_an_allocation_and_a_login_node(url: str, address: SlurmAddress) -> None:
    assert parse_slurm_address(url) == address
    assert str(address) == url


@pytest.mark.parametrize(
    "url",
    [
        "slurm://",
        "slurm:///train",
        "slurm://login/",
        "slurm://a/b/c",
        "slurm://-o/train",
        "slurm://a/../b",
        "slurm://a b",
    ],
)
def test_an_address_of_another_form_is_refused(url: str) -> None:
    with pytest.raises(loom.InvalidAddress, match="slurm://USER@LOGIN/NAME"):
        loom.connect(url)
