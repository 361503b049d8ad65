"""Listens on the port that it is given, and says so, as a worker and a gateway do."""

from __future__ import annotations

import signal
import sys

from loom.process.listen import announce, listen

if __name__ == "__main__":
    with listen("127.0.0.1", int(sys.argv[1])):
        announce()
        signal.pause()
