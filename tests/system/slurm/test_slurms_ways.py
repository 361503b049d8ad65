"""What Slurm does to an allocation, and what becomes of the sessions and trainings in it."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.support.needs import skipped_if
from tests.support.slurm import SlurmCluster, missing
from tests.system.slurm.researcher import PROGRAMS, VIA, Researcher, loom, name_of, up

pytestmark = [skipped_if(missing()), pytest.mark.slow, pytest.mark.timeout(1200)]

LEDGER, TRAINING = PROGRAMS / "ledger.py", PROGRAMS / "training.py"

CALLS = 2000


def test_no_call_is_lost_or_doubled_whatever_is_killed_between_the_laptop_and_the_nodes(
    cluster: SlurmCluster,
) -> None:
    address = up(cluster, *VIA, host="laptop")
    with Researcher(cluster, LEDGER, address, str(CALLS), host="laptop") as first:
        session = first.until("open")["session"]
        first.until("answered", number=200)
        kill(cluster, "laptop", "ssh")
        first.until("answered", number=500)
        kill(cluster, "login", "sshd")  # those of connections: the one that listens runs as root
        first.until("answered", number=800)
        with cluster.outage():
            kill(cluster, "laptop", "ssh")
        answered = first.until("answered", number=1000)["number"]
        first.kill()
    with Researcher(cluster, LEDGER, address, str(CALLS), session, host="laptop") as second:
        assert second.until("open")["begin"] > answered
        second.until("answered", number=1500)
        kill(cluster, "login", "sshd")
        assert second.until("ledger")["numbers"] == list(range(CALLS))
        second.until("closed")


def kill(cluster: SlurmCluster, host: str, name: str) -> None:
    """Kill ada's processes of a name."""
    victims = [one for one in cluster.hosts[host].processes() if one.name() == name and one.username() == "20001"]
    assert victims
    for victim in victims:
        victim.kill()


def test_a_session_works_on_while_the_controller_is_down(cluster: SlurmCluster) -> None:
    address = up(cluster, "--nodes", "2", "--name", "works")
    with Researcher(cluster, LEDGER, address, "600") as researcher:
        researcher.until("answered", number=100)
        cluster.stop_controller()
        try:
            for command in ("list", "down works"):
                done = loom(cluster, "slurm", *command.split())
                assert done.returncode != 0
                assert "slurm controller" in done.stderr.lower(), done.stderr
            with Researcher(cluster, LEDGER, address, "100") as another:
                another.until("closed")
        finally:
            cluster.start_controller()
        assert researcher.until("ledger")["numbers"] == list(range(600))
    assert loom(cluster, "slurm", "down", "works").returncode == 0
    assert cluster.jobs() == []


def test_a_node_that_is_drained_works_until_the_allocation_ends(cluster: SlurmCluster) -> None:
    address = up(cluster, "--nodes", "2")
    try:
        with Researcher(cluster, LEDGER, address, "300") as researcher:
            researcher.until("answered", number=100)
            cluster.scontrol("update", "nodename=n2", "state=drain", "reason=maintenance")
            assert researcher.until("ledger")["numbers"] == list(range(300))
        assert cluster.node_states()["n2"] == "draining"
        assert loom(cluster, "slurm", "down", name_of(address)).returncode == 0
        cluster.wait("a drained node", lambda: cluster.node_states()["n2"] == "drained")
    finally:
        cluster.scontrol("update", "nodename=n2", "state=resume")


def test_a_training_leaves_a_node_that_is_drained_for_another(cluster: SlurmCluster) -> None:
    address = up(cluster, "--nodes", "2")
    (job,) = cluster.jobs()
    with Researcher(cluster, TRAINING, address, f"/home/ada/drained-{job.id}", "--steps", "600") as researcher:
        researcher.until("step")
        cluster.scontrol("update", "nodename=n2", "state=drain", "reason=maintenance")
        try:
            finished = researcher.until("finished")
        finally:
            cluster.scontrol("update", "nodename=n2", "state=resume")
    assert finished["moved"]
    assert set(finished["moved"]) == {"host 1 is drained: Slurm drains its node"}


