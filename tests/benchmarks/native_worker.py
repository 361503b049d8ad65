"""``python -m tests.benchmarks.native_worker ADDRESS``: Monarch's own worker loop, with nothing of Loom around it.

Ends when its standard input is closed.
"""

from __future__ import annotations

import os
import sys
import threading


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    from monarch.actor import run_worker_loop_forever

    from loom_gateway.workers.monarch_env import service_address

    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()
    run_worker_loop_forever(address=service_address(sys.argv[1]), ca="trust_all_connections")
