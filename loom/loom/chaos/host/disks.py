"""The faults of the disk that holds checkpoints: it is full, or a checkpoint on it is corrupted."""

from __future__ import annotations

import hashlib
import os
import random
import secrets
import shutil
from pathlib import Path

from loom.chaos.host.commands import run_at_end
from loom.chaos.host.records import Corrupted, Filler, note
from loom.chaos.injected import Evidence, Injected
from loom.errors import FaultRefused

MEGABYTE = 1 << 20
_PIECE = 4 * MEGABYTE


def fill(folder: str, most: int = 1024) -> Injected:
    """Write up to ``most`` megabytes into a file, which the removal of the fault deletes."""
    place = _folder(folder)
    room = shutil.disk_usage(place).free
    if room > most * MEGABYTE:
        raise FaultRefused(
            f"the file system of {folder} has {room // MEGABYTE} megabytes of room and at most {most} are filled: "
            "keep checkpoints on a small one (mount -t tmpfs -o size=64m tmpfs FOLDER), or allow for more"
        )
    ballast = place / f".loom-full-{secrets.token_hex(4)}"
    note(Filler(str(ballast.resolve())))
    remove = run_at_end(["rm", "-f", str(ballast.resolve())])
    try:
        written = _write_all_room(ballast)
    except BaseException:
        remove()
        raise

    def undo() -> Evidence:
        remove()
        return {"folder": folder, "room": shutil.disk_usage(place).free}

    evidence = {"folder": folder, "room": shutil.disk_usage(place).free, "written": written}
    return Injected("full_disk", evidence, undo)


def corrupt(folder: str, bytes: int = 64, seed: int = 0) -> Injected:
    """Change bytes of each file of the newest checkpoint in a folder; the removal of the fault restores them.

    The newest checkpoint is the folder's last changed entry whose name does not begin with a dot.
    """
    place = _folder(folder)
    found = [one for one in place.iterdir() if not one.name.startswith(".")]
    if not found:
        raise FaultRefused(f"there is no checkpoint in {folder} to corrupt")
    newest = max(found, key=lambda one: (one.stat().st_mtime_ns, one.name))
    files = sorted(one for one in ([newest] if newest.is_file() else newest.rglob("*")) if one.is_file())
    files = [one for one in files if one.stat().st_size]
    if not files:
        raise FaultRefused(f"the newest checkpoint {newest} is empty: there is nothing to corrupt")
    chosen = random.Random(seed)
    before = {one: _digest(one) for one in files}
    changed = {}
    for one in files:
        size = one.stat().st_size
        changed[one] = sorted(chosen.sample(range(size), min(bytes, size)))
    note(*(Corrupted(str(one.resolve()), before[one], changed[one], _values(one, changed[one])) for one in files))
    for one in files:
        _invert(one, changed[one])
    evidence = {
        "checkpoint": str(newest),
        "before": {str(one): digest for one, digest in before.items()},
        "after": {str(one): _digest(one) for one in files},
    }

    def undo() -> Evidence:
        for file, places in changed.items():
            # Retention may have removed the file, or a newer checkpoint may have replaced it.
            if file.exists() and _digest(file) == evidence["after"][str(file)]:  # type: ignore[index]
                _invert(file, places)
        return {"checkpoint": str(newest), "after": {str(one): _digest(one) for one in files if one.exists()}}

    return Injected("corrupt_checkpoint", evidence, undo)


def _folder(folder: str) -> Path:
    place = Path(folder)
    if not place.is_dir():
        raise FaultRefused(f"there is no folder {folder!r:.200} on this host")
    return place


def _write_all_room(ballast: Path) -> int:
    descriptor = os.open(ballast, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    written, size = 0, _PIECE
    try:
        piece = bytes(_PIECE)
        while size:
            try:
                done = os.write(descriptor, piece[:size])
            except OSError:
                done = 0
            written += done
            if done < size:
                size //= 2
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return written


def _invert(file: Path, places: list[int]) -> None:
    with file.open("r+b") as opened:
        for place in places:
            opened.seek(place)
            (value,) = opened.read(1)
            opened.seek(place)
            opened.write(bytes([value ^ 0xFF]))


def _values(file: Path, places: list[int]) -> str:
    """Return the bytes at these places, in hexadecimal digits."""
    values = bytearray()
    with file.open("rb") as opened:
        for place in places:
            opened.seek(place)
            values += opened.read(1)
    return values.hex()


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