def test_scancel_from_outside_is_told_to_the_program_that_uses_the_allocation(cluster: SlurmCluster) -> None:
    address = up(cluster, "--nodes", "2", "--name", "cancelled", *VIA, host="laptop")
    with Researcher(cluster, LEDGER, address, "1000000", host="laptop") as researcher:
        researcher.until("answered", number=100)
        (job,) = cluster.jobs()
        cluster.login(["scancel", job.id]).check_returncode()
        told = researcher.rest().splitlines()[-1]
    assert "cancelled" in told, told
    done = loom(cluster, "slurm", "status", "cancelled")
    assert "cancelled" in done.stdout.lower(), done.stdout + done.stderr


def test_the_calls_to_other_nodes_go_on_when_a_node_is_lost(cluster: SlurmCluster) -> None:
    address = up(cluster, "--nodes", "3")
    with Researcher(cluster, LEDGER, address, "2000") as researcher:  # its actor is on the first node
        researcher.until("answered", number=200)
        cluster.kill_node(3)
        cluster.wait("a node that is down", lambda: cluster.node_states()["n3"].startswith("down"))
        assert researcher.until("ledger")["numbers"] == list(range(2000))
    assert [row.state for row in cluster.jobs()] == ["RUNNING"]
    assert loom(cluster, "slurm", "down", name_of(address)).returncode == 0
    cluster.start_node(3)


def test_signals_from_users_end_it_with_notice_or_not_at_all(cluster: SlurmCluster) -> None:
    address = up(cluster, "--nodes", "2")
    (job,) = cluster.jobs()
    with Researcher(cluster, LEDGER, address, "500") as researcher:
        researcher.until("answered", number=100)
        for name in ("HUP", "USR2", "CONT"):
            for to in ("", "--batch"):
                cluster.login(["scancel", *to.split(), f"--signal={name}", job.id]).check_returncode()
        researcher.until("closed")
    assert [row.state for row in cluster.jobs()] == ["RUNNING"]
    cluster.login(["scancel", "--signal=USR1", job.id]).check_returncode()
    cluster.wait("the end of the job", lambda: cluster.jobs() == [])
    assert "COMPLETED" in cluster.scontrol("show", "job", job.id)


def test_a_training_saves_its_state_before_the_time_limit(cluster: SlurmCluster) -> None:
    limit = ["--name", "limited", "--time", "3", "--notice", "30"]  # Slurm's notice may come a minute early
    up(cluster, "--nodes", "2", *limit)
    training = ("slurm://limited", "/home/ada/limited", "--every", "100000")  # no checkpoint but the last
    with Researcher(cluster, TRAINING, *training, "--pace", "0.3") as researcher:
        researcher.until("step")
        researcher.until("lost")
    cluster.wait("the end of the job", lambda: cluster.jobs() == [])
    (saved,) = (cluster.homes / "ada" / "limited").iterdir()
    up(cluster, "--nodes", "2", "--name", "limited")
    with Researcher(cluster, TRAINING, *training, "--pace", "0.02") as researcher:
        assert researcher.until("finished")["restored"] == int(saved.name.rpartition("-")[2]) > 0


def test_a_gateway_alone_gets_hosts_when_it_is_grown(cluster: SlurmCluster) -> None:
    address = up(cluster, "--gateway-only", "--name", "watch")
    assert workers(cluster, address) == 0
    grown = loom(cluster, "slurm", "grow", "watch", "+2")
    assert grown.returncode == 0, grown.stderr
    cluster.wait("two workers", lambda: workers(cluster, address) == 2)
    with Researcher(cluster, LEDGER, address, "100") as researcher:
        assert researcher.until("open")["hosts"] == 2
        researcher.until("closed")
    assert len(cluster.jobs()) == 2
    assert loom(cluster, "slurm", "down", "watch").returncode == 0
    assert cluster.jobs() == []


def test_a_session_that_lives_gets_the_hosts_by_which_its_allocation_grows(cluster: SlurmCluster) -> None:
    address = up(cluster, "--nodes", "1", "--name", "grows")
    program = (
        "import loom, subprocess\n"
        f"with loom.connect({address!r}) as job:\n"
        "    subprocess.run(['loom', 'slurm', 'grow', 'grows', '+1'], check=True)\n"
        "    joined = next(event for event in job.events(120) if event.name == 'host_joined')\n"
        "    print(joined.details['host'], job.refresh_hosts(), len(job.hosts.spawn_procs()))\n"
    )
    done = cluster.login([sys.executable, "-c", program])
    assert done.stdout.splitlines()[-1:] == ["1 [1] 2"], done.stdout + done.stderr
    assert loom(cluster, "slurm", "down", "grows").returncode == 0
    assert cluster.jobs() == []


