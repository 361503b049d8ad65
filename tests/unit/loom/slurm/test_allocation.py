"""Allocations in a user's home, with a stand-in for Slurm's commands."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

import loom
from loom.process.backoff import Backoff
from loom.slurm import allocation as module
from loom.slurm.allocation import Allocation, listed
from loom.slurm.folder import GatewayFacts
from loom.slurm.login import LocalLogin
from loom.slurm.queue import QueuedJob, QueueState, Slurm
from loom.slurm.spec import AllocationSpec

SPEC = AllocationSpec(name="mine")


class FakeSlurm(Slurm):
    """A stand-in for Slurm: its jobs are what a test makes of them."""

    def __init__(self) -> None:
        super().__init__(LocalLogin())
        self.queue: dict[int, QueuedJob] = {}
        self.scripts: list[str] = []
        self.away = 0
        """The number of next commands that fail."""
        self.looks: list[str] = []
        self.signalled: list[tuple[int, str]] = []
        self.deaf: set[int] = set()
        """The jobs whose script does not end by a signal."""

    def version(self) -> tuple[int, ...]:
        return 22, 5, 8

    def submit(self, script: str, options: Iterable[str] = ()) -> int:
        self._answer()
        self.scripts.append(script)
        name = next(line for line in script.splitlines() if "--job-name=" in line).partition("=")[2]
        return self.put(name=name).id

    def put(self, number: int = 0, **facts: object) -> QueuedJob:
        number = number or len(self.queue) + 1
        job = QueuedJob(number, "mine", QueueState.PENDING, reason="Priority")
        self.queue[number] = replace(job, **facts)  # type: ignore[arg-type]
        return self.queue[number]

    def jobs(
        self, *, ids: Iterable[int] = (), names: Iterable[str] = (), user: str | None = None
    ) -> list[QueuedJob]:  # fmt: skip
        self._answer()
        ids, names = set(ids), set(names)
        return [
            job for job in self.queue.values() if (not ids or job.id in ids) and (not names or job.name in names)
        ]

    def accounting(self, number: int) -> QueuedJob | None:
        return None

    def cancel(self, number: int) -> None:
        self.put(number, state=QueueState.CANCELLED)

    def signal_script(self, number: int, signal: str) -> None:
        self.signalled.append((number, signal))
        if number not in self.deaf:
            self.put(number, state=QueueState.COMPLETED)

    def rename(self, number: int, name: str) -> None:
        self.put(number, name=name)

    def _answer(self) -> None:
        if self.away:
            self.away -= 1
            raise loom.SchedulerAway("Slurm's controller does not answer")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.setenv("LOOM_SLURM_FOLDER", str(tmp_path / "home" / "slurm"))
    monkeypatch.setattr(module, "POLL", Backoff(0.001, 0.001))
    monkeypatch.setattr(module, "STARTING_POLL", 0.001)
    return FakeSlurm()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "home" / "slurm"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_only_its_user_can_read_an_allocations_folder(slurm: FakeSlurm, root: Path) -> None:
    Allocation.submit(slurm, SPEC)
    assert [mode(root), mode(root / "mine"), mode(root / "mine" / "token")] == [0o700, 0o700, 0o600]


def test_no_script_has_the_token(slurm: FakeSlurm, root: Path) -> None:
    allocation = Allocation.submit(slurm, SPEC)
    assert len(allocation.token()) > 40
    assert allocation.token() not in slurm.scripts[0] + (root / "mine" / "spec.json").read_text()


def test_without_a_name_it_is_named_by_its_job(slurm: FakeSlurm, root: Path) -> None:
    allocation = Allocation.submit(slurm, AllocationSpec())
    assert allocation.name == "loom-1"
    assert [path.name for path in root.iterdir()] == ["loom-1"]
    assert slurm.queue[1].name == "loom-1"
    assert Allocation.find(slurm.login, "loom-1").token() == allocation.token()


def test_an_allocation_that_slurm_refuses_leaves_nothing(slurm: FakeSlurm, root: Path) -> None:
    def refuse(script: str) -> int:
        raise loom.AllocationFailed("Invalid partition name specified")

    slurm.submit = refuse  # type: ignore[method-assign,assignment]
    with pytest.raises(loom.AllocationFailed, match="Invalid partition"):
        Allocation.submit(slurm, AllocationSpec())
    assert not list(root.iterdir())


def test_two_that_live_cannot_have_one_name(slurm: FakeSlurm) -> None:
    Allocation.submit(slurm, SPEC)
    with pytest.raises(loom.NameTaken, match="lives on this machine as job 1"):
        Allocation.submit(slurm, SPEC)
    assert len(slurm.queue) == 1


def test_of_two_submitted_at_once_the_later_one_is_withdrawn(
    slurm: FakeSlurm, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Allocation.submit(slurm, SPEC)
    monkeypatch.setattr(module, "_check_free", lambda slurm, name: None)  # it looked before the first was there
    with pytest.raises(loom.NameTaken, match="job 1"):
        Allocation.submit(slurm, SPEC)
    assert slurm.queue[2].state is QueueState.CANCELLED
    assert slurm.queue[first.job_id].state is QueueState.PENDING


def test_a_name_is_free_again_with_its_token_and_state_when_its_job_has_ended(slurm: FakeSlurm, root: Path) -> None:
    first = Allocation.submit(slurm, SPEC)
    (root / "mine" / "state" / "runs").touch()
    first.end()
    second = Allocation.submit(slurm, SPEC)
    assert (second.token(), second.job_id) == (first.token(), 2)
    assert (root / "mine" / "state" / "runs").exists()


def test_a_controller_that_is_away_is_waited_for(slurm: FakeSlurm) -> None:
    told: list[str] = []
    slurm.queue[7] = QueuedJob(7, "other", QueueState.RUNNING)
    slurm.away = 2
    assert Allocation.submit(slurm, SPEC, told.append).job_id == 2
    assert told == ["Slurm's controller does not answer; waiting for it"]


def test_a_submission_whose_answer_was_lost_is_not_repeated(slurm: FakeSlurm) -> None:
    submit, lost = slurm.submit, [True]

    def submit_and_lose(script: str) -> int:
        number = submit(script)
        if lost and lost.pop():
            raise loom.SchedulerAway("Socket timed out on send/recv operation")
        return number

    slurm.submit = submit_and_lose  # type: ignore[method-assign,assignment]
    assert Allocation.submit(slurm, SPEC).job_id == 1
    assert len(slurm.queue) == 1


def test_waiting_tells_the_reason_and_ends_when_the_gateway_answers(slurm: FakeSlurm, root: Path) -> None:
    allocation = Allocation.submit(slurm, SPEC)
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        if "waits" in text:
            slurm.put(1, state=QueueState.RUNNING, nodes="n1")
        else:
            (root / "mine" / "gateway.json").write_text(GatewayFacts("10.0.0.1", 8470, 1).to_json())

    assert allocation.wait(tell) == GatewayFacts("10.0.0.1", 8470, 1)
    assert told == [
        "mine: job 1 waits in the queue: jobs of higher priority come first (Priority)",
        "mine: job 1 runs on n1; the gateway starts",
    ]


def test_the_gateway_of_a_former_job_is_none_of_this_one(slurm: FakeSlurm, root: Path) -> None:
    allocation = Allocation.submit(slurm, SPEC)
    slurm.put(1, state=QueueState.RUNNING)
    (root / "mine" / "gateway.json").write_text(GatewayFacts("10.0.0.1", 8470, 0).to_json())
    with pytest.raises(TimeoutError, match="the gateway starts"):
        allocation.wait(timeout=0.05)


def test_a_worker_that_cannot_be_reached_is_named(slurm: FakeSlurm, root: Path) -> None:
    allocation = Allocation.submit(slurm, SPEC)
    slurm.put(1, state=QueueState.RUNNING)
    facts = GatewayFacts("10.0.0.1", 8470, 1, missing=("n2: its worker cannot be reached from n1",))
    (root / "mine" / "gateway.json").write_text(facts.to_json())
    with pytest.raises(loom.AllocationFailed, match="n2: its worker cannot be reached from n1"):
        allocation.wait()


def test_a_job_that_never_starts_names_its_limit(slurm: FakeSlurm) -> None:
    allocation = Allocation.submit(slurm, SPEC)
    slurm.put(1, reason="PartitionTimeLimit")
    with pytest.raises(loom.AllocationFailed, match=r"never starts: .* \(PartitionTimeLimit\)\. Ask for a shorter"):
        allocation.wait()


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (QueueState.TIMEOUT, "reached its time limit of 60 s before its gateway answered"),
        (QueueState.CANCELLED, "was cancelled before its gateway answered"),
        (QueueState.NODE_FAIL, "lost a node before its gateway answered"),
    ],
)
def test_a_job_that_ended_too_early_says_how_with_its_last_lines(
    slurm: FakeSlurm, root: Path, state: QueueState, words: str
) -> None:
    allocation = Allocation.submit(slurm, SPEC)
    slurm.put(1, state=state, time_limit=60.0)
    (root / "slurm-1.log").write_text("of the batch script\n")
    (root / "mine" / "log" / "n1.log").write_text("no package torchmonarch\n")
    with pytest.raises(loom.AllocationFailed) as raised:
        allocation.wait()
    assert words in str(raised.value)
    assert "of the batch script" in str(raised.value)
    assert "no package torchmonarch" in str(raised.value)


def test_waiting_goes_on_in_the_next_one_of_a_chain(slurm: FakeSlurm, root: Path) -> None:
    allocation = Allocation.submit(slurm, SPEC)
    slurm.put(1, state=QueueState.TIMEOUT)
    slurm.put(2, state=QueueState.RUNNING)
    (root / "mine" / "job").write_text("1\n2\n")
    (root / "mine" / "gateway.json").write_text(GatewayFacts("10.0.0.1", 8470, 2).to_json())
    assert allocation.wait().job_id == 2


def test_a_successor_that_waits_for_its_turn_is_not_waited_for(slurm: FakeSlurm, root: Path) -> None:
    allocation = Allocation.submit(slurm, replace(SPEC, chain=2))
    slurm.put(1, state=QueueState.RUNNING)
    slurm.put(2, reason="Dependency")
    (root / "mine" / "job").write_text("1\n2\n")
    (root / "mine" / "gateway.json").write_text(GatewayFacts("10.0.0.1", 8470, 1).to_json())
    assert allocation.wait(timeout=0.0).job_id == 1
    assert [one.job and one.job.id for one in listed(slurm)] == [1]


def test_the_end_takes_the_rest_of_the_chain_and_what_has_grown(slurm: FakeSlurm, root: Path) -> None:
    allocation = Allocation.submit(slurm, replace(SPEC, chain=2))
    slurm.put(2)
    (root / "mine" / "job").write_text("1\n2\n")
    assert allocation.grow(2) == 3
    assert "--nodes=2" in slurm.scripts[-1]
    assert " --grown" in slurm.scripts[-1]
    assert sorted(allocation.end()) == [1, 2, 3]
    assert all(job.state is QueueState.CANCELLED for job in slurm.queue.values())


def test_the_end_gives_notice_to_what_runs_and_cancels_what_goes_on(slurm: FakeSlurm, root: Path) -> None:
    allocation = Allocation.submit(slurm, replace(SPEC, notice=0.01))
    (root / "mine" / "job").write_text("1\n2\n")
    slurm.put(1, state=QueueState.RUNNING)
    slurm.put(2, state=QueueState.RUNNING)
    slurm.deaf = {2}
    assert allocation.end() == [2, 1]
    assert slurm.signalled == [(2, "USR1"), (1, "USR1")]
    assert [slurm.queue[number].state for number in (1, 2)] == [QueueState.COMPLETED, QueueState.CANCELLED]


def test_the_list_has_all_with_what_slurm_says(slurm: FakeSlurm) -> None:
    assert listed(slurm) == []
    Allocation.submit(slurm, SPEC)
    Allocation.submit(slurm, replace(SPEC, name="other")).end()
    assert [(one.name, one.job_ids, one.lives) for one in listed(slurm)] == [
        ("mine", (1,), True),
        ("other", (2,), False),
    ]


def test_an_unknown_name_lists_those_that_there_are(slurm: FakeSlurm) -> None:
    Allocation.submit(slurm, SPEC)
    with pytest.raises(loom.NotFound, match=r"no allocation 'yours' .* there are: mine") as raised:
        Allocation.find(slurm.login, "yours")
    assert raised.value.code == "unknown_allocation"


def test_a_folder_without_an_environment_is_refused(slurm: FakeSlurm, tmp_path: Path) -> None:
    with pytest.raises(loom.WrongArguments, match="no bin/python in it"):
        Allocation.submit(slurm, replace(SPEC, venv=str(tmp_path)))


def test_a_home_that_takes_no_files_names_the_way_to_another(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LOOM_SLURM_FOLDER", str(tmp_path / "file" / "slurm"))
    with pytest.raises(loom.AllocationFailed, match="choose another shared folder by LOOM_SLURM_FOLDER"):
        Allocation.submit(slurm, SPEC)
    assert not slurm.queue
