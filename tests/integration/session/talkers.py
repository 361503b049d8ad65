"""Actors that print, and what a job hears of it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

import loom
from loom import Actor, current_rank, endpoint
from loom_proxy.logs import LogLine

BOUND = 30.0
"""Seconds; far over what anything takes, so that only a hang fails."""


class Talker(Actor):
    """Prints what it is told to."""

    @endpoint
    def say(self, text: str, stream: str = "stdout") -> None:
        print(text, file=getattr(sys, stream))

    @endpoint
    def say_bytes(self, data: bytes) -> None:
        os.write(1, data)

    @endpoint
    def say_rank(self) -> None:
        print("my rank is", current_rank().rank)

    @endpoint
    def log(self, level: int, text: str) -> None:
        logging.basicConfig()
        logging.getLogger("training").log(level, text)

    @endpoint
    def level(self) -> int:
        return logging.getLogger().level

    @endpoint
    def fork(self, text: str) -> None:
        subprocess.run(["echo", text], check=True)

    @endpoint
    def flood(self, megabytes: int) -> None:
        line = "x" * 99
        for _ in range(megabytes * 10_000):
            print(line)
        print("the flood is over")

    @endpoint
    def die(self, last_words: str) -> None:
        print(last_words)
        os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    def kill_agent(self) -> int:
        """The process id of the process's agent, which is killed."""
        # Not by `children`, which leaves out what seems older than its parent, as after a change of the clock.
        # It may just be starting: then its command line is not there yet.
        found: list[int] = []
        for _ in range(500):
            found = [
                process.pid
                for process in psutil.process_iter(["ppid", "cmdline"])
                if process.info["ppid"] == os.getpid()
                and any("process_link.agent" in part for part in process.info["cmdline"] or ())
            ]
            if found:
                break
            time.sleep(0.02)
        (agent,) = found
        os.kill(agent, signal.SIGKILL)
        for _ in range(5000):
            print("nobody hears this", flush=True)  # and it raises nothing
        return agent


class Lines:
    """Collects the lines of a job, and waits for one."""

    def __init__(self, job: loom.Job) -> None:
        self._lines: list[LogLine] = []
        self._changed = threading.Condition()
        job.on_log(self._add)

    def _add(self, line: LogLine) -> None:
        with self._changed:
            self._lines.append(line)
            self._changed.notify_all()

    def wait_for(self, found: Callable[[LogLine], Any]) -> LogLine:
        with self._changed:
            assert self._changed.wait_for(lambda: any(map(found, self._lines)), BOUND), self._lines
            return next(line for line in self._lines if found(line))

    def texts(self, stream: str = "stdout") -> list[str]:
        with self._changed:
            return [line.text for line in self._lines if line.stream == stream]

    def all(self) -> list[LogLine]:
        with self._changed:
            return list(self._lines)


def talkers(job: loom.Job, name: str = "trainers", gpus: int = 2) -> tuple[Any, Any]:
    procs = job.hosts.spawn_procs(per_host={"gpus": gpus}, name=name)
    return procs, procs.spawn(f"{name} talkers", Talker)
