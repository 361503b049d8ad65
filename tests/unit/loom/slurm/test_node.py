"""A node of an allocation, with shell scripts in the place of its worker and its gateway."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import loom
from loom.process.backoff import Backoff
from loom.slurm import node as module
from loom.slurm.folder import GatewayFacts, PublishedWorker, WorkerKey, merged, published
from loom.slurm.node import AllocationNode, own_address, why_unreachable
from loom.slurm.spec import AllocationSpec, MeshSpec

LISTENS = """echo '{"event": "listening", "pid": 1}'; trap 'exit 0' TERM; while :; do sleep 0.02; done"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_EVERY", (0.01, 0.02))
    monkeypatch.setattr(module, "BACKOFF", Backoff(0.001, 0.001))
    monkeypatch.setattr(module, "MOST_FAILURES", 3)
    monkeypatch.setattr(module, "_kill_descendants", lambda: None)  # other tests' processes are descendants, too


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "workers").mkdir()
    write_spec(tmp_path, AllocationSpec(name="mine", notice=6.0))
    return tmp_path


def write_spec(folder: Path, spec: AllocationSpec) -> None:
    (folder / "spec.json").write_text(spec.to_json())


class ScriptedNode(AllocationNode):
    """A node whose worker and gateway are shell scripts."""

    gateway_script = worker_script = LISTENS

    def _gateway_command(self) -> list[str]:
        self._gateway_port = 8470
        return ["sh", "-c", self.gateway_script]

    def _worker_command(self) -> list[str]:
        super()._worker_command()
        return ["sh", "-c", self.worker_script]


def node_of(
    folder: Path, rank: int = 0, count: int = 1, job: int = 7, restart: int = 0, **options: bool
) -> ScriptedNode:
    given = {
        "SLURM_JOB_ID": str(job),
        "SLURM_NNODES": str(count),
        "SLURM_RESTART_COUNT": str(restart),
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
        "SLURMD_NODENAME": f"n{rank}.invalid",
        "PATH": os.environ["PATH"],
    }
    return ScriptedNode(folder, given, rank, **({"leads": rank == 0} | options))


@pytest.fixture
def running() -> Iterator[Callable[[AllocationNode], threading.Thread]]:
    started: list[tuple[AllocationNode, threading.Thread]] = []

    def run(node: AllocationNode) -> threading.Thread:
        thread = threading.Thread(target=node.run, daemon=True)
        started.append((node, thread))
        thread.start()
        return thread

    yield run
    for node, thread in started:
        if thread.is_alive():
            node.on_signal(signal.SIGTERM, None)
            thread.join(20)
            assert not thread.is_alive()


