"""Slurm's own words, of each version, and what they mean for a user."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import loom
from loom.slurm.login import NO_SUCH_COMMAND, CompletedCommand, Login
from loom.slurm.queue import QueuedJob, QueueState, Slurm, explain, read_duration, read_jobs, read_table

OUTPUTS = Path(__file__).parent / "outputs"


def output(name: str) -> str:
    return (OUTPUTS / name).read_text()


class RecordedLogin(Login):
    """A stand-in for a login node: answers by the command's name, and keeps what it was asked."""

    name = "login"

    def __init__(self, **answers: CompletedCommand | str) -> None:
        self.answers = answers
        self.commands: list[list[str]] = []

    def run(
        self, command: Sequence[str], *, input: bytes = b"", timeout: float = 60.0
    ) -> CompletedCommand:  # fmt: skip
        self.commands.append(list(command))
        program = next(word for word in command if word in ("squeue", "sacct", "sbatch", "scancel", "scontrol"))
        if "--version" in command:
            return CompletedCommand(0, f"slurm {self.answers['version']}\n", "")
        answer = self.answers[f"{program}_json" if "--json" in command else program]
        return CompletedCommand(0, answer, "") if isinstance(answer, str) else answer

    def close(self) -> None:
        pass


def failed(text: str, code: int = 1) -> CompletedCommand:
    return CompletedCommand(code, "", text)


def by_id(jobs: Sequence[QueuedJob]) -> dict[int, QueuedJob]:
    return {job.id: job for job in jobs}


# Formats.


def test_the_table_and_the_json_of_one_queue_say_the_same() -> None:
    table, json = by_id(read_table(output("squeue-22.05.txt"))), by_id(read_jobs(output("squeue-22.05.json")))
    for number, job in json.items():
        assert table[number] == job


def test_a_name_with_the_separator_is_read_whole() -> None:
    assert by_id(read_table(output("squeue-22.05.txt")))[2].name == "a|b 1"


COMPONENTS = """\
7+0|PENDING|ada|main|(null)|2|N/A|N/A|1700000000|10:00||None|mine
7+1|PENDING|ada|short|(null)|1|N/A|N/A|1700000000|10:00||PartitionTimeLimit|mine
"""
JSON_COMPONENTS = """{"jobs": [
  {"job_id": 7, "het_job_id": {"set": true, "number": 7}, "het_job_offset": {"set": true, "number": 0},
   "name": "mine", "job_state": ["RUNNING"], "nodes": "n[1-2]", "node_count": {"set": true, "number": 2}},
  {"job_id": 8, "het_job_id": {"set": true, "number": 7}, "het_job_offset": {"set": true, "number": 1},
   "name": "mine", "job_state": ["RUNNING"], "nodes": "n3", "node_count": {"set": true, "number": 1}}]}"""


def test_a_heterogeneous_job_is_one_with_the_nodes_and_the_worst_reason_of_its_components() -> None:
    (waits,) = Slurm(RecordedLogin(version="22.05.8", squeue=COMPONENTS)).jobs(ids=[7])
    assert (waits.id, waits.node_count, waits.reason) == (7, 3, "PartitionTimeLimit")
    (runs,) = Slurm(RecordedLogin(version="23.02.1", squeue_json=JSON_COMPONENTS)).jobs(ids=[7])
    assert (runs.id, runs.node_count, runs.nodes) == (7, 3, "n[1-2],n3")


@pytest.mark.parametrize("version", ["21.08", "22.05", "23.02", "23.11", "24.05", "25.05"])
def test_the_json_of_every_version_has_the_same_jobs(version: str) -> None:
    recorded = by_id(read_jobs(output("squeue-22.05.json")))
    found = by_id(read_jobs(output(f"squeue-{version}.json")))
    assert found[4] == recorded[4]
    assert found[2].start == recorded[2].start
    assert found[2].time_limit == 3600.0
    assert found[4].state.waits


@pytest.mark.parametrize(
    ("version", "number", "state"),
    [
        ("23.11", 6, QueueState.PENDING),
        ("23.11", 10, QueueState.COMPLETING),
        ("25.05", 2, QueueState.CONFIGURING),
        ("25.05", 6, QueueState.UNKNOWN),
    ],
)
def test_a_state_with_flags_is_the_one_that_matters(version: str, number: int, state: QueueState) -> None:
    assert by_id(read_jobs(output(f"squeue-{version}.json")))[number].state is state


def test_a_job_without_a_limit_has_none() -> None:
    assert by_id(read_jobs(output("squeue-23.02.json")))[6].time_limit is None


def test_accounting_is_read_in_each_form() -> None:
    past = by_id(read_table(output("sacct-22.05.txt")))
    assert [past[number].state.value for number in (2, 3, 4)] == ["CANCELLED", "COMPLETED", "FAILED"]
    assert (past[3].time_limit, past[4].start, past[4].nodes) == (None, None, "")
    assert read_jobs(output("sacct-23.02.json"))[0].state is QueueState.TIMEOUT
    past_jobs = read_jobs(output("sacct-23.11.json"))
    assert [job.state.value for job in past_jobs] == ["COMPLETED", "NODE_FAIL"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5", 300.0),
        ("5:30", 330.0),
        ("1:00:00", 3600.0),
        ("2-12", 216000.0),
        ("1-00:30", 88200.0),
        ("1-00:00:00", 86400.0),
        ("UNLIMITED", None),
        ("Partition_Limit", None),
        ("", None),
    ],
)
def test_durations_are_slurms(text: str, seconds: float | None) -> None:
    assert read_duration(text) == seconds


