"""The sources of log lines: files, compressed or not, folders of them, and the log of a session."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import IO, Any

from loom.errors import WrongArguments
from loom.rl.diagnosis.binary_logs import EVENT_FILE, STATE_FILE, DamagedFile, is_binary, json_lines

BLOCK = 1 << 20
"""Bytes that are read at once."""
LONGEST = 1 << 20
"""Bytes of a line; longer lines are left out."""

_GZIP = b"\x1f\x8b"
_LOGS = (".log", ".txt", ".out", ".err", ".json", ".jsonl", ".gz", ".wandb")


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
    again: bool = True
    """True if it can be read again from its beginning."""


def peek(source: LogSource) -> tuple[Block | None, LogSource]:
    """Return the first block of a source, and the source, with that block; None if it has none or is broken."""
    blocks = source.blocks()
    try:
        first = next(blocks, None)
    except BrokenSource:
        return None, source
    if source.again or first is None:
        return first, source
    return first, replace(source, blocks=lambda: chain([first], blocks))


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
        return _blocks_of(str(entry["text"]).replace("\n", " ") for entry in lines)

    return LogSource(f"session {name}", blocks, again=False)


def _blocks_of(lines: Iterable[str]) -> Iterator[Block]:
    held: list[str] = []
    number, size = 1, 0
    for line in lines:
        held.append(line)
        size += len(line) + 1
        if size >= BLOCK:
            yield Block(("\n".join(held) + "\n").encode(errors="replace"), number)
            number += len(held)
            held, size = [], 0
    if held:
        yield Block(("\n".join(held) + "\n").encode(errors="replace"), number)


def _logs_of(folder: Path) -> list[Path]:
    logs = sorted(
        path
        for path in folder.rglob("*")
        if (path.suffix in _LOGS or path.name.startswith(EVENT_FILE)) and path.is_file()
    )
    if not logs:
        endings = f"{', '.join(_LOGS)}, or begins with {EVENT_FILE}"
        raise WrongArguments(f"no log in the folder {folder}: no file in it ends with {endings}")
    return _newest_state(logs)


def _newest_state(logs: list[Path]) -> list[Path]:
    """Leave out the ``trainer_state.json`` of older checkpoints: each has all that the ones before it have."""
    states = sorted((path for path in logs if path.name == STATE_FILE), key=lambda path: path.stat().st_size)
    newest = set({path.parent.parent: path for path in states}.values())  # of each run
    return [path for path in logs if path.name != STATE_FILE or path in newest]


def _read(path: Path) -> Iterator[Block]:
    if is_binary(path):
        yield from _read_binary(path)
        return
    with path.open("rb") as raw:
        compressed = raw.read(2) == _GZIP
        raw.seek(0)
        with gzip.GzipFile(fileobj=raw) if compressed else raw as file:
            yield from _blocks(file)


def _read_binary(path: Path) -> Iterator[Block]:
    line = 1
    failure: list[str] = []

    def lines() -> Iterator[str]:
        try:
            yield from json_lines(path)
        except (DamagedFile, OSError) as error:
            failure.append(str(error))

    for block in _blocks_of(lines()):
        line = block.line + block.data.count(b"\n")
        yield block
    if failure:
        raise BrokenSource(line, failure[0])


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