def wait_until(holds: Callable[[], object], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it did not come about"
        time.sleep(0.01)


def facts_in(folder: Path) -> GatewayFacts | None:
    try:
        return GatewayFacts.from_json((folder / "gateway.json").read_text())
    except FileNotFoundError:
        return None


# Workers and the gateway.


def test_a_gateway_is_published_when_all_workers_have_come(
    folder: Path, running: Callable[[AllocationNode], threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "why_unreachable", lambda worker: None)
    running(node_of(folder, 0, 2))
    wait_until(lambda: published(folder))
    assert not (folder / "workers.txt").exists()
    running(node_of(folder, 1, 2))
    wait_until(lambda: facts_in(folder))
    assert facts_in(folder) == GatewayFacts("127.0.0.1", 8470, 7, node="n0.invalid")
    assert len((folder / "workers.txt").read_text().splitlines()) == 2


def test_each_mesh_has_the_workers_of_its_nodes(
    folder: Path, running: Callable[[AllocationNode], threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "why_unreachable", lambda worker: None)
    write_spec(folder, AllocationSpec(name="mine", meshes={"trainers": MeshSpec(2), "generators": MeshSpec()}))
    (folder / "grown").write_text("8\n")
    for rank in (2, 0, 1):
        running(node_of(folder, rank))
    running(node_of(folder, 0, job=8, leads=False))
    wait_until(lambda: facts_in(folder) and lines_in(folder / "workers-generators.txt") == 2)
    assert lines_in(folder / "workers-trainers.txt") == 2
    command = AllocationNode._gateway_command(node_of(folder))
    sources = [word for word in command if "file:" in word]
    assert sources == [f"{mesh}=file:{folder}/workers-{mesh}.txt" for mesh in ("trainers", "generators")]


def lines_in(file: Path) -> int:
    return len(file.read_text().splitlines())


def test_a_worker_that_no_connection_reaches_is_told(
    folder: Path, running: Callable[[AllocationNode], threading.Thread]
) -> None:
    running(node_of(folder))
    wait_until(lambda: facts_in(folder))
    facts = facts_in(folder)
    assert facts is not None
    assert "n0.invalid: its worker at tcp://127.0.0.1:" in facts.missing[0]
    assert "Let the nodes reach each other's ports" in facts.missing[0]


def test_a_node_whose_worker_does_not_come_is_told(
    folder: Path, running: Callable[[AllocationNode], threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WORKERS_TIMEOUT", 0.05)
    monkeypatch.setattr(module, "why_unreachable", lambda worker: None)
    running(node_of(folder, 0, 2))
    wait_until(lambda: facts_in(folder))
    facts = facts_in(folder)
    assert facts is not None
    assert facts.missing[-1] == "no worker came up on node number 1 of the job"


def test_the_end_leaves_neither_worker_nor_gateway(
    folder: Path, running: Callable[[AllocationNode], threading.Thread]
) -> None:
    node = node_of(folder)
    thread = running(node)
    wait_until(lambda: facts_in(folder))
    node.on_signal(signal.SIGTERM, None)
    thread.join(20)
    assert not thread.is_alive()
    assert facts_in(folder) is None
    assert not published(folder)


def test_a_requeued_job_begins_without_what_it_left(
    folder: Path, running: Callable[[AllocationNode], threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "why_unreachable", lambda worker: None)
    (folder / "workers" / "7.0.0.n3").write_text("tcp://10.0.0.3:1\n")
    (folder / "gateway.json").write_text(GatewayFacts("10.0.0.3", 1, 7).to_json())
    running(node_of(folder, restart=1))
    wait_until(lambda: (found := facts_in(folder)) and found.restart == 1)
    assert "10.0.0.3" not in (folder / "workers.txt").read_text()


def test_workers_of_a_grown_job_join_and_leave(
    folder: Path, running: Callable[[AllocationNode], threading.Thread]
) -> None:
    write_spec(folder, AllocationSpec(name="mine", gateway_only=True, notice=6.0))
    (folder / "grown").write_text("8\n9\n")
    (folder / "workers" / "9.0.0.lost").write_text("tcp://127.0.0.1:1\n")
    running(node_of(folder))
    wait_until(lambda: facts_in(folder))
    assert (folder / "workers.txt").read_text() == ""
    grown = node_of(folder, job=8, leads=False)
    thread = running(grown)
    wait_until(lambda: (folder / "workers.txt").read_text())
    grown.on_signal(signal.SIGTERM, None)
    thread.join(20)
    wait_until(lambda: (folder / "workers.txt").read_text() == "")


def test_a_worker_that_ends_is_started_again_at_another_port(
    folder: Path, running: Callable[[AllocationNode], threading.Thread]
) -> None:
    node = node_of(folder)
    running(node)
    wait_until(lambda: published(folder))
    (before,) = published(folder)
    child = node._parts[1]._child
    assert child is not None
    child.signal(signal.SIGKILL)
    wait_until(lambda: [worker.address for worker in published(folder)] != [before.address])


def test_a_gateway_that_cannot_run_ends_every_node(
    folder: Path, running: Callable[[AllocationNode], threading.Thread]
) -> None:
    node = node_of(folder, 0, 2)
    node.gateway_script = "echo 'error: no room' >&2; exit 1"
    other = running(node_of(folder, 1, 2))
    with pytest.raises(loom.LoomError, match="no room"):
        node.run()
    other.join(20)
    assert not other.is_alive()
    assert "no room" in (folder / "notice-7-0").read_text()


@pytest.mark.parametrize(("of_the_job", "asked"), [("", ["squeue", "scontrol"]), ("7\n", ["squeue"])])
def test_a_job_whose_gateways_node_is_lost_starts_again(
    folder: Path,
    running: Callable[[AllocationNode], threading.Thread],
    monkeypatch: pytest.MonkeyPatch,
    of_the_job: str,
    asked: list[str],
) -> None:
    commands: list[str] = []

    def slurm(name: str, *arguments: str) -> str:
        commands.append(name)
        return of_the_job

    monkeypatch.setattr(module, "LEADER_EVERY", 0.01)
    monkeypatch.setattr(module, "_slurm", slurm)
    (folder / "workers" / "7.0.0.n0").write_text("tcp://127.0.0.1:1\n")
    running(node_of(folder, 1, 2))
    wait_until(lambda: len(commands) >= len(asked))
    assert commands[: len(asked)] == asked
    assert "scontrol" in asked or "scontrol" not in commands


def test_trainings_are_told_which_nodes_slurm_drains(
    folder: Path, running: Callable[[AllocationNode], threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = ["n1 draining\nn2 mixed\nn3 drained*\n"]
    asked: list[tuple[str, ...]] = []

    def slurm(*command: str) -> str | None:
        asked.append(command)
        return told[0] if told else None

    monkeypatch.setattr(module, "DRAINS_EVERY", 0.01)
    monkeypatch.setattr(module, "_slurm", slurm)
    (folder / "nodes-7").write_text("n1 127.0.0.1\nn2 127.0.0.1\nn3 127.0.0.1\n")
    node = node_of(folder, 0, 3)
    running(node)

    def drained() -> list[str]:
        return sorted(path.name for path in (folder / "draining").glob("*"))

    wait_until(lambda: drained() == ["7.n1", "7.n3"])
    told[0] = "n1 mixed\nn2 draining\nn3 drained*\n"
    wait_until(lambda: drained() == ["7.n2", "7.n3"])
    told.clear()  # slurmctld is away: nothing is known of a change
    before = len(asked)
    wait_until(lambda: len(asked) > before + 1)
    assert drained() == ["7.n2", "7.n3"]
    assert "--nodes=n1,n2,n3" in asked[0]


def test_programs_of_sessions_do_not_take_themselves_for_ranks_of_the_step(folder: Path) -> None:
    given = {
        "SLURM_JOB_ID": "7",
        "SLURM_PROCID": "0",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "PMI_RANK": "0",
        "LOOM_TOKEN": "of another gateway",
        "SLURM_JOB_GPUS": "0,1",
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
    }
    node = AllocationNode(folder, given, 0, leads=True)
    assert node._environment == {"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "0,1"}


# Addresses.


def test_a_nodes_address_is_slurms(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("n1 127.0.0.1\nn2 192.0.2.9\n")
    assert own_address("n1", tmp_path / "nodes", {}) == "127.0.0.1"


def test_a_name_that_only_leads_to_the_machine_itself_is_not_told_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loopback = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: loopback)
    with pytest.raises(loom.InvalidAddress, match=r"Is NodeAddr in slurm\.conf an address"):
        own_address("n1", tmp_path / "none", {})


def test_a_workers_port_is_tried_by_a_connection() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        worker = PublishedWorker(WorkerKey(7, 0, 0, "n1"), f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        assert "Connection refused" in (why_unreachable(worker) or "")
        listener.listen()
        assert why_unreachable(worker) is None


def test_the_workers_of_a_gateway_are_its_jobs_and_those_of_grown_ones() -> None:
    def worker(job: int, restart: int, rank: int) -> PublishedWorker:
        return PublishedWorker(WorkerKey(job, restart, rank, "n"), "tcp://10.0.0.1:1")

    found = [worker(5, 0, 0), worker(6, 0, 0), worker(7, 0, 0), worker(7, 1, 0), worker(7, 1, 1)]
    assert merged(found, 7, 1, {6}) == [worker(7, 1, 0), worker(7, 1, 1), worker(6, 0, 0)]


def test_the_name_of_a_workers_file_keeps_its_node() -> None:
    key = WorkerKey(7, 1, 0, "n1.cluster.example")
    assert WorkerKey.read(str(key)) == key
    assert WorkerKey.read("n1.tmp-abc") is None
