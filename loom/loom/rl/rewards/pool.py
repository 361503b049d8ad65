"""`RewardPool`: processes that judge completions, each call within a time limit.

A function that hangs, or that ends its process, loses its own call only: the process is killed with all that it has
started, and another one takes the calls that were left.
"""

from __future__ import annotations

import collections
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

import cloudpickle

from loom.errors import LoomError
from loom.process.child import python
from loom.rl.generation.interruptible_calls import LOOK_EVERY
from loom.rl.prompts import Prompt
from loom.rl.rewards.functions import Opinion, RewardCall, RewardFunction
from loom.rl.samples import Sample

START_TIMEOUT = 120.0
"""Seconds that a process has to import what the functions need."""
GRACE = 2.0
"""Seconds beyond the limit in which a process may say that a coroutine took too long."""
END_TIMEOUT = 5.0
"""Seconds that a process which answers no more has to end by itself."""
CHUNK = 32
"""The most calls that a process is given at a time."""


@dataclass(frozen=True)
class Reward:
    """The reward of a completion."""

    value: float | None
    """The weighted sum of the functions' numbers; None if a function failed, or none had an opinion."""
    parts: Mapping[str, float]
    """The functions' numbers, by name."""
    failure: str = ""
    """Why there is no value."""


class RewardPool:
    """Judges completions, for one thread.

    Args:
        functions: whose numbers are added up.
        processes: how many there are; they start with the first use, or with `start`.
        seconds: how long one call may take.
    """

    def __init__(self, functions: Sequence[RewardFunction], processes: int, seconds: float) -> None:
        self._functions = list(functions)
        self._seconds = seconds
        self._count = processes
        self._setup = pickle.dumps((seconds, list(sys.path), cloudpickle.dumps(self._functions)))
        self._workers: list[_Worker] = []

    def start(self) -> None:
        """Start the processes; return at once."""
        while len(self._workers) < self._count:
            self._workers.append(_Worker(self._setup))

    def judge(
        self, prompts: Sequence[Prompt], answers: Sequence[Sequence[Sample]], weights: Sequence[float]
    ) -> list[list[Reward]]:
        """Return the reward of each answer to each prompt.

        Args:
            weights: of the functions, in their order.

        Raises:
            LoomError: a process cannot load the functions.
        """
        calls, places = [], []
        for number, function in enumerate(self._functions):
            for at, (prompt, group) in enumerate(zip(prompts, answers, strict=True)):
                whole = [one for one, sample in enumerate(group) if not sample.failure]
                for part in [whole] if function.wants_all and whole else [[one] for one in whole]:
                    given = [group[one] for one in part]
                    calls.append(
                        RewardCall(number, prompt, [one.answer for one in given], [one.tokens for one in given])
                    )
                    places.append([(at, one) for one in part])
        found: list[list[list[Opinion]]] = [[[] for _ in group] for group in answers]
        for where, opinions in zip(places, self._run(calls), strict=True):
            for (at, one), opinion in zip(where, opinions, strict=True):
                found[at][one].append(opinion)
        return [
            [
                Reward(None, {}, sample.failure) if sample.failure else self._reward(opinions, weights)
                for sample, opinions in zip(group, known, strict=True)
            ]
            for group, known in zip(answers, found, strict=True)
        ]

    def _reward(self, opinions: Sequence[Opinion], weights: Sequence[float]) -> Reward:
        known = [
            (one.name, weight, opinion)
            for one, weight, opinion in zip(self._functions, weights, opinions, strict=True)
        ]
        parts = {name: opinion.value for name, _, opinion in known if opinion.value is not None}
        failure = next((one.failure for one in opinions if one.failure), "")
        if not failure and not parts:
            failure = "no function has an opinion"
        total = sum(weight * parts[name] for name, weight, _ in known if name in parts)
        return Reward(None if failure else total, parts, failure)

    def _run(self, calls: Sequence[RewardCall]) -> list[list[Opinion]]:
        found: list[list[Opinion] | None] = [None] * len(calls)
        left = collections.deque(self._chunks(calls))
        try:
            while any(one is None for one in found):
                self.start()
                for worker in self._workers:
                    if left and worker.ready and not worker.busy:
                        chunk = left.popleft()
                        worker.give(chunk, [calls[place] for place in chunk])
                self._receive(calls, found)
                self._replace_late_ones(calls, found, left)
        except BaseException:  # also an interrupted wait: nobody reads what they answer
            self.close()
            raise
        return [one for one in found if one is not None]

    def _chunks(self, calls: Sequence[RewardCall]) -> list[list[int]]:
        """Return the places of the calls that go to a process together, all of them of one function."""
        size = max(1, min(CHUNK, len(calls) // (2 * self._count)))
        chunks: list[list[int]] = []
        for place, call in enumerate(calls):
            if not chunks or len(chunks[-1]) == size or calls[chunks[-1][0]].function != call.function:
                chunks.append([])
            chunks[-1].append(place)
        return chunks

    def _receive(self, calls: Sequence[RewardCall], found: list[list[Opinion] | None]) -> None:
        by_connection = {one.connection: one for one in self._workers if not one.gone}
        for connection in wait(list(by_connection), LOOK_EVERY):
            worker = by_connection[connection]  # type: ignore[index]
            for place, opinions in worker.receive():
                found[place] = opinions

    def _replace_late_ones(
        self, calls: Sequence[RewardCall], found: list[list[Opinion] | None], left: collections.deque[list[int]]
    ) -> None:
        for worker in list(self._workers):
            if not worker.ready:
                if worker.gone or worker.silent > START_TIMEOUT:
                    raise LoomError(
                        f"the reward functions have no process: {worker.why_gone or 'it does not start'}"
                    )
                continue
            limit = self._seconds + (GRACE if worker.busy and self._is_async(calls, worker.busy[0]) else 0.0)
            if not worker.gone and not (worker.busy and worker.silent > limit):
                continue
            why = worker.why_gone if worker.gone else f"took longer than {self._seconds:g} s"
            worker.kill()
            self._workers.remove(worker)
            unanswered = worker.busy
            if unanswered and self._is_async(calls, unanswered[0]) and len(unanswered) > 1:
                left.extend([place] for place in unanswered)  # one by one: which of them it was is not known
            elif unanswered:
                place, rest = unanswered[0], unanswered[1:]
                name = self._functions[calls[place].function].name
                found[place] = [Opinion(failure=f"{name} {why}")] * len(calls[place].answers)
                if rest:
                    left.append(rest)

    def _is_async(self, calls: Sequence[RewardCall], place: int) -> bool:
        return self._functions[calls[place].function].is_async

    def close(self) -> None:
        """End the processes, and what they have started."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()


@dataclass
class _Worker:
    """A process."""

    setup: bytes
    ready: bool = False
    busy: list[int] = field(default_factory=list)
    """The places of the calls that it has not answered, in order."""
    gone: bool = False
    why_gone: str = ""

    def __post_init__(self) -> None:
        ours, its = socket.socketpair()
        with its:
            self._process = subprocess.Popen(
                python("loom.rl.rewards.worker"), stdin=its.fileno(), start_new_session=True
            )
        self.connection = Connection(ours.detach())
        self._heard = time.monotonic()
        self._places: list[int] = []
        self._send(self.setup)

    @property
    def silent(self) -> float:
        """Seconds since it was given something, or said something."""
        return time.monotonic() - self._heard

    def give(self, places: Sequence[int], calls: Sequence[RewardCall]) -> None:
        self.busy, self._places = list(places), list(places)
        self._heard = time.monotonic()
        self._send(cloudpickle.dumps(list(calls)))

    def _send(self, message: bytes) -> None:
        try:
            self.connection.send_bytes(message)
        except OSError:
            self._end()

    def receive(self) -> list[tuple[int, list[Opinion]]]:
        """Return the answers that are there, each with its place."""
        found = []
        try:
            while self.connection.poll():
                message = self.connection.recv()
                self._heard = time.monotonic()
                if self.ready:
                    place = self._places[message[0]]
                    self.busy.remove(place)
                    found.append((place, message[1]))
                elif message:
                    self.gone, self.why_gone = True, message
                else:
                    self.ready = True
        except (EOFError, OSError):
            self._end()
        return found

    def _end(self) -> None:
        """Note that it answers no more. It has ended, or does so now."""
        self.gone = True
        deadline = time.monotonic() + END_TIMEOUT
        while not self._has_ended() and time.monotonic() < deadline:
            time.sleep(0.01)
        self._kill()
        code = self._process.wait()
        what = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        self.why_gone = self.why_gone or f"ended its process with {what}"

    def _has_ended(self) -> bool:
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _kill(self) -> None:
        if self._process.returncode is None:  # else its number may be another process's by now
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """End it with all that it has started."""
        self._kill()
        self._process.wait()
        self.connection.close()