def test_the_jobs_of_an_array_join_the_gateway_of_the_first_as_they_start(cluster: SlurmCluster) -> None:
    cluster.login(["sbatch", "--job-name=busy", "--exclusive", "--wrap=sleep 600"]).check_returncode()
    cluster.wait("a node that is taken", lambda: "allocated" in cluster.node_states().values())
    address = up(cluster, "--nodes", "1", "--name", "spread", "--array", "0-2", "--", "--exclusive")
    cluster.wait("two workers", lambda: workers(cluster, address) == 2)
    assert len([row for row in cluster.jobs() if row.state == "PENDING"]) == 1
    cluster.login(["scancel", "--jobname=busy"]).check_returncode()
    cluster.wait("three workers", lambda: workers(cluster, address) == 3)
    with Researcher(cluster, LEDGER, address, "100") as researcher:
        assert researcher.until("open")["hosts"] == 3
        researcher.until("closed")
    assert loom(cluster, "slurm", "down", "spread").returncode == 0
    assert cluster.jobs() == []


def test_an_array_of_which_some_wait_ends_as_a_whole(cluster: SlurmCluster) -> None:
    up(cluster, "--nodes", "2", "--name", "waits", "--array", "0-3", "--", "--exclusive")
    assert len(cluster.jobs()) == 4
    assert loom(cluster, "slurm", "down", "waits").returncode == 0
    assert cluster.jobs() == []


def workers(cluster: SlurmCluster, address: str) -> int:
    """The number of workers that the gateway knows."""
    return len(json.loads(loom(cluster, "status", "--url", address, "--json").stdout)["workers"])


@pytest.mark.parametrize("how", ["requeue", "preemption", "lost node"])
def test_a_training_with_restarts_goes_on_in_a_job_that_starts_again(cluster: SlurmCluster, how: str) -> None:
    address = up(cluster, "--nodes", "2", *VIA, host="laptop")
    (job,) = cluster.jobs()
    training = (address, f"/home/ada/checkpoints-{job.id}", "--restarts", "3")
    with Researcher(cluster, TRAINING, *training, host="laptop") as researcher:
        researcher.until("step")
        researcher.until("step")
        if how == "requeue":
            cluster.scontrol("requeue", job.id)
        elif how == "preemption":
            urgent = ["srun", "--partition=urgent", "--nodes=3", "--exclusive", "true"]
            cluster.login(urgent).check_returncode()
        else:
            cluster.kill_node(1)
            cluster.wait("a node that is down", lambda: cluster.node_states()["n1"].startswith("down"))
            cluster.start_node(1)
        researcher.until("restarted")
        assert researcher.until("open")["hosts"] == 2
        finished = researcher.until("finished")
    assert finished["restored"] > 0
    assert_one_curve(finished["runs"], again=how == "lost node")
    assert [(row.id, row.state) for row in cluster.jobs()] == [(job.id, "RUNNING")]


def test_a_training_longer_than_its_time_limits_is_one_run_in_a_chain_of_allocations(cluster: SlurmCluster) -> None:
    chain = ["--chain", "30", "--time", "2", "--notice", "30"]
    address = up(cluster, "--nodes", "1", *chain, *VIA, host="laptop")
    training = (address, "/home/ada/chained", "--restarts", "30", "--pace", "0.2")
    with Researcher(cluster, TRAINING, *training, host="laptop") as researcher:
        for _ in range(3):
            researcher.until("restarted")
        assert_one_curve(researcher.until("finished")["runs"])
    assert loom(cluster, "slurm", "down", name_of(address)).returncode == 0
    assert cluster.jobs() == []


def assert_one_curve(runs: list[dict[str, Any]], again: bool = False) -> None:
    """The training is one run, whose steps rise, but for those since a checkpoint that were made again."""
    (run,) = runs
    *steps, last = run["steps"]  # the last one is told again at the end
    assert (run["name"], run["state"], last) == ("train", "completed", 1200)
    assert again or steps == sorted(set(steps))
