"""Start a cluster with Slurm on this machine and say how to use it, until Ctrl-C."""

from __future__ import annotations

import argparse
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.by_hand import hold
from tests.support.slurm import SlurmCluster, missing


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.slurm", description=__doc__)
    parser.add_argument("--nodes", type=int, default=3, help="hosts with a slurmd")
    parser.add_argument("--kill-wait", type=int, default=10, help="seconds from SIGTERM to SIGKILL")
    options = parser.parse_args()

    @contextmanager
    def make() -> Iterator[SlurmCluster]:
        with (
            tempfile.TemporaryDirectory(prefix="loom-slurm-") as folder,
            SlurmCluster(Path(folder), options.nodes, options.kill_wait) as cluster,
        ):
            yield cluster

    hold(missing(), make, tell)


def tell(cluster: SlurmCluster) -> None:
    print(f"files and logs: {cluster.folder}")
    print(f"processes:      tracked by {cluster.tracked_by}")
    print(f"homes:          {cluster.homes} (in the cluster), {cluster.laptop_homes} (on the laptop)")
    for name, host in cluster.hosts.items():
        for user in ("root",) if name == "control" else ("ada", "bob") if name == "login" else ("ada",):
            print(f"# a shell of {user} on {name}:\n{shlex.join(host.command(['bash'], user))}")
    print("# on the laptop: ssh login squeue")


if __name__ == "__main__":
    main()
