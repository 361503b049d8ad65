"""The faults of the disk that holds checkpoints: it is full, or a checkpoint on it is corrupted."""

from __future__ import annotations

import hashlib
import os
import random
import secrets
import shutil
from pathlib import Path

from loom.chaos.host.network_commands import run_at_end
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
    damage = [_chosen(file, bytes, chosen) for file in files]
    note(*damage)
    for one in damage:
        _invert(one)
    evidence = {
        "checkpoint": str(newest),
        "before": {str(file): one.digest for file, one in zip(files, damage, strict=True)},
        "after": {str(file): _digest(file) for file in files},
    }

    def undo() -> Evidence:
        for one in damage:
            restore(one)
        return {"checkpoint": str(newest), "after": {str(one): _digest(one) for one in files if one.exists()}}

    return Injected("corrupt_checkpoint", evidence, undo)


def restore(damage: Corrupted) -> bool:
    """Put the original bytes back, unless they are there, or retention or a newer checkpoint replaced the file."""
    path = Path(damage.path)
    if not path.exists():
        return False
    now = path.read_bytes()
    if len(now) <= damage.places[-1]:
        return False
    values = bytes.fromhex(damage.values)
    before = bytearray(now)
    for place, value in zip(damage.places, values, strict=True):
        before[place] = value
    if before == now or hashlib.sha256(before).hexdigest() != damage.digest:
        return False
    _write(path, damage.places, values)
    return True


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


def _chosen(file: Path, count: int, chosen: random.Random) -> Corrupted:
    content = file.read_bytes()
    places = sorted(chosen.sample(range(len(content)), min(count, len(content))))
    values = bytes(content[place] for place in places).hex()
    return Corrupted(str(file.resolve()), hashlib.sha256(content).hexdigest(), places, values)


def _invert(damage: Corrupted) -> None:
    _write(Path(damage.path), damage.places, bytes(value ^ 0xFF for value in bytes.fromhex(damage.values)))


def _write(file: Path, places: list[int], values: bytes) -> None:
    with file.open("r+b") as opened:
        for place, value in zip(places, values, strict=True):
            opened.seek(place)
            opened.write(bytes([value]))
        opened.flush()
        os.fsync(opened.fileno())


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
