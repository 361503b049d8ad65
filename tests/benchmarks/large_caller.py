"""Moves large tensors, and makes small calls meanwhile; run with the argument ``loom`` or ``native``."""

# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from loom_gateway.workers.monarch_env import set_monarch_environment

set_monarch_environment()  # before Monarch is imported

from loom import Actor, endpoint  # noqa: E402
from tests.benchmarks.caller import serve  # noqa: E402


class Store(Actor):
    """Takes, keeps and gives large tensors."""

    def __init__(self) -> None:
        self.kept: Any = None

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def make(self, numbers: int) -> None:
        import torch

        self.kept = torch.ones(numbers)

    @endpoint
    def give(self) -> Any:
        return self.kept

    @endpoint
    def take(self, value: Any) -> int:
        return len(value)


class Control(Actor):
    """Answers small calls, in a process of its own."""

    def __init__(self) -> None:
        self.number = 0

    @endpoint
    def add(self, amount: int) -> int:
        self.number += amount
        return self.number

    @endpoint
    def answer_after(self, seconds: float) -> float:
        from monarch.actor import current_rank

        seconds *= current_rank().rank
        time.sleep(seconds)
        return seconds


class LargeCaller:
    """Calls actors of two processes: one for large data, one for small calls."""

    def __init__(self, procs: Any, close: Callable[[], None]) -> None:
        self._store = procs.slice(hosts=0, gpus=0).spawn("store", Store)
        self._control = procs.slice(hosts=0, gpus=1).spawn("control", Control)
        self._all = procs.spawn("all", Control)
        self._made = 0
        self.close = close

    def echo(self, size: int, count: int) -> list[float]:
        """Send a float32 tensor of ``size`` bytes and receive it back; seconds of each."""
        sent = torch.ones(size // 4)
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            echoed = self._store.echo.call_one(sent).get()
            seconds.append(time.perf_counter() - start)
            assert echoed.shape == sent.shape
            del echoed
        return seconds

    def idle(self, count: int) -> list[float]:
        """Seconds of ``count`` small calls, one after the other, while nothing else moves."""
        return [self._small_call() for _ in range(count)]

    def meanwhile(self, way: str, size: int) -> dict[str, Any]:
        """Seconds of each small call while ``size`` bytes go ``there``, ``back`` or are echoed (``both``).

        Also what the gateway's memory grew by at its peak, in bytes; 0 where there is no gateway.
        """
        sent = torch.ones(size // 4) if way != "back" else None
        if way == "back" and self._made != size:
            self._store.make.call_one(size // 4).get()
            self._made = size
        gateway = _gateway()
        before = _forget_peak(gateway)
        moved = threading.Event()
        if way == "there":
            moving = self._store.take.call_one(sent)
        elif way == "back":
            moving = self._store.give.call_one()
        else:
            moving = self._store.echo.call_one(sent)

        def wait() -> None:
            moving.get()
            moved.set()

        threading.Thread(target=wait, name="waits", daemon=True).start()
        seconds = []
        while not moved.is_set():
            seconds.append(self._small_call())
        return {"seconds": seconds, "gateway_peak": _peak(gateway) - before}

    def stream(self, step: float) -> dict[str, float]:
        """Seconds until the first and the last result of actors that take 0, 1, … times ``step`` seconds."""
        start = time.perf_counter()
        arrived = []
        for future in self._all.answer_after.stream(step):
            future.get()
            arrived.append(time.perf_counter() - start)
        return {"first": arrived[0], "last": arrived[-1]}

    def _small_call(self) -> float:
        start = time.perf_counter()
        self._control.add.call_one(1).get()
        return time.perf_counter() - start


def _gateway() -> int | None:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # one that has just ended has no command
            if "loom_gateway" in process.cmdline():
                return process.pid
    return None


def _memory(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def _forget_peak(pid: int | None) -> int:
    if pid is None:
        return 0
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _memory(pid, "VmRSS")


def _peak(pid: int | None) -> int:
    return 0 if pid is None else _memory(pid, "VmHWM")


def through_loom() -> LargeCaller:
    import loom

    job = loom.local(hosts=1)
    return LargeCaller(job.hosts.spawn_procs(per_host={"gpus": 2}, name="procs"), job.close)


def natively() -> LargeCaller:
    from tests.benchmarks.native_procs import native_procs

    return LargeCaller(*native_procs(gpus=2))


CALLERS = {"loom": through_loom, "native": natively}

if __name__ == "__main__":
    serve(CALLERS[sys.argv[1]])  # type: ignore[arg-type]
