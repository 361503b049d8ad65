"""Start a cluster on this machine and say how to use it, until Ctrl-C."""

from __future__ import annotations

import argparse

from tests.support.by_hand import hold
from tests.support.cluster import OneMachineCluster, missing


def main() -> None:
    argparse.ArgumentParser(prog="python -m tests.support.cluster", description=__doc__).parse_args()
    hold(missing(), OneMachineCluster, tell)


def tell(cluster: OneMachineCluster) -> None:
    variables = " ".join(f"{name}={value}" for name, value in cluster.laptop.environment().items())
    print(f"nginx, from the laptop: {cluster.kt_api_url}")
    print(f"files and logs:         {cluster.folder}")
    print("a shell on the laptop (with kubectl, kt and loom):")
    print(f"  cd {cluster.laptop.home} && env -i TERM=$TERM {variables} \\")
    print(f"    nsenter --net=/run/netns/{cluster.prefix}laptop bash")
    print("a shell in a pod, by the process id of its first process:")
    print(f"  curl --unix-socket {cluster.folder}/controller.sock http://controller/cluster/pods")
    print("  nsenter --target PID --all bash")


if __name__ == "__main__":
    main()