def test_partitions_say_what_they_allow() -> None:
    slurm = Slurm(RecordedLogin(scontrol=output("partitions-22.05.txt")))
    main, short, _, closed = slurm.partitions()
    assert (main.name, main.is_default, main.is_up, main.max_time, main.node_count) == (
        "main",
        True,
        True,
        86400.0,
        3,
    )
    assert (short.max_time, closed.is_up, closed.max_time) == (60.0, False, None)


# Commands.


def test_an_old_version_is_asked_for_its_table_only() -> None:
    login = RecordedLogin(version="22.05.8", squeue=output("squeue-22.05.txt"))
    assert [job.id for job in Slurm(login).jobs(ids=[2, 4])] == [4, 2]
    assert not any("--json" in command for command in login.commands)


@pytest.mark.parametrize("answer", [failed("JSON support not available"), '{"jobs": [{}]}', "no JSON"])
def test_a_slurm_whose_json_does_not_work_is_asked_for_its_table(answer: CompletedCommand | str) -> None:
    login = RecordedLogin(version="24.05.1", squeue_json=answer, squeue=output("squeue-22.05.txt"))
    slurm = Slurm(login)
    for _ in range(2):
        assert [job.name for job in slurm.jobs(names=["held"])] == ["held"]
    assert sum("--json" in command for command in login.commands) == 1


def test_a_job_that_the_queue_has_forgotten_is_looked_up_in_accounting() -> None:
    forgotten = failed("slurm_load_jobs error: Invalid job id specified")
    login = RecordedLogin(version="22.05.8", squeue=forgotten, sacct=output("sacct-22.05.txt"))
    job = Slurm(login).job(3)
    assert job is not None
    assert job.state.is_over


def test_without_accounting_a_forgotten_job_is_unknown() -> None:
    forgotten = failed("slurm_load_jobs error: Invalid job id specified")
    disabled = failed("Slurm accounting storage is disabled")
    assert Slurm(RecordedLogin(version="22.05.8", squeue=forgotten, sacct=disabled)).job(3) is None


def test_the_id_of_a_submitted_job_is_found_among_a_sites_own_lines() -> None:
    assert Slurm(RecordedLogin(sbatch="Welcome!\n4711;cluster\n")).submit("") == 4711
    with pytest.raises(loom.AllocationFailed, match="named no job"):
        Slurm(RecordedLogin(sbatch="Welcome!\n")).submit("")


def test_the_token_of_another_gateway_is_not_shown_to_a_job() -> None:
    login = RecordedLogin(sbatch="1\n")
    Slurm(login).submit("")
    assert login.commands[0][:4] == ["env", "-u", "LOOM_TOKEN", "sbatch"]


@pytest.mark.parametrize(
    "text",
    [
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
        "slurm_load_jobs error: Zero Bytes were transmitted or received",
    ],
)
def test_a_controller_that_is_away_is_worth_another_attempt(text: str) -> None:
    with pytest.raises(loom.SchedulerAway, match="does not answer"):
        Slurm(RecordedLogin(sbatch=failed(text))).submit("")


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("sbatch: error: Batch job submission failed: Invalid partition name specified", "--partition"),
        ("Invalid account or account/partition combination specified", "--account"),
        ("Invalid qos specification", "--qos"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "--time"),
        ("Requested node configuration is not available", "ask for less"),
        ("Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)", "sacctmgr"),
    ],
)
def test_a_refusal_has_slurms_words_and_what_to_do(text: str, advice: str) -> None:
    with pytest.raises(loom.AllocationFailed) as raised:
        Slurm(RecordedLogin(sbatch=failed(text))).submit("")
    assert text in str(raised.value)
    assert advice in str(raised.value)


def test_a_machine_without_slurm_is_told_from_one_that_refuses() -> None:
    with pytest.raises(loom.MissingDependency, match="no sbatch on login"):
        Slurm(RecordedLogin(sbatch=failed("sbatch: command not found", NO_SUCH_COMMAND))).submit("")


def test_a_job_that_has_ended_already_can_be_cancelled() -> None:
    Slurm(RecordedLogin(scancel=failed("scancel: error: Kill job error on job id 9: Invalid job id"))).cancel(9)


# Reasons.


@pytest.mark.parametrize(
    ("reason", "lasts", "words"),
    [
        ("Resources", False, "as soon as its nodes are free"),
        ("Priority", False, "higher priority"),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-3]", False, "UnavailableNodes:n[1-3]"),
        ("PartitionTimeLimit", True, "longer than its partition allows"),
        ("PartitionNodeLimit", True, "more nodes"),
        ("DependencyNeverSatisfied", True, "did not end as asked"),
        ("QOSMaxJobsPerUserLimit", False, "its QOS"),
        ("AssocGrpCPUMinutesLimit", False, "your account"),
        ("AssocMaxCpuPerJobLimit", True, "AssocMaxCpuPerJobLimit"),
        ("QOSMaxGRESPerJob", True, "one job"),
        ("QOSMinGRES", True, "its QOS"),
        ("SomethingNew", False, "Slurm says SomethingNew"),
    ],
)
def test_a_reason_is_explained(reason: str, lasts: bool, words: str) -> None:
    found = explain(reason)
    assert found.lasts is lasts
    assert words in found.sentence
    assert found.advice or not lasts
