"""Monarch without Loom: a root client attached to one worker, both on this machine.

The argument ``tuned`` gives it Loom's worker and Loom's settings; without it Monarch is as it comes. ``crowd``
spawns many actors more.
"""

from __future__ import annotations

import sys

from tests.benchmarks.caller import MeshCaller, serve
from tests.benchmarks.counter import counter_class
from tests.benchmarks.native_procs import native_hosts


def make_caller() -> MeshCaller:
    hosts, end = native_hosts(tuned="tuned" in sys.argv)
    from monarch.actor import Actor, endpoint

    return MeshCaller.on(hosts, counter_class(Actor, endpoint), end, crowd="crowd" in sys.argv)


if __name__ == "__main__":
    serve(make_caller)
