"""``loom slurm``: an allocation from the login node and from a laptop, and nothing left of it after its end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from tests.support.needs import skipped_if
from tests.support.paths import ROOT
from tests.support.processes import still_there
from tests.support.slurm import SlurmCluster, missing
from tests.support.slurm.host import inner
from tests.system.slurm.researcher import PROGRAMS, VIA, Researcher, folder_of, loom, up

pytestmark = [skipped_if(missing()), pytest.mark.slow, pytest.mark.timeout(400)]

DIGITS = ROOT / "tests/support/cluster/programs/digits.py"

WAYS = pytest.mark.parametrize(
    ("host", "via", "address"),
    [("login", (), "slurm://digits"), ("laptop", VIA, "slurm://login/digits")],
)


@WAYS
def test_the_demos_training_runs_in_an_allocation(
    cluster: SlurmCluster, host: str, via: tuple[str, ...], address: str
) -> None:
    assert up(cluster, "--nodes", "3", "--name", "digits", *via, host=host) == address
    environment = {"LOOM_URL": address, "CHECKPOINTS": f"/home/ada/checkpoints-{host}"}
    with Researcher(cluster, DIGITS, "url", host=host, environment=environment) as researcher:
        assert researcher.until("open")["hosts"] == 3
        assert researcher.until("demo")["accuracy"] > 0.95
        researcher.until("closed")
    processes = [process for number in (1, 2, 3) for process in cluster.processes(number)]
    assert len(processes) > 6  # steps, node programs, workers, the gateway and its weaver
    ended = loom(cluster, "slurm", "down", "digits", *via[:2], host=host)
    assert ended.returncode == 0, ended.stderr
    assert still_there(processes, 10.0) == []
    assert cluster.jobs() == []


def test_an_allocation_is_listed_and_its_logs_are_shown(cluster: SlurmCluster) -> None:
    address = up(cluster, "--nodes", "2")
    (job,) = cluster.jobs()
    assert address == f"slurm://loom-{job.id}"
    assert (job.name, job.state, job.nodes) == (f"loom-{job.id}", "RUNNING", "n[1-2]")

    (listed,) = json.loads(loom(cluster, "slurm", "list", "--json").stdout)["allocations"]
    assert listed["name"] == job.name
    assert job.id in str(listed)
    told = loom(cluster, "slurm", "status", job.name, "--via", "ssh://login", host="laptop")
    assert told.returncode == 0, told.stderr
    assert "n[1-2]" in told.stdout
    logs = loom(cluster, "slurm", "logs", job.name)
    assert logs.returncode == 0, logs.stderr
    assert "n1" in logs.stdout
    assert "n2" in logs.stdout

    assert loom(cluster, "slurm", "down", job.name).returncode == 0
    assert json.loads(loom(cluster, "slurm", "list", "--json").stdout)["allocations"] == []
    again = loom(cluster, "slurm", "down", job.name)
    assert (again.returncode, cluster.jobs()) == (0, [])


def test_a_job_of_the_api_ends_the_allocation_that_it_submitted(cluster: SlurmCluster) -> None:
    for host, via in (("login", ""), ("laptop", f", via='ssh://login', venv={sys.prefix!r}")):
        program = (
            "import loom\n"
            f"with loom.SlurmJob(nodes=2{via}) as job:\n"
            "    print(job.state().workers.extent.nelements, job.run(lambda: __import__('socket').gethostname()))\n"
        )
        done = cluster.hosts[host].run([sys.executable, "-c", program], "ada")
        assert done.stdout.split()[-2:] == ["2", "n1"], done.stdout + done.stderr
        assert cluster.jobs() == []


def test_an_allocation_is_submitted_from_inside_a_job_that_asked_for_something_else(cluster: SlurmCluster) -> None:
    program = "import loom\nwith loom.SlurmJob() as job:\n    print(job.run(lambda: __import__('os').getpid()))\n"
    outer = ["salloc", "--ntasks=2", "--gpus-per-task=1", "--cpus-per-task=2", "--mem-per-cpu=200"]
    for step in ([], ["srun", "--ntasks=1", "--overlap"]):
        done = cluster.login([*outer, *step, sys.executable, "-c", program])
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip().isdecimal()
    cluster.wait("the end of the outer job", lambda: cluster.jobs() == [])


def test_an_allocation_is_used_from_inside_another_job(cluster: SlurmCluster) -> None:
    address = up(cluster, "--nodes", "1")
    ledger = ["srun", "--nodes=1", sys.executable, str(PROGRAMS / "ledger.py"), address, "100"]
    done = cluster.login(ledger)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert told[-2:] == [{"event": "ledger", "numbers": list(range(100))}, {"event": "closed"}], done.stderr


def refused(cluster: SlurmCluster, *options: str, **where: str) -> str:
    done: subprocess.CompletedProcess[str] = loom(cluster, "slurm", "up", *options, **where)  # type: ignore[arg-type]
    assert done.returncode != 0
    assert done.stdout == ""
    return done.stderr


def test_what_slurm_refuses_is_told_in_its_words(cluster: SlurmCluster) -> None:
    assert "invalid partition" in refused(cluster, "--partition", "none")
    assert "never starts" in refused(cluster, "--partition", "short", "--time", "10")
    assert cluster.jobs() == []


def test_what_it_waits_for_is_told_and_ctrl_c_ends_the_wait_and_the_job(cluster: SlurmCluster) -> None:
    command = ["loom", "slurm", "up", "--partition", "closed"]
    waiting = cluster.hosts["login"].popen(command, "ada", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert waiting.stderr
    for line in waiting.stderr:
        if "PartitionDown" in line:
            break
    inner(waiting).send_signal(signal.SIGINT)
    out, told = waiting.communicate(timeout=60.0)
    assert (waiting.returncode, out) == (1, ""), told
    assert cluster.jobs() == []


def test_a_name_that_lives_is_refused_and_one_that_has_ended_is_free(cluster: SlurmCluster) -> None:
    up(cluster, "--name", "mine")
    (job,) = cluster.jobs()
    assert job.id in refused(cluster, "--name", "mine")
    assert [row.id for row in cluster.jobs()] == [job.id]
    assert loom(cluster, "slurm", "down", "mine").returncode == 0
    up(cluster, "--name", "mine")


def test_a_home_without_room_is_told_and_submits_nothing(cluster: SlurmCluster) -> None:
    small = "mount -t tmpfs -o size=64k,uid=20001 tmpfs /mnt && dd if=/dev/zero of=/mnt/full 2>/dev/null; true"
    cluster.login(["sh", "-c", small], "root").check_returncode()
    try:
        told = loom(cluster, "slurm", "up", environment={"LOOM_SLURM_FOLDER": "/mnt/loom"})
        assert (told.returncode, told.stdout) == (1, "")
        assert "No space left" in told.stderr
        assert cluster.jobs() == []
    finally:
        cluster.login(["umount", "/mnt"], "root")


def test_a_laptop_without_a_key_is_told_what_is_wrong(cluster: SlurmCluster) -> None:
    assert "Permission denied" in refused(cluster, "--via", "ssh://bob@login", host="laptop")
    assert "nowhere" in refused(cluster, "--via", "ssh://nowhere", host="laptop")


def test_a_neighbour_learns_no_token_and_joins_no_session(cluster: SlurmCluster) -> None:
    address = up(cluster, "--nodes", "1", "--name", "hers")
    folder = folder_of(cluster, address)
    token = (folder / "token").read_text().strip()
    seen = f"/home/ada/.loom/slurm/{folder.name}"

    def bob(*command: str) -> subprocess.CompletedProcess[str]:
        """On the node that has the gateway."""
        return cluster.node(1).run(list(command), "bob")

    for file in ("token", "gateway.json", "spec.json", "state", ""):
        assert "Permission denied" in bob("ls", "-la", f"{seen}/{file}").stderr
    (job,) = cluster.jobs()
    shown = [
        ["scontrol", "show", "job", job.id],
        ["scontrol", "show", "step", job.id],
        ["scontrol", "write", "batch_script", job.id, "-"],
        ["squeue", "--json"],
        ["sh", "-c", "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ"],
    ]
    told = "".join(done.stdout for done in (bob(*command) for command in shown))
    assert job.name in told
    assert token not in told
    for user in ("ada", "bob"):  # a process's owner sees its environment: the token is not there either
        done = cluster.node(1).run(["sh", "-c", "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ"], user)
        assert token not in done.stdout

    assert json.loads(loom(cluster, "slurm", "list", "--json", user="bob").stdout)["allocations"] == []
    gateway = json.loads((folder / "gateway.json").read_text())
    for join in (
        f"loom.connect('{address}')",
        f"loom.connect('ws://{gateway['host']}:{gateway['port']}', 'guess')",
    ):
        done = bob(sys.executable, "-c", f"import os, loom; os.environ['LOOM_INSECURE'] = '1'; {join}")
        assert done.returncode == 1
        assert any(word in done.stderr for word in ("loom.errors.NotFound", "AuthenticationError")), done.stderr
