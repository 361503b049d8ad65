"""The same calls through Loom: `loom.local` with one host, all of it on this machine.

An argument is the transport, ``websocket`` unless it is given.
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
    return MeshCaller.on(job.hosts, counter_class(Actor, endpoint), job.close)


if __name__ == "__main__":
    os.environ["LOOM_TRANSPORT"] = sys.argv[1] if len(sys.argv) > 1 else "websocket"
    serve(make_caller)
