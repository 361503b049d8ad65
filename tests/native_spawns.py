"""``python -m tests.native_spawns COUNT``: what spawning costs a worker's memory without Loom, with Monarch alone.

A root client spawns and stops a process and an actor again and again on a worker of Monarch's own. Prints by how
many bytes the worker has grown a spawn.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil

from tests.benchmarks.native_procs import free_port

WARM_UP = 16

WORKER = """
import sys
from monarch.actor import ChannelTransport, enable_transport, run_worker_loop_forever

enable_transport(ChannelTransport.TcpWithLocalhost)
run_worker_loop_forever(address=sys.argv[1], ca="trust_all_connections")
"""

BOUND = 60.0


def main(count: int) -> None:
    from monarch.actor import ChannelTransport, attach_to_workers, enable_transport

    from tests.actors import Counter

    port = free_port()
    address = f"tcp://127.0.0.1:{port}"
    nothing = subprocess.DEVNULL
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, address], stdin=nothing, stdout=nothing, stderr=nothing
    )
    try:
        process = psutil.Process(worker.pid)
        deadline = time.monotonic() + BOUND
        while not any(connection.laddr.port == port for connection in process.net_connections("tcp")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        enable_transport(ChannelTransport.TcpWithLocalhost)
        hosts = attach_to_workers(ca="trust_all_connections", workers=[address], name="hosts")
        sizes = []
        for number in range(WARM_UP + count):
            if number == WARM_UP:
                sizes.append(process.memory_info().rss)
            procs = hosts.spawn_procs(per_host={"gpus": 1})
            procs.spawn("counter", Counter, number).add.call(1).get(timeout=BOUND)
            procs.stop().get(timeout=BOUND)
        sizes.append(process.memory_info().rss)
        print((sizes[1] - sizes[0]) // count)
    finally:
        worker.kill()
        worker.wait()


if __name__ == "__main__":
    main(int(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # Monarch's threads may keep a root client
