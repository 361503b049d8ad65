"""`Execution`: a command that runs on ranks."""

from __future__ import annotations

import contextlib
import queue
import signal as signals
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from loom.errors import LoomError, WaitTimeout, WrongArguments
from loom.process.threads import get_within
from loom_proxy.futures.future import FutureProxy
from loom_proxy.remote_exec.rank import RankProcess

PIECE = 256 << 10
"""Bytes of input in one message."""

GOODBYE = 2.0  # seconds to end the commands of an `Execution` that is left


class RankOutput(NamedTuple):
    """Output of a command on one rank."""

    rank: int
    stream: str
    """``stdout`` or ``stderr``."""
    data: bytes


@dataclass(frozen=True)
class Finished:
    """The end of a command on one rank."""

    rank: int
    status: int
    """The exit status; 128 and the signal's number for a command that a signal has ended."""
    stdout: bytes = b""
    stderr: bytes = b""


class Execution:
    """A command that runs on ranks of a mesh; see `ProcMeshProxy.exec`.

    A context manager that ends the command. `results` waits for its end; or `output` yields what it prints as it
    comes, and `finished` has how it ended. A command whose output nobody takes has to wait, as at a full pipe.
    """

    def __init__(
        self, processes: Sequence[RankProcess], command: Sequence[str], variables: Mapping[str, str], away: float
    ) -> None:
        self.ranks = tuple(process.rank for process in processes)
        """The ranks on which it runs."""
        self.finished: dict[int, Finished | LoomError] = {}
        """Its end by rank, or the reason why that is unknown; without its output."""
        self._processes = {process.rank: process for process in processes}
        self._answers: queue.SimpleQueue[tuple[int, str, FutureProxy[Any]]] = queue.SimpleQueue()
        self._heard: deque[RankOutput] = deque()  # arrived, and not taken yet
        self._handles: dict[int, FutureProxy[str]] = {}
        self._printed: dict[tuple[int, str], list[bytes]] = {}  # collected by `results` so far
        for process in processes:
            starting = self._handles[process.rank] = process.ask("exec", list(command), dict(variables), away)
            starting.add_done_callback(partial(self._answered, process.rank, "exec"))

    def output(self, timeout: float | None = None) -> Iterator[RankOutput]:
        """Yield what the command prints, as it comes, until it has ended on all ranks.

        Args:
            timeout: seconds after which `WaitTimeout` is raised. The command goes on, and this may be called again.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while self._heard or len(self.finished) < len(self.ranks):
            if self._heard:
                yield self._heard.popleft()
                continue
            try:
                left = None if until is None else max(0.0, until - time.monotonic())
                rank, operation, answer = get_within(self._answers, left)
            except queue.Empty:
                going_on = sorted(self._processes.keys() - self.finished.keys())
                raise WaitTimeout(f"the command has not ended within {timeout:g} s on ranks {going_on}") from None
            self._take(rank, operation, answer)

    def results(self, timeout: float | None = None) -> list[Finished]:
        """Wait until the command has ended on all ranks; return how, with all that it has printed, by rank.

        Raises:
            WaitTimeout: it has not within ``timeout`` seconds. It goes on, and this may be called again.
            NotFound: it cannot be started on a rank.
            SupervisionError: a rank's process is gone, and with it the command.
        """
        for rank, stream, data in self.output(timeout):
            self._printed.setdefault((rank, stream), []).append(data)
        found = []
        for rank in self.ranks:
            one = self.finished[rank]
            if isinstance(one, LoomError):
                raise one
            printed = (b"".join(self._printed.get((rank, stream), ())) for stream in ("stdout", "stderr"))
            found.append(Finished(rank, one.status, *printed))
        return found

    @property
    def status(self) -> int | None:
        """The highest exit status of all ranks; None while it runs on one, or if it is not known of one."""
        known = [one.status for one in self.finished.values() if isinstance(one, Finished)]
        return max(known) if len(known) == len(self.ranks) else None

    def write(self, data: bytes) -> None:
        """Give the command input on all ranks, when they have room for it. `close_input` ends it."""
        for start in range(0, len(data), PIECE):
            waiting = set(self._running())
            while waiting:
                asked = {rank: self._ask(rank, "write", data[start : start + PIECE]) for rank in waiting}
                waiting = {rank for rank, taken in asked.items() if _answer(taken) is False}

    def close_input(self) -> None:
        """End the input of the command on all ranks."""
        for asked in [self._ask(rank, "write", None) for rank in self._running()]:
            _answer(asked)

    def signal(self, number: int = signals.SIGINT) -> None:
        """Send a signal to the command on all ranks, and to the processes that it has started."""
        if number not in set(signals.Signals):
            raise WrongArguments(f"there is no signal {number!r:.20}")
        for asked in [self._ask(rank, "signal", int(number)) for rank in self._running()]:
            _answer(asked)

    def end(self) -> None:
        """End the command on all ranks, with the processes that it has started."""
        for asked in [self._ask(rank, "end") for rank in self._running()]:
            _answer(asked)

    def __enter__(self) -> Execution:
        return self

    def __exit__(self, *error: object) -> None:
        # If the line is down, or the connection over, the driver ends the command by itself.
        with contextlib.suppress(LoomError):
            for asked in [self._ask(rank, "end") for rank in self._running()]:
                asked.get(GOODBYE)

    def _running(self) -> list[int]:
        """Return the ranks where it has not ended, as far as this program knows. Wait until it has begun."""
        return [
            rank
            for rank, handle in self._handles.items()
            if rank not in self.finished and handle.exception() is None
        ]

    def _ask(self, rank: int, operation: str, *arguments: Any) -> FutureProxy[Any]:
        return self._processes[rank].ask(operation, self._handles[rank].get(), *arguments)

    def _hear(self, rank: int) -> None:
        self._ask(rank, "hear").add_done_callback(partial(self._answered, rank, "hear"))

    def _answered(self, rank: int, operation: str, answer: FutureProxy[Any]) -> None:
        self._answers.put((rank, operation, answer))

    def _take(self, rank: int, operation: str, answer: FutureProxy[Any]) -> None:
        try:
            value = answer.get()
            if operation == "exec":
                self._hear(rank)
                return
            pieces, end = value
            if end is None:
                self._hear(rank)
            else:
                status, problem = end
                self.finished[rank] = Finished(rank, status) if status is not None else LoomError(problem)
        except LoomError as error:
            self.finished[rank] = error
            return
        self._heard.extend(RankOutput(rank, stream, data) for stream, data in pieces)


def _answer(asked: FutureProxy[Any]) -> Any:
    """Return the answer; None if the command has ended meanwhile."""
    with contextlib.suppress(LoomError):
        return asked.get()
    return None
