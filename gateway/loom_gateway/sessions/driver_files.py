"""What the gateway and a driver leave for each other on disk: the files of one driver in the state folder.

The names of all of them begin alike, and the gateway removes them when the driver has ended. What stays is the log.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

OUTPUT_LINES = 50
"""Last lines of a driver's output that are kept for error messages."""

OUTPUT_BYTES = 16 << 10
"""Bytes of them, at most."""


@dataclass(frozen=True)
class DriverRecord:
    """What a gateway notes of a driver, for the gateway after it."""

    pid: int
    started: int
    """When the process started, as `start_time` tells: another process that got the same id started later."""
    port: int
    """The port that its Monarch was given."""
    protocol: Sequence[int]
    """Version of the protocol that it speaks."""
    session: str = ""
    """Name of its session; empty for a spare."""
    created: float = 0.0
    """When the session was opened, in seconds since the epoch."""
    persist: bool = False
    """Whether the session lives on without a client for as long as it takes."""
    owner: str = ""
    """Id of the token that opened the session; empty for a spare."""

    @classmethod
    def parse(cls, text: str) -> DriverRecord:
        """A record that was written. Raises `ValueError` for anything else."""
        values = json.loads(text)
        fits = {"int": int, "float": float, "str": str, "bool": bool, "Sequence[int]": list}
        kinds = {f.name: fits[str(f.type)] for f in fields(cls)}
        if not isinstance(values, dict) or any(type(values.get(name)) is not kinds[name] for name in kinds):
            raise ValueError("it is no record of a driver")
        return cls(**{name: values[name] for name in kinds})


@dataclass(frozen=True)
class LastWords:
    """Why a driver ends."""

    reason: str = ""
    """Empty if it is not known."""
    exit_code: int | None = None
    """Known when the driver has come to its own end."""


class DriverFiles:
    """The files of one driver, whose paths begin alike."""

    def __init__(self, base: str) -> None:
        self.base = base
        self.socket = f"{base}.sock"
        """Where the driver takes the gateway's connections."""
        self.record = f"{base}.json"
        """Its `DriverRecord`."""
        self.output = f"{base}.out"
        """What it prints."""
        self.last_words = f"{base}.end"
        """Its `LastWords`."""
        self.log = f"{base}.log"
        """What the session printed; see `loom_gateway.driver.output.spool`."""

    def write_record(self, record: DriverRecord) -> None:
        """Write the record, so that a reader finds the old one or this one."""
        write_atomically(self.record, json.dumps(asdict(record)))

    def read_record(self) -> DriverRecord:
        """Raises `OSError` where there is none, `ValueError` where it is none."""
        return DriverRecord.parse(Path(self.record).read_text())

    def say(self, words: LastWords) -> None:
        """Leave the last words; the reason that was given first stays."""
        reason = self.read_last_words().reason or words.reason
        with contextlib.suppress(OSError):  # the folder is gone, and with it whoever would want to know
            write_atomically(self.last_words, json.dumps({"reason": reason, "exit_code": words.exit_code}))

    def read_last_words(self) -> LastWords:
        """The last words; empty ones where there are none."""
        try:
            words: Any = json.loads(Path(self.last_words).read_text())
            return LastWords(str(words["reason"]), words["exit_code"])
        except (OSError, ValueError, TypeError, KeyError):
            return LastWords()

    def last_output(self) -> list[str]:
        """The last `OUTPUT_LINES` lines that the driver printed."""
        try:
            with open(self.output, "rb") as output:
                output.seek(max(0, output.seek(0, os.SEEK_END) - OUTPUT_BYTES))
                return output.read().decode(errors="replace").splitlines()[-OUTPUT_LINES:]
        except OSError:
            return []

    def remove(self, log: bool = False) -> None:
        """Remove what is there of the files; the log only if asked to."""
        paths = [self.socket, self.record, self.output, self.last_words]
        for path in paths + ([self.log, f"{self.log}.1"] if log else []):
            with contextlib.suppress(OSError):
                os.unlink(path)


def start_time(pid: int) -> int | None:
    """When a process started, in ticks since the machine did; None where there is no such process, or no Linux."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def write_atomically(path: str, text: str) -> None:
    """Write a file that only this user can read; a reader finds what was there before or all of this."""
    folder, name = os.path.split(path)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{name}-", dir=folder)
    try:
        with open(descriptor, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
