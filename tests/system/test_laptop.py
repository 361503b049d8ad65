"""A laptop with the base dependencies only, no torch and no torchmonarch, drives a cluster that has them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loom_proxy.local import LocalCluster
from tests.support.paths import ROOT

PROGRAM = """
import importlib.util
for name in ("torch", "monarch", "fastapi", "numpy"):
    assert importlib.util.find_spec(name) is None, name

import loom
from loom import Actor, current_rank, endpoint

class Unlucky(Exception):
    pass

class Counter(Actor):
    def __init__(self, start, other=None):
        self.n, self.other = start, other
    @endpoint
    def add(self, k):
        self.n += k
        return self.n
    @endpoint
    def rank(self):
        return dict(current_rank())
    @endpoint
    def fail(self):
        raise Unlucky("on purpose")
    @endpoint
    def sum_of_other(self):
        return sum(self.other.add.call(0).get().values())

with loom.connect() as job:
    procs = job.hosts.spawn_procs(per_host={"gpus": 2}, name="procs")
    counters = procs.spawn("counters", Counter, 10)
    values = counters.add.call(1).get()
    assert values.sizes == {"hosts": 2, "gpus": 2} and list(values.values()) == [11] * 4
    assert counters.slice(hosts=1, gpus=0).add.call_one(5).get() == 16
    assert counters.rank.call().get().item(hosts=1, gpus=1) == {"hosts": 1, "gpus": 1}
    holder = job.hosts.slice(hosts=0).spawn_procs().spawn("holder", Counter, 0, other=counters.slice(hosts=1))
    assert holder.sum_of_other.call_one().get() == 27
    try:
        counters.slice(hosts=0, gpus=0).fail.call_one().get()
    except loom.ActorError as error:
        assert isinstance(error.exception, Unlucky), error
    else:
        raise AssertionError("no error")
    try:
        counters.ad.call(1)
    except loom.EndpointNotFound as error:
        assert "did you mean 'add'" in str(error)
try:
    loom.local()
except loom.MissingDependency as error:
    assert "monarch-loom[gateway]" in str(error)
print("the laptop is done")
"""


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with nothing but `pip install monarch-loom`."""
    folder = tmp_path_factory.mktemp("laptop")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", ROOT]
    subprocess.run(install, check=True, cwd=folder)
    return python


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_laptop_without_torch_and_monarch_drives_a_cluster(
    laptop: Path, cluster: LocalCluster, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "LOOM_URL": cluster.url, "LOOM_TOKEN": cluster.token}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [laptop, program], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the laptop is done\n"


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_the_command_says_what_a_laptop_lacks(laptop: Path) -> None:
    command = [laptop.parent / "loom", "serve", "worker", "--address", "tcp://127.0.0.1:1234"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 4
    assert "monarch-loom[gateway]" in done.stderr
