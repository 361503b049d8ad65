"""The sources of log lines: files, compressed or not, folders of them, and the log of a session."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from loom.errors import WrongArguments

BLOCK = 1 << 20
"""Bytes that are read at once."""
LONGEST = 1 << 20
"""Bytes of a line; longer lines are left out."""

_GZIP = b"\x1f\x8b"
_LOGS = (".log", ".txt", ".out", ".err", ".json", ".jsonl", ".gz")


@dataclass(frozen=True)
class Block:
    """Whole lines of a source."""

    data: bytes
    """Lines with their ends; the last line of a source may have none."""
    line: int
    """The number of the first, from 1 on."""


class BrokenSource(Exception):
    """A source cannot be read to its end. It has the number of the line and the reason."""

    def __init__(self, line: int, why: str) -> None:
        super().__init__(why)
        self.line = line
        self.why = why


@dataclass(frozen=True)
class LogSource:
    """A file or a session whose lines are read once.

    Reading raises `BrokenSource` where no more can be read, after all blocks before that.
    """

    name: str
    blocks: Callable[[], Iterator[Block]]


def files(paths: Iterable[str | Path]) -> list[LogSource]:
    """Return a source for each file, and for each log in each folder. A file that is named twice is read once.

    Raises:
        WrongArguments: there is no such file, it is no log, or it may not be read.
    """
    found: dict[Path, str] = {}
    for path in map(Path, paths):
        for file in _logs_of(path) if path.is_dir() else [path]:
            try:
                with file.open("rb"):
                    found.setdefault(file.resolve(), str(file))
            except FileNotFoundError:
                raise WrongArguments(f"no log {file}: there is no such file") from None
            except OSError as error:
                raise WrongArguments(f"cannot read the log {file}: {error.strerror}") from None
    if not found:
        raise WrongArguments("no log to read: name files or folders with logs")
    return [LogSource(name, lambda file=file: _read(file)) for file, name in found.items()]  # type: ignore[misc]


def session(name: str, lines: Iterable[Mapping[str, Any]]) -> LogSource:
    """Return the source of a session's log, as `loom.rest_client.Gateway.logs` yields it."""

    def blocks() -> Iterator[Block]:
        held: list[str] = []
        number, size = 1, 0
        for entry in lines:
            text = str(entry["text"]).replace("\n", " ")
            held.append(text)
            size += len(text) + 1
            if size >= BLOCK:
                yield Block(("\n".join(held) + "\n").encode(errors="replace"), number)
                number += len(held)
                held, size = [], 0
        if held:
            yield Block(("\n".join(held) + "\n").encode(errors="replace"), number)

    return LogSource(f"session {name}", blocks)


def _logs_of(folder: Path) -> list[Path]:
    logs = sorted(path for path in folder.rglob("*") if path.suffix in _LOGS and path.is_file())
    if not logs:
        raise WrongArguments(f"no log in the folder {folder}: no file in it ends with {', '.join(_LOGS)}")
    return logs


def _read(path: Path) -> Iterator[Block]:
    with path.open("rb") as raw:
        compressed = raw.read(2) == _GZIP
        raw.seek(0)
        with gzip.GzipFile(fileobj=raw) if compressed else raw as file:
            yield from _blocks(file)


def _blocks(file: IO[bytes] | gzip.GzipFile) -> Iterator[Block]:
    """Cut a file into blocks of whole lines. Of a line that is too long a block has the beginning."""
    rest, line, too_long = b"", 1, False
    while True:
        try:
            read = file.read(BLOCK)
        except (OSError, EOFError, zlib.error) as error:
            if rest:
                yield Block(rest, line)
            why = "the compressed file is cut off or damaged" if isinstance(file, gzip.GzipFile) else str(error)
            raise BrokenSource(line + rest.count(b"\n"), why) from None
        if not read:
            break
        if too_long:
            end = read.find(b"\n")
            if end < 0:
                continue
            read, too_long, line = read[end + 1 :], False, line + 1
        cut = read.rfind(b"\n") + 1
        if cut:
            whole, rest = rest + read[:cut], read[cut:]
            yield Block(whole, line)
            line += whole.count(b"\n")
        else:
            rest += read
        if len(rest) > LONGEST:
            yield Block(rest[:LONGEST], line)
            rest, too_long = b"", True
    if rest:
        yield Block(rest, line)
