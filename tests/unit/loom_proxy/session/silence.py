"""A connection that nothing comes from."""

from __future__ import annotations

from loom_proxy.session.read_loop import ReadLoop


class Silence:
    """Not a connection: all that a future asks of one, to send and to read, and nothing is ever sent or comes."""

    def __init__(self) -> None:
        self.flushes = 0
        self.read_loop = ReadLoop(self)

    def flush(self) -> None:
        self.flushes += 1

    def fileno(self) -> int:
        return -1

    def read(self, wait: bool) -> bool:
        raise AssertionError("nobody can read from this")

    away = False

    def reconnect(self) -> bool:
        raise AssertionError("it was never away")
