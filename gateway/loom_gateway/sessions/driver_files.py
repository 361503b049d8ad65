"""The files of one driver in the state folder, through which the gateway and the driver exchange information.

All their names begin alike. The gateway removes them when the driver has ended, except for the log.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

OUTPUT_LINES = 50
OUTPUT_BYTES = 16 << 10  # the limits of a driver's last output in error messages


@dataclass(frozen=True)
class DriverRecord:
    """The description of a driver, or of the weaver, that a gateway leaves for its successor."""

    pid: int
    started: int
    """The process's start by `start_time`. Another process with the same id has a later start."""
    session: str = ""
    """The name of its session; empty for a spare."""
    created: float = 0.0
    """The time at which the session was opened, in seconds since the epoch."""
    persist: bool = False
    """Whether the session never ends for lack of a client."""
    owner: str = ""
    """The id of the token that opened the session; empty for a spare."""
    user: str = ""
    """The user to whom the session belongs; empty for a spare, and in the record of an older gateway."""
    shared: Mapping[str, str] = field(default_factory=dict)
    """The users with whom the session is shared, each with the scope that they have in it."""
    address: str = ""
    """The address at which threadlets find the weaver."""


@dataclass(frozen=True)
class LastWords:
    """The reason and exit code that a driver, or its gateway, leaves at the driver's end."""

    reason: str = ""
    """Empty if it is not known."""
    exit_code: int | None = None
    """Known only if the driver has ended by itself."""


class DriverFiles:
    """The files of one driver."""

    def __init__(self, base: str) -> None:
        self.base = base
        self.socket = f"{base}.sock"  # on which the driver takes the gateway's connections
        self.record = f"{base}.json"  # of `DriverRecord`
        self.output = f"{base}.out"  # the driver's standard output and error
        self.last_words = f"{base}.end"  # of `LastWords`
        self.log = f"{base}.log"  # the session's; see `loom_gateway.driver.output.spool`

    def write_record(self, record: DriverRecord) -> None:
        write_json(self.record, record)

    def read_record(self) -> DriverRecord:
        """Return the record. Raise `OSError` if there is none, `ValueError` if it is damaged."""
        from pydantic import TypeAdapter  # drivers use this module, and do not load pydantic

        return TypeAdapter(DriverRecord).validate_json(Path(self.record).read_bytes(), strict=True)

    def write_last_words(self, words: LastWords) -> None:
        """Write the last words. The first reason stays."""
        reason = self.read_last_words().reason or words.reason
        with contextlib.suppress(OSError):  # the folder is gone, and so is the reader
            write_json(self.last_words, LastWords(reason, words.exit_code))

    def read_last_words(self) -> LastWords:
        """Return the last words, or empty ones if there are none."""
        try:
            words: Any = json.loads(Path(self.last_words).read_text())
            return LastWords(str(words["reason"]), words["exit_code"])
        except (OSError, ValueError, TypeError, KeyError):
            return LastWords()

    def last_output(self) -> list[str]:
        try:
            with open(self.output, "rb") as output:
                output.seek(max(0, output.seek(0, os.SEEK_END) - OUTPUT_BYTES))
                return output.read().decode(errors="replace").splitlines()[-OUTPUT_LINES:]
        except OSError:
            return []

    def remove(self, log: bool = False) -> None:
        """Remove the files; the log only with ``log=True``."""
        paths = [self.socket, self.record, self.output, self.last_words]
        for path in paths + ([self.log, f"{self.log}.1"] if log else []):
            with contextlib.suppress(OSError):
                os.unlink(path)


def start_time(pid: int) -> int | None:
    """Return a process's start in ticks since the machine's boot; None without such a process or without Linux."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def write_json(path: str, value: object) -> None:
    """Write a value, which may contain dataclasses, to a file that only this user can read.

    A reader finds either the old content or the new one, whole.
    """
    folder, name = os.path.split(path)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{name}-", dir=folder)
    try:
        with open(descriptor, "w") as file:
            json.dump(value, file, default=asdict)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
