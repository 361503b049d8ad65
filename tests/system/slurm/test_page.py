"""The commands and programs of ``docs/deploy/slurm.md``, one after the other as they stand there."""

from __future__ import annotations

import re
import shlex
import sys

import pytest

from tests.support.needs import skipped_if
from tests.support.paths import ROOT
from tests.support.slurm import SlurmCluster, missing
from tests.system.slurm.researcher import loom, name_of, up
from tests.system.slurm.test_wheelhouse import make_wheelhouse

pytestmark = [skipped_if(missing()), pytest.mark.slow, pytest.mark.timeout(1200)]

OURS = {
    "login.example.edu": "login",
    "/home/ada/venv": sys.prefix,
    "gpus-per-node=8": "gpus-per-node=2",
    "gpus-per-node 8": "gpus-per-node 2",
    "gpus_per_node=8": "gpus_per_node=2",
    '"gpus_per_node": 8': '"gpus_per_node": 2',
    '{"gpus": 8}': '{"gpus": 2}',
    "partition=cpu": "partition=main",
    "partition gpu": "partition main",
    "+2": "+1",
    "7-00:00:00": "1:00:00",
}
"""What the cluster of the tests has in the place of what the page says."""


def page() -> str:
    text = (ROOT / "docs" / "deploy" / "slurm.md").read_text()
    for theirs, ours in OURS.items():
        text = text.replace(theirs, ours)
    return text


def commands() -> list[list[str]]:
    """The page's commands of Loom: those of its blocks, and in its text those with all of their words."""
    found = re.findall(r"^loom [^#\n…]+(?=#|$)|(?<=`)loom (?:slurm up --|runs )[^`…]+(?=`)", page(), re.MULTILINE)
    return [shlex.split(command)[1:] for command in found]


def test_each_command_does_what_the_page_says(cluster: SlurmCluster) -> None:
    make_wheelhouse(cluster.homes / "ada" / "wheels")
    typed = commands()
    assert {words[1] for words in typed} == {"up", "list", "status", "logs", "down", "grow"}
    living = ""
    for words in typed:
        starts = words[2:] if words[1] == "up" else ["--nodes", "1", "--name", "mine"]
        needs = "watch" if "slurm://watch" in words else "mine"
        if living and (words[1] == "up" or living != needs):
            assert loom(cluster, "slurm", "down", living).returncode == 0
            living = ""
        if not living:
            living = name_of(up(cluster, *starts, host="laptop" if "--via" in starts else "login"))
        if words[1] != "up":
            done = loom(cluster, *words)
            assert done.returncode == 0, (words, done.stderr)
        if words[1] == "down":
            living = ""
    assert loom(cluster, "slurm", "down", living).returncode == 0
    assert cluster.jobs() == []


def test_each_program_does_what_the_page_says(cluster: SlurmCluster) -> None:
    programs = re.findall(r"^```python\n(.*?)^```", page(), re.MULTILINE | re.DOTALL)
    assert len(programs) == 5
    up(cluster, "--nodes", "1", "--name", "mine")
    for program in programs:
        if "SlurmJob" in program:
            assert loom(cluster, "slurm", "down", "mine").returncode == 0
        host = "laptop" if "login" in program else "login"
        ends = "" if "SlurmJob" in program else "print(job.hosts)\njob.close()\n"
        done = cluster.hosts[host].run([sys.executable, "-c", f"import loom\n{program}{ends}"], "ada")
        assert done.returncode == 0, (program, done.stderr)
    assert cluster.jobs() == []
