"""``python -m tests.parity [SCRIPT…]``: exit code 0 if all agree."""

from __future__ import annotations

import argparse
import sys

from loom_proxy.local import LocalCluster
from tests.parity.harness import compare
from tests.parity.scripts import SCRIPTS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help="names, or parts of names; all without any")
    parser.add_argument("--with-monarch", action="store_true", help="let the laptop's side find torchmonarch")
    parser.add_argument("-v", "--verbose", action="store_true", help="print those that agree, too")
    options = parser.parse_args()
    names = [name for name in SCRIPTS if not options.scripts or any(part in name for part in options.scripts)]
    agreed = 0
    with LocalCluster(hosts=2) as cluster:
        for verdict in compare(cluster, names, bare=not options.with_monarch):
            if verdict.disagreement is None:
                agreed += 1
                if options.verbose:
                    print(f"agrees: {verdict.script} ({verdict.seconds:.1f} s)", flush=True)
            else:
                print(f"{verdict.script} disagrees at {verdict.disagreement}", flush=True)
    print(f"{agreed} of {len(names)} agree")
    return 0 if agreed == len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
