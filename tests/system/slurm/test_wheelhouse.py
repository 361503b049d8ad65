"""``--wheelhouse``: nodes that make their environment of a folder of wheels on the shared home."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.needs import skipped_if
from tests.support.package_index import build_wheel
from tests.support.paths import ROOT
from tests.support.slurm import SlurmCluster, missing
from tests.system.slurm.researcher import loom, up

pytestmark = [skipped_if(missing()), pytest.mark.slow, pytest.mark.timeout(500)]

CACHE = "/tmp/loom-cache-20001/environments"


def make_wheelhouse(folder: Path) -> None:
    """Make a wheelhouse with Loom's real files; its dependencies, which are large, stay where they are."""
    parts = [ROOT / "loom" / "loom", ROOT / "gateway" / "loom_gateway", ROOT / "proxy" / "loom_proxy"]
    files = {str(path.relative_to(part.parent)): path.read_text() for part in parts for path in part.rglob("*.py")}
    build_wheel(folder, version("monarch-loom"), "monarch_loom", files)
    packages = "".join(f"{path}\n" for path in sys.path if path.endswith("-packages"))
    build_wheel(folder, "1.0", "dependencies", {"dependencies.pth": packages})


def test_nodes_make_their_environment_once_and_a_wheel_that_does_not_fit_is_named(cluster: SlurmCluster) -> None:
    make_wheelhouse(cluster.homes / "ada" / "wheels")
    for _ in range(2):
        up(cluster, "--nodes", "2", "--name", "mine", "--wheelhouse", "wheels")
        programs = [one.cmdline()[0] for number in (1, 2) for one in cluster.processes(number) if one.cmdline()]
        assert len([program for program in programs if program.startswith(CACHE)]) >= 5
        assert loom(cluster, "slurm", "down", "mine").returncode == 0
    for number in (1, 2):
        made = cluster.node(number).run(["ls", CACHE], "ada").stdout.split()
        assert [name.partition(".")[2] for name in made] == ["", "lock"]

    tag = "py3-none-manylinux_2_99_x86_64"
    build_wheel(cluster.homes / "ada" / "wheels", "9.0", "torch", tag=tag)
    refused = loom(cluster, "slurm", "up", "--nodes", "2", "--wheelhouse", "wheels")
    assert refused.returncode == 1
    assert f"torch-9.0-{tag}.whl in /home/ada/wheels does not fit n1: it needs glibc 2.99" in refused.stderr
    nothing = loom(cluster, "slurm", "up", "--wheelhouse", ".ssh")
    assert ".ssh on this machine has no wheel of monarch-loom" in nothing.stderr
