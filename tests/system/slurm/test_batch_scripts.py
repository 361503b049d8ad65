"""``srun loom run`` in a batch script: its ranks report to the gateway that their user holds in Slurm."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support.needs import skipped_if
from tests.support.slurm import SlurmCluster, missing
from tests.system.slurm.researcher import PROGRAMS, folder_of, loom, up

pytestmark = [skipped_if(missing()), pytest.mark.slow, pytest.mark.timeout(500)]

SCRIPT = f"""#!/bin/sh
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=batch.log
export MASTER_PORT=29400
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun loom run --name digits -- python {PROGRAMS / "train.py"}
"""

TRAINS = 300.0
"""Seconds until four ranks have imported torch and train, also on a busy machine."""


def run_of(cluster: SlurmCluster, url: str = "slurm://watch") -> dict[str, Any]:
    """The only run."""
    done = loom(cluster, "runs", "list", "--url", url, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["runs"]
    assert len(found) <= 1, found
    return found[0] if found else {"state": "none", "ranks": 0, "step": None}


def sections(cluster: SlurmCluster) -> list[list[int]]:
    """The steps of each section of the run's curve."""
    command = [sys.executable, str(PROGRAMS / "curve.py"), "slurm://watch", "digits", "learning_rate"]
    done = cluster.login(command)
    assert done.returncode == 0, done.stderr
    found: list[list[int]] = json.loads(done.stdout)
    return found


def test_the_ranks_of_a_step_are_one_run_with_one_curve_also_after_a_requeue(cluster: SlurmCluster) -> None:
    up(cluster, "--gateway-only", "--name", "watch")
    job = cluster.login(["sbatch", "--parsable"], input=SCRIPT).stdout.strip()
    cluster.wait("four ranks that train", lambda: trains(cluster), TRAINS)
    before = run_of(cluster)
    assert (before["id"], before["name"]) == (f"slurm-{job}-0", "digits")
    status = json.loads(loom(cluster, "status", "--url", "slurm://watch", "--json").stdout)
    cohort = {one["id"]: one["cohort"] for one in status["replicas"]}
    assert {name: one["rank"] for name, one in cohort.items()} == {f"digits_{rank}": rank for rank in range(4)}
    assert len({one["id"] for one in cohort.values()}) == 1

    cluster.login(["scontrol", "requeue", job]).check_returncode()
    trained = cluster.homes / "ada" / "trained-1"
    cluster.wait("ranks that train again", trained.exists, TRAINS)
    (cluster.homes / "ada" / "enough").touch()
    cluster.wait("a run that has ended", lambda: run_of(cluster)["state"] != "running", TRAINS)
    after = run_of(cluster)
    assert (after["id"], after["name"], after["ranks"]) == (before["id"], "digits", 4)
    # A loop without a library counts its steps in each start anew. Ranks that begin later begin sections, too.
    assert [steps[0] for steps in sections(cluster)].count(1) == 2


def trains(cluster: SlurmCluster) -> bool:
    run = run_of(cluster)
    return run["state"] == "running" and run["ranks"] == 4 and (run["step"] or 0) > 20


def test_a_gateway_in_slurm_is_closed_to_other_users(cluster: SlurmCluster) -> None:
    address = up(cluster, "--gateway-only", "--name", "watch")
    facts = json.loads((folder_of(cluster, address) / "gateway.json").read_text())
    unknown = loom(cluster, "runs", "list", "--url", address, user="bob")
    assert (unknown.returncode != 0, unknown.stdout) == (True, "")
    assert "there is no allocation 'watch'" in unknown.stderr
    refused = loom(cluster, "runs", "list", "--url", f"ws://{facts['host']}:{facts['port']}", user="bob")
    assert (refused.returncode != 0, refused.stdout) == (True, "")
    assert "token" in refused.stderr
    outside = srun(cluster, user="bob")
    assert (outside.returncode, outside.stdout) == (0, "it runs\n")
    assert "nothing to report to" in outside.stderr


def test_two_gateways_are_both_named_and_the_training_runs_without_them(cluster: SlurmCluster) -> None:
    up(cluster, "--gateway-only", "--name", "one")
    up(cluster, "--gateway-only", "--name", "two")
    done = srun(cluster)
    assert (done.returncode, done.stdout) == (0, "it runs\n")
    assert (
        "you have 2 gateways in Slurm, slurm://one and slurm://two: name one, such as by `export "
        "LOOM_URL=slurm://one` in the batch script"
    ) in done.stderr
    assert srun(cluster, environment={"LOOM_URL": "slurm://one"}).stderr == ""
    assert loom(cluster, "slurm", "down", "one").returncode == 0
    assert srun(cluster).stderr == ""


def srun(cluster: SlurmCluster, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command that does not train by ``srun loom run``."""
    return cluster.login(["srun", "loom", "run", "--", "echo", "it runs"], **options)
