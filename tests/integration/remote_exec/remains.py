"""What is left of processes on ranks."""

from __future__ import annotations

import psutil

from tests.support.gateways import await_true


def await_gone(pid: int) -> None:
    """Wait until a process runs no more. Without an init, nobody collects the status of an orphan."""
    await_true(lambda: not _runs(pid))


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
