"""Trackers' files as JSON lines: TensorBoard's event files, W&B's ``.wandb``, transformers' ``trainer_state.json``.

Both binary formats are records of Protocol Buffers, of which only a few fields are needed: those of
``tensorboard/compat/proto/{event,summary}.proto`` and of ``wandb/proto/wandb_internal.proto``. They are read
without the libraries, which an analysis would need for nothing else.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

EVENT_FILE = "events.out.tfevents."
"""The beginning of the name of TensorBoard's event files."""
STATE_FILE = "trainer_state.json"
"""The file in each checkpoint of transformers' Trainer with everything that it has logged."""
BLOCK = 32_768
"""Bytes of a block of a ``.wandb`` file, which has the form of LevelDB's logs."""
_WANDB_HEADER = 7
_FULL, _FIRST, _LAST = 1, 2, 4
_RECORD = 1 << 26
"""Bytes of a record; one that is longer is damage."""


class DamagedFile(Exception):
    """A file ends within a record, or a record is none. Earlier records were good."""


def is_binary(path: Path) -> bool:
    """Return whether a file's lines are made by `json_lines`."""
    return path.suffix == ".wandb" or path.name.startswith(EVENT_FILE) or path.name == STATE_FILE


def json_lines(path: Path) -> Iterator[str]:
    """Yield each record with metrics as a line of JSON: the metrics by name, with ``step`` and ``time`` if known.

    Raises:
        DamagedFile: after the good records.
        OSError: the file cannot be read.
    """
    if path.name == STATE_FILE:
        yield from _state_rows(path)
        return
    with path.open("rb") as file:
        if path.suffix == ".wandb":
            yield from map(_wandb_row, _wandb_records(file))
        else:
            yield from _event_rows(map(_event_row, _event_records(file)))


def _state_rows(path: Path) -> Iterator[str]:
    try:
        state = json.loads(path.read_bytes())
    except ValueError as error:
        raise DamagedFile(f"this is no JSON: {error}") from None
    rows = state.get("log_history") if isinstance(state, dict) else None
    yield from map(json.dumps, rows if isinstance(rows, list) else ())


def _event_records(file: BinaryIO) -> Iterator[bytes]:
    while header := file.read(12):  # the length, and its checksum
        if len(header) < 12 or (length := struct.unpack_from("<Q", header)[0]) > _RECORD:
            raise DamagedFile("it is cut off or damaged")
        record = file.read(length + 4)
        if len(record) < length + 4:
            raise DamagedFile("it is cut off")
        yield record[:-4]


def _wandb_records(file: BinaryIO) -> Iterator[bytes]:
    if file.read(_WANDB_HEADER)[:4] != b":W&B":
        raise DamagedFile("this is no file of W&B")
    place, parts = _WANDB_HEADER, b""
    while True:
        left = BLOCK - place % BLOCK
        if left < _WANDB_HEADER:  # the rest of a block is empty
            place += len(file.read(left))
            continue
        header = file.read(_WANDB_HEADER)
        if not header:
            break
        length, kind = struct.unpack_from("<HB", header.ljust(_WANDB_HEADER, b"\0"), 4)
        data = file.read(length)
        if len(header) < _WANDB_HEADER or len(data) < length or not _FULL <= kind <= _LAST:
            raise DamagedFile("it is cut off or damaged")
        place += _WANDB_HEADER + length
        parts = data if kind in (_FULL, _FIRST) else parts + data
        if kind in (_FULL, _LAST):
            yield parts
    if parts and kind not in (_FULL, _LAST):
        raise DamagedFile("it is cut off")


def _event_rows(records: Iterator[dict[str, float]]) -> Iterator[str]:
    """Yield one row for the records of each step, of which each has one scalar."""
    row: dict[str, float] = {}
    for record in records:
        if row and record["step"] != row["step"]:
            yield json.dumps(row)
            row = {}
        row.update(record)
    if row:
        yield json.dumps(row)


def _event_row(record: bytes) -> dict[str, float]:
    """Return the scalars of an ``Event``: wall_time 1, step 2, summary 5 (value 1: tag 1, float 2, tensor 8)."""
    row: dict[str, float] = {"step": 0}
    for number, value in _fields(record):
        if number == 1 and isinstance(value, bytes):
            row["time"] = struct.unpack("<d", value)[0]
        elif number == 2 and isinstance(value, int):
            row["step"] = value
        elif number == 5 and isinstance(value, bytes):
            for _, each in _fields(value):
                if isinstance(each, bytes) and (found := _scalar(each)) is not None:
                    row[found[0]] = found[1]
    return row


def _scalar(value: bytes) -> tuple[str, float] | None:
    tag, number = "", None
    for field, content in _fields(value):
        if field == 1 and isinstance(content, bytes):
            tag = content.decode(errors="replace")
        elif field == 2 and isinstance(content, bytes) and len(content) == 4:
            number = struct.unpack("<f", content)[0]
        elif field == 8 and isinstance(content, bytes):  # a tensor of floats: tensor_content 4, float_val 5
            floats = [each for name, each in _fields(content) if name in (4, 5) and isinstance(each, bytes)]
            if floats and len(floats[0]) == 4:
                number = struct.unpack("<f", floats[0])[0]
    return None if number is None else (tag, number)


def _wandb_row(record: bytes) -> str:
    """Return the history of a ``Record``: history 2 with its items 1: key 1, nested_key 2, value_json 16."""
    row: dict[str, object] = {}
    for number, value in _fields(record):
        if number != 2 or not isinstance(value, bytes):
            continue
        for part, item in _fields(value):
            if part != 1 or not isinstance(item, bytes):
                continue
            keys, content = [], "null"
            for field, text in _fields(item):
                if isinstance(text, bytes) and field in (1, 2):
                    keys.append(text.decode(errors="replace"))
                elif isinstance(text, bytes) and field == 16:
                    content = text.decode(errors="replace")
            try:
                row["/".join(filter(None, keys))] = json.loads(content)
            except ValueError:
                continue
    return json.dumps(row)


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and the value of each field of a message in the wire format of Protocol Buffers."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, place = _varint(message, place)
            yield number, value
            continue
        if kind == 2:
            size, place = _varint(message, place)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise DamagedFile("a record in it is damaged")
        if place + size > len(message):
            raise DamagedFile("a record in it is damaged")
        yield number, message[place : place + size]
        place += size


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while place < len(message) and shift < 64:
        byte = message[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
        shift += 7
    raise DamagedFile("a record in it is damaged")
