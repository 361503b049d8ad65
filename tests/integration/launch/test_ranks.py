"""``loom run --on``: the places of its ranks, their folder, and the end of all with the first that fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from loom_proxy.local import LocalCluster
from tests.support.gateways import BOUND

PLACE = """
import os, signal, sys, time
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOOM_RUN_ID")
print(*(os.environ[name] for name in names), os.environ["MASTER_PORT"].isdecimal(), *sys.argv[1:])
import brought
if brought.value != os.environ["RANK"]:
    open("begun" + os.environ["RANK"], "w").close()
    signal.pause()
for rank in "012":
    while not os.path.exists("begun" + rank):  # the hosts are one machine here
        time.sleep(0.01)
    os.unlink("begun" + rank)
open("written", "w").write("by the run")
print(os.getcwd())
sys.exit(7)
"""


def test_ranks_have_torchrun_s_places_and_the_first_failure_ends_all(cluster: LocalCluster, tmp_path: Path) -> None:
    (tmp_path / "place.py").write_text(PLACE)
    (tmp_path / "brought.py").write_text("value = '3'\n")
    loom = str(Path(sys.executable).with_name("loom"))
    where = ["--on", cluster.url, "--hosts", "2", "--per-host", "gpus=2"]
    asked = {**os.environ, "LOOM_TOKEN": cluster.token}
    asked.pop("LOOM_RUN_ID", None)
    done = subprocess.run(
        [loom, "run", *where, "place.py", "--an", "argument"],
        cwd=tmp_path,
        env=asked,
        capture_output=True,
        text=True,
        timeout=2 * BOUND,
    )

    id = done.stderr.partition("loom run: run ")[2].split()[0]
    assert (done.returncode, done.stderr.splitlines()[-1]) == (7, "loom run: rank 3 ended with 7"), done.stderr
    assert f"/#/runs/{id}" in done.stderr
    *places, folder = sorted(done.stdout.splitlines(), key=lambda line: ("/" in line, line))
    assert places == [f"[{rank}] {rank} {rank % 2} 4 2 {id} True --an argument" for rank in range(4)]
    left = Path(folder.removeprefix("[3] "))
    assert [(path.name, path.read_text()) for path in left.iterdir()] == [("written", "by the run")]
    (left / "written").unlink()
    left.rmdir()
