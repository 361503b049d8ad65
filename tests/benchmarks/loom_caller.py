"""The same calls through Loom: `loom.local` with one host, all of it on this machine.

The argument ``http`` has it take that transport, and ``crowd`` spawns many actors more.
"""

from __future__ import annotations

import os
import sys

import loom
from loom import Actor, endpoint
from tests.benchmarks.caller import MeshCaller, serve
from tests.benchmarks.counter import counter_class


def make_caller() -> MeshCaller:
    job = loom.local(hosts=1)
    return MeshCaller.on(job.hosts, counter_class(Actor, endpoint), job.close, crowd="crowd" in sys.argv)


if __name__ == "__main__":
    os.environ["LOOM_TRANSPORT"] = "http" if "http" in sys.argv else "websocket"
    serve(make_caller)
