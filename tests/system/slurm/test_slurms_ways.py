"""What Slurm does to an allocation, and what becomes of the sessions and trainings in it."""

from __future__ import annotations

import pytest

from tests.support.needs import skipped_if
from tests.support.slurm import SlurmCluster, missing
from tests.system.slurm.researcher import PROGRAMS, VIA, Researcher, loom, up

pytestmark = [skipped_if(missing()), pytest.mark.slow, pytest.mark.timeout(500)]

LEDGER = PROGRAMS / "ledger.py"

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
