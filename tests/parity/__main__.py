"""``python -m tests.parity [SCRIPT…]``: exit code 0 if all agree."""

from __future__ import annotations

import argparse
import sys

from loom_proxy.local import LocalCluster
from tests.parity.harness import SIDES, compare
from tests.parity.scripts import SCRIPTS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help="names, or parts of names; all without any")
    parser.add_argument("--with-monarch", action="store_true", help="let the laptop's side find torchmonarch")
    parser.add_argument("-v", "--verbose", action="store_true", help="print those that agree, too")
    parser.add_argument("--side", choices=SIDES, action="append", help="compare this side only; both without it")
    options = parser.parse_args()
    sides = options.side or list(SIDES)
    names = [name for name in SCRIPTS if not options.scripts or any(part in name for part in options.scripts)]
    agreed = dict.fromkeys(sides, 0)
    with LocalCluster(hosts=2) as cluster:
        for verdict in compare(cluster, names, not options.with_monarch, sides):
            where = SIDES[verdict.side]
            if verdict.disagreement is None:
                agreed[verdict.side] += 1
                if options.verbose:
                    print(f"agrees {where}: {verdict.script} ({verdict.seconds:.1f} s)", flush=True)
            else:
                print(f"{verdict.script} disagrees {where} at {verdict.disagreement}", flush=True)
    for side, count in agreed.items():
        print(f"{count} of {len(names)} agree {SIDES[side]}")
    return 0 if set(agreed.values()) == {len(names)} else 1


if __name__ == "__main__":
    sys.exit(main())
