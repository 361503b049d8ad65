"""The cluster with Slurm on one machine: what it has of a real one, and that nothing is left of it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.needs import skipped_if
from tests.support.paths import ROOT
from tests.support.processes import still_there
from tests.support.slurm import SlurmCluster, missing
from tests.support.slurm.host import FREEZER, missing_freezer

pytestmark = [skipped_if(missing()), pytest.mark.slow]

LOOMS_GROUP = re.compile(":freezer:/(loom-[^/]+)")

STARTS = """#!/bin/bash
echo $SLURM_JOB_NODELIST ${SLURM_RESTART_COUNT:-0} >> starts
exec srun sleep 600
"""

HOLDS_A_CLUSTER = """
import signal, sys
from pathlib import Path
import psutil
from tests.support.slurm import SlurmCluster
with SlurmCluster(Path(sys.argv[1]), nodes=1) as cluster:
    cluster.login(["sbatch", "--wrap=sleep 600"]).check_returncode()
    cluster.wait("a step", lambda: any(one.name() == "sleep" for one in cluster.processes(1)))
    hosts = cluster.hosts.values()
    holders = [psutil.Process(host.pid).parent().ppid() for host in hosts]
    print(*holders, *(one.pid for host in hosts for one in host.processes()), flush=True)
    signal.pause()
"""


def submit(cluster: SlurmCluster, script: str, *options: str) -> str:
    done = cluster.login(["sbatch", "--parsable", *options], input=script)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def starts(cluster: SlurmCluster) -> list[str]:
    file = cluster.homes / "ada" / "starts"
    return file.read_text().splitlines() if file.exists() else []


def test_a_step_runs_on_all_nodes_with_an_address_each(cluster: SlurmCluster) -> None:
    done = cluster.login(["srun", "-N3", "sh", "-c", "echo $(hostname) $(id -un) $(ip -br addr show dev eth0)"])
    told = sorted(line.split() for line in done.stdout.splitlines())
    assert [line[:2] for line in told] == [["n1", "ada"], ["n2", "ada"], ["n3", "ada"]], done.stderr
    assert [line[4] for line in told] == [f"{cluster.addresses[node]}/16" for node in cluster.nodes]


def test_the_laptop_reaches_the_login_nodes_sshd_and_nothing_else(cluster: SlurmCluster) -> None:
    assert cluster.laptop(["ssh", "login", "sinfo", "--noheader", "--format=%D"]).stdout.split() == ["3"]
    for address in (cluster.addresses["n1"], cluster.addresses["login"]):
        asked = cluster.laptop(
            ["python", "-c", f"import socket; socket.create_connection(({address!r}, 6818), 10)"]
        )
        assert "ConnectionRefusedError" in asked.stderr
    stranger = cluster.laptop(["ssh", "-o", "BatchMode=yes", "bob@login", "true"])
    assert "Permission denied (publickey)" in stranger.stderr


def test_a_job_starts_again_when_it_is_requeued(cluster: SlurmCluster) -> None:
    job = submit(cluster, STARTS, "--nodes=2", "--requeue", "--open-mode=append")
    cluster.wait("a start", lambda: len(starts(cluster)) == 1)
    cluster.scontrol("requeue", job)
    cluster.wait("a second start", lambda: len(starts(cluster)) == 2)
    assert starts(cluster) == ["n[1-2] 0", "n[1-2] 1"]


def test_a_node_that_lost_its_power_starts_again(cluster: SlurmCluster) -> None:
    submit(cluster, "#!/bin/sh\nexec sleep 600\n", "--nodelist=n3", "--no-requeue")
    cluster.wait("a start", lambda: bool(cluster.processes(3)))
    cluster.kill_node(3)
    cluster.wait("a node that is down", lambda: cluster.node_states()["n3"] == "down*")
    cluster.start_node(3)
    cluster.wait_until_idle()


def test_slurmd_and_slurmctld_end_and_start_under_a_job(cluster: SlurmCluster) -> None:
    job = submit(cluster, "#!/bin/sh\nexec sleep 600\n", "--nodelist=n2")
    cluster.wait("a start", lambda: any(one.name() == "sleep" for one in cluster.processes(2)))
    before = {one.pid for one in cluster.processes(2)}
    cluster.kill_slurmd(2)
    cluster.stop_controller()
    assert "Unable to contact slurm controller" in cluster.login(["squeue"]).stderr
    cluster.start_controller()
    cluster.start_slurmd(2)
    assert {one.pid for one in cluster.processes(2)} == before
    assert [(row.id, row.state) for row in cluster.jobs()] == [(job, "RUNNING")]


def test_nothing_is_left_of_a_cluster_whose_process_was_killed(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS_A_CLUSTER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout
    with holder.stdout:
        processes = [psutil.Process(int(pid)) for pid in holder.stdout.readline().split()]
    assert {"slurmctld", "munged", "slurmd", "sshd", "sleep"} <= {process.name() for process in processes}
    groups = {FREEZER / group for process in processes for group in LOOMS_GROUP.findall(groups_of(process))}
    assert bool(groups) == (missing_freezer() == "")
    holder.kill()
    holder.wait()
    assert still_there(processes) == []
    assert not any(group.exists() for group in groups)


def groups_of(process: psutil.Process) -> str:
    return Path(f"/proc/{process.pid}/cgroup").read_text()


def test_slurms_signals_reach_the_tasks_and_its_kill_whatever_they_left(cluster: SlurmCluster) -> None:
    if cluster.tracked_by != "cgroup":
        pytest.skip(missing_freezer())
    daemon = 'trap "echo TERM >>daemon" TERM; while :; do sleep 0.1; done'
    step = f"setsid sh -c '{daemon}' & trap 'echo TERM >>task; exit' TERM; while :; do sleep 0.1; done"
    job = submit(cluster, f"#!/bin/sh\nsrun sh -c {shlex.quote(step)}\n", "--nodelist=n1")
    home = cluster.homes / "ada"
    cluster.wait("a daemon", lambda: sum(one.name() == "sleep" for one in cluster.processes(1)) >= 2)
    cluster.login(["scancel", job]).check_returncode()
    cluster.wait_until_idle()
    assert ((home / "task").read_text(), (home / "daemon").exists()) == ("TERM\n", False)
    assert still_there(cluster.processes(1), 5.0) == []
