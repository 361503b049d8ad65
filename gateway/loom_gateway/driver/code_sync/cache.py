"""The cache of synchronised folders on a machine: contents by digest, and the trees assembled from them.

Every process on the machine shares it: drivers, the agents on the hosts
(`loom_gateway.driver.code_sync.host_actor`), and the processes that have a tree on their ``sys.path``. New contents
and trees appear by an atomic rename. A user of a tree holds a shared lock on the file next to it. The kernel
releases the lock when the process ends, so `TreeCache.trim` knows which trees are in use. Layout::

    blobs/ab/abcd…      a content; abcd…x the same, executable
    trees/<digest>/     a tree; its files are hard links to blobs
    trees/<digest>.lock
    partial/            what is being received or assembled
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import shutil
import stat
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from loom.errors import FileChanged, SyncFailed, TooLarge
from loom.manifest import SYNCED_AT, Blob, Manifest, TreeEntry, bytes_from_environment, human_size
from loom.process.state_file import cache_folders
from loom.wire.messages import Buffer

PARTIAL_AGE = 24 * 3600.0  # seconds after which the unfinished work of a killed process is removed
ORPHAN_AGE = 3600.0  # seconds that a content may wait for a tree that contains it


def trim(cache: Path, limit: int) -> None:
    """Remove contents without a tree, then unused trees, the oldest first, until the cache fits its limit.

    No other process may trim it at the same time.
    """
    partial = cache / "partial"
    _remove_left_over(partial)
    blobs = list(_blobs(cache))
    total = sum(blob.stat().st_size for blob in blobs)
    if total <= limit:
        return
    # The inode's change time is the time when the content was made, linked or unlinked.
    total -= _remove_unlinked(blob for blob in blobs if blob.stat().st_ctime < time.time() - ORPHAN_AGE)
    for lock in sorted((cache / "trees").glob("*.lock"), key=_modified):
        if total <= limit:
            return
        if _remove_tree(lock, partial):
            total -= _remove_unlinked(_blobs(cache))
    if total > limit:
        size = human_size(total)
        logger.warning("the cache in %s has %s, over its limit; all of it is in use", cache, size)


def _remove_left_over(partial: Path) -> None:
    old = time.time() - PARTIAL_AGE
    for left in partial.iterdir():
        with contextlib.suppress(OSError):
            if left.stat().st_mtime < old:
                shutil.rmtree(left) if left.is_dir() else left.unlink()


def _remove_tree(lock: Path, partial: Path) -> bool:
    """Remove a tree unless a process holds it."""
    try:
        descriptor = os.open(lock, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        discard(lock.with_suffix(""), partial)
        lock.unlink(missing_ok=True)
        return True
    finally:
        os.close(descriptor)


def discard(tree: Path, partial: Path) -> None:
    """Remove a tree: first atomically from its place, then from the disk. It need not exist."""
    gone = partial / f"gone-{uuid.uuid4().hex}"
    with contextlib.suppress(FileNotFoundError):
        tree.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _blobs(cache: Path) -> Iterator[os.DirEntry[str]]:
    """Yield each content, with fresh stat values."""
    for folder in os.scandir(cache / "blobs"):
        for blob in os.scandir(folder):
            with contextlib.suppress(FileNotFoundError):
                blob.stat()  # the entry keeps the result
                yield blob


def _remove_unlinked(blobs: Iterable[os.DirEntry[str]]) -> int:
    """Remove the contents that are in no tree. Return the freed bytes."""
    freed = 0
    for blob in blobs:
        if blob.stat().st_nlink == 1:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(blob.path)
            freed += blob.stat().st_size
    return freed


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


logger = logging.getLogger(__name__)

DEFAULT_LIMIT = 16 << 30  # bytes to keep, unless ``LOOM_CACHE_LIMIT`` is set; trees in use may exceed them

_READ = 1 << 20


class BlobsMissing(Exception):
    """Raised if a tree cannot be assembled because contents are missing."""

    def __init__(self, digests: list[str]) -> None:
        super().__init__(f"{len(digests)} contents are lacking")
        self.digests = digests


class Hold:
    """A lock that keeps a tree until it is closed or its process ends."""

    def __init__(self, folder: Path, descriptor: int) -> None:
        self.folder = folder
        self._descriptor = descriptor

    def close(self) -> None:
        """Release the tree. Closing again is harmless."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class TreeCache:
    """A cache in a folder, which is created if it does not exist, of at most ``limit`` bytes."""

    def __init__(self, folder: Path, limit: int = DEFAULT_LIMIT) -> None:
        self.folder = folder
        self.limit = limit
        self._blobs = folder / "blobs"
        self._trees = folder / "trees"
        self._partial = folder / "partial"
        self._receiving: dict[tuple[str, str], int] = {}  # missing bytes, by upload and digest
        self._make_folders()

    @classmethod
    def of_this_machine(cls) -> TreeCache:
        """Return the cache in ``LOOM_CACHE`` or the user's cache directory. Raise `SyncFailed` if it cannot be."""
        limit = bytes_from_environment("LOOM_CACHE_LIMIT", DEFAULT_LIMIT)
        problems = []
        for folder in cache_folders():
            try:
                return cls(folder, limit)
            except OSError as error:
                problems.append(f"{folder} ({error.strerror or error})")
        raise SyncFailed(f"no folder for the cache of synced code: {', '.join(problems)}. Set LOOM_CACHE to one")

    def _make_folders(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.folder.stat().st_uid != os.geteuid():
            raise PermissionError(0, "it belongs to another user")
        for part in (self._blobs, self._trees, self._partial):
            part.mkdir(exist_ok=True)

    def missing(self, blobs: Iterable[Blob]) -> list[str]:
        """Return the digests of the contents that are missing or were tampered with."""
        return [digest for digest, size in blobs if self._find(digest, size) is None]

    def _find(self, digest: str, size: int) -> str | None:
        for variant in ("", "x"):
            path = self._blob_path(digest + variant)
            if _intact(path, size):
                return path
        return None

    def _blob_path(self, name: str) -> str:
        # A string, because there may be thousands, and making a Path takes longer than a stat call.
        return f"{self._blobs}/{name[:2]}/{name}"

    def receive(self, upload: str, digest: str, size: int, offset: int, data: Buffer) -> None:
        """Write a piece of a content of ``size`` bytes. The pieces of an upload may come in any order.

        Raises:
            FileChanged: all pieces are here, and the content does not match its digest.
        """
        key = (upload, digest)
        left = self._receiving.get(key, size) - len(data)
        self._receiving[key] = left
        path = self._partial / f"{upload}-{digest}"
        self._make_folders()  # the cache may have been emptied
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
        try:
            view = memoryview(data)
            while view:
                written = os.pwrite(descriptor, view, offset)
                view = view[written:]
                offset += written
        finally:
            os.close(descriptor)
        if left <= 0:
            del self._receiving[key]
            self._keep(path, digest)

    def _keep(self, path: Path, digest: str) -> None:
        with path.open("rb") as file:
            found = hashlib.sha256()
            while piece := file.read(_READ):
                found.update(piece)
        if found.hexdigest() != digest:
            path.unlink()
            raise FileChanged("a file was changed while it was being sent. Nothing was synced: sync again")
        self._publish(path, digest)

    def _publish(self, path: Path, name: str) -> None:
        path.chmod(0o555 if name.endswith("x") else 0o444)
        os.utime(path, ns=(SYNCED_AT, SYNCED_AT))
        target = Path(self._blob_path(name))
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)

    def forget(self, upload: str) -> None:
        for key in [key for key in self._receiving if key[0] == upload]:
            del self._receiving[key]
            with contextlib.suppress(FileNotFoundError):
                (self._partial / f"{upload}-{key[1]}").unlink()

    def read(self, digest: str, size: int, offset: int, count: int) -> bytes:
        """Return a piece of a content. Raise `BlobsMissing` if it is not here."""
        path = self._find(digest, size)
        if path is None:
            raise BlobsMissing([digest])
        with open(path, "rb") as file:
            return os.pread(file.fileno(), count, offset)

    def tree(self, digest: str) -> Path:
        return self._trees / digest

    def hold(self, digest: str) -> Hold | None:
        """Keep a tree from being removed. Return None if it is not here."""
        if not self.tree(digest).is_dir():
            return None
        hold = self._lock(digest)
        if self.tree(digest).is_dir():
            return hold
        hold.close()
        return None

    def _lock(self, digest: str) -> Hold:
        path = self._trees / f"{digest}.lock"
        while True:
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            # `trim` may have removed the file between `open` and `flock`.
            with contextlib.suppress(FileNotFoundError):
                if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                    os.utime(path)  # marks the tree as recently used
                    return Hold(self.tree(digest), descriptor)
            os.close(descriptor)

    def assemble(self, manifest: Manifest) -> Hold:
        """Assemble the tree of a manifest, unless it is here whole, and hold it. May raise `BlobsMissing`."""
        self._make_folders()
        hold = self._lock(manifest.digest)
        try:
            if not self._whole(manifest):
                missing = self.missing(manifest.blobs.items())
                if missing:
                    raise BlobsMissing(missing)
                self._build(manifest)
        except BaseException:
            hold.close()
            raise
        return hold

    def _whole(self, manifest: Manifest) -> bool:
        tree = self.tree(manifest.digest)
        if not tree.is_dir():
            return False
        for entry in manifest.entries:
            path = f"{tree}/{entry.path}"
            if entry.target:
                if not os.path.islink(path):
                    return False
            elif not _intact(path, entry.size):
                return False
        return True

    def _build(self, manifest: Manifest) -> None:
        building = self._partial / f"tree-{uuid.uuid4().hex}"
        building.mkdir()
        try:
            for entry in manifest.entries:
                path = building / entry.path
                path.parent.mkdir(parents=True, exist_ok=True)
                if entry.target:
                    path.symlink_to(entry.target)
                else:
                    self._link(entry, path)
            self._put_in_place(building, manifest)
        finally:
            shutil.rmtree(building, ignore_errors=True)

    def _link(self, entry: TreeEntry, path: Path) -> None:
        name = entry.digest + ("x" if entry.executable else "")
        blob = self._blob_path(name)
        if not _intact(blob, entry.size):
            other = self._find(entry.digest, entry.size)
            if other is None:  # it was trimmed at this moment
                raise BlobsMissing([entry.digest])
            copy = self._partial / uuid.uuid4().hex
            shutil.copyfile(other, copy)
            self._publish(copy, name)
        try:
            os.link(blob, path)
        except FileNotFoundError:
            raise BlobsMissing([entry.digest]) from None
        except OSError:  # the file system has no hard links, or this file has too many
            shutil.copy2(blob, path)

    def _put_in_place(self, building: Path, manifest: Manifest) -> None:
        tree = self.tree(manifest.digest)
        for _ in range(10):
            try:
                building.rename(tree)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            if self._whole(manifest):
                return  # another process was faster
            discard(tree, self._partial)
        raise SyncFailed(f"{tree} cannot be put in place: other processes replace it all the time")

    def check_fits(self, size: int) -> None:
        """Raise `TooLarge` if a tree of ``size`` bytes exceeds the cache's limit."""
        if size > self.limit:
            raise TooLarge(
                f"the folder has {size} bytes, over the limit of {self.limit} bytes of the cache in {self.folder}: "
                f"leave files out, or raise LOOM_CACHE_LIMIT there"
            )

    def trim(self) -> None:
        """Trim the cache to its limit: first contents without a tree, then unused trees, the oldest first."""
        with (self.folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return  # another process is trimming
            trim(self.folder, self.limit)


def _intact(path: str, size: int) -> bool:
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size == size and status.st_mtime_ns == SYNCED_AT
