"""Start a cluster on this machine and say how to use it, until Ctrl-C."""

from __future__ import annotations

import argparse
import os
import signal
import sys

from tests.support.cluster import OneMachineCluster, missing


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.cluster", description=__doc__)
    parser.parse_args()
    if reason := missing():
        sys.exit(f"error: {reason}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with OneMachineCluster() as cluster:
        variables = " ".join(f"{name}={value}" for name, value in cluster.laptop.environment().items())
        print(f"nginx, from the laptop: {cluster.kt_api_url}")
        print(f"files and logs:         {cluster.folder}")
        print("a shell on the laptop (with kubectl, kt and loom):")
        print(f"  cd {cluster.laptop.home} && env -i TERM=$TERM {variables} \\")
        print(f"    nsenter --net=/run/netns/{cluster.prefix}laptop bash")
        print("a shell in a pod, by the process id of its first process:")
        print(f"  curl --unix-socket {cluster.folder}/controller.sock http://controller/cluster/pods")
        print("  nsenter --target PID --all bash")
        print(f"Ctrl-C ends it (process {os.getpid()}).", flush=True)
        try:
            signal.pause()
        except KeyboardInterrupt:
            print("ending", flush=True)


if __name__ == "__main__":
    main()
