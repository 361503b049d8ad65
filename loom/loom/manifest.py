"""The manifest of a synced folder, which the laptop sends and from which the cluster assembles a tree.

A manifest names every file by its path in the tree and by the SHA-256 of its content, so that contents travel once
and only to hosts that lack them. The module does not touch a disk.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import msgpack

from loom.errors import LoomError, ProtocolMismatch, TooLarge

MAX_FILES = 100_000  # files and links that a synced folder may have
DEFAULT_LIMIT = 4 << 30  # bytes that a synced folder may have, unless ``LOOM_SYNC_LIMIT`` sets another limit
SYNCED_AT = 1_000_000_000 * 10**9
"""The modification time of every synced file, in nanoseconds since the epoch; another one shows a change."""

Blob = tuple[str, int]  # a content's digest and size in bytes

_DIGEST = re.compile(r"[0-9a-f]{64}")


STANDARD_MODULES = sys.stdlib_module_names - {"test"}
"""Names of the standard library's modules, which a tree does not hide. Projects may have a package ``test``."""


class TreeEntry(NamedTuple):
    """A file or a symbolic link of a tree."""

    path: str  # the path in the tree, with slashes
    digest: str = ""  # SHA-256 of a file's content in hexadecimal; empty for a link
    size: int = 0  # bytes of a file
    executable: bool = False
    target: str = ""  # the path that a link points to, relative to its own folder; empty for a file


@dataclass(frozen=True)
class Manifest:
    """The description of a synced folder."""

    name: str  # tells the folders of a session apart
    roots: tuple[str, ...]  # folders of the tree that go on ``sys.path``, in order; ``""`` is the tree itself
    entries: tuple[TreeEntry, ...]

    @cached_property
    def digest(self) -> str:
        """The digest of the tree's paths, contents, executable bits and links."""
        return hashlib.sha256(msgpack.packb(sorted(self.entries))).hexdigest()

    @cached_property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.entries)

    @cached_property
    def blobs(self) -> Mapping[str, int]:
        """The contents by digest, each with its size in bytes."""
        return {entry.digest: entry.size for entry in self.entries if not entry.target}

    @cached_property
    def module_names(self) -> frozenset[str]:
        """The importable names in the roots: modules, and packages with an ``__init__.py``."""
        names = set()
        for root in self.roots:
            prefix = f"{root}/" if root else ""
            for entry in self.entries:
                if entry.path.startswith(prefix):
                    first, _, rest = entry.path[len(prefix) :].partition("/")
                    if rest == "__init__.py":
                        names.add(first)
                    elif not rest and first.endswith(".py"):
                        names.add(first.removesuffix(".py"))
        return frozenset(names)

    def pack(self) -> bytes:
        """Return the manifest as bytes."""
        packed: bytes = msgpack.packb((self.name, self.roots, self.entries))
        return packed

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> Manifest:
        """Return the manifest that `pack` made into bytes, or raise `ProtocolMismatch`."""
        try:
            name, roots, rows = msgpack.unpackb(data, use_list=False)
            manifest = cls(str(name), tuple(roots), tuple(TreeEntry(*row) for row in rows))
            _check(manifest)
        except (ValueError, TypeError, AttributeError, msgpack.UnpackException) as error:
            raise ProtocolMismatch(f"not the manifest of a folder: {error}") from error
        return manifest


def _check(manifest: Manifest) -> None:
    files = set()
    folders = {""}
    for root in manifest.roots:
        if root:
            _check_path(root)
    for entry in manifest.entries:
        _check_path(entry.path)
        if entry.path in files:
            raise ValueError(f"{entry.path!r} is in it twice")
        files.add(entry.path)
        folder = posixpath.dirname(entry.path)
        while folder not in folders:
            folders.add(folder)
            folder = posixpath.dirname(folder)
        if entry.target:
            _check_target(entry)
        elif not _DIGEST.fullmatch(entry.digest) or type(entry.size) is not int or entry.size < 0:
            raise ValueError(f"{entry.path!r} has no digest or no size")
    if both := files & folders:
        raise ValueError(f"{min(both)!r} is a folder and a file")


def _check_path(path: Any) -> None:
    if not isinstance(path, str) or "\0" in path or {"", ".", ".."}.intersection(path.split("/")):
        raise ValueError(f"{path!r} is no path inside a tree")


def _check_target(entry: TreeEntry) -> None:
    target = posixpath.normpath(posixpath.join(posixpath.dirname(entry.path), entry.target))
    if entry.target.startswith("/") or "\0" in entry.target or target.split("/")[0] == "..":
        raise ValueError(f"the link {entry.path!r} leads outside, to {entry.target!r}")


def bytes_from_environment(variable: str, default: int) -> int:
    """Return a number of bytes from an environment variable, or the default."""
    text = os.environ.get(variable)
    if not text:
        return default
    if not text.isdecimal():
        raise LoomError(f"{variable}={text!r} is no number of bytes")
    return int(text)


def check_sizes(files: Sequence[tuple[str, int]], where: str) -> None:
    """Raise `TooLarge` if files, given with their sizes, exceed `MAX_FILES` or the limit of ``where``."""
    limit = bytes_from_environment("LOOM_SYNC_LIMIT", DEFAULT_LIMIT)
    if len(files) > MAX_FILES:
        counts = Counter(path.partition("/")[0] for path, _ in files)
        fullest = ", ".join(f"{top} ({count})" for top, count in counts.most_common(3))
        raise TooLarge(
            f"the folder has {len(files)} files, over the limit of {MAX_FILES}: leave some out with a .gitignore "
            f"or exclude=[…]. Most are in {fullest}"
        )
    total = sum(size for _, size in files)
    if total > limit:
        largest = sorted(files, key=lambda file: -file[1])[:5]
        named = ", ".join(f"{path} ({human_size(size)})" for path, size in largest)
        raise TooLarge(
            f"the folder has {total} bytes, over {where} of {limit} bytes: leave files out with a .gitignore or "
            f"exclude=[…]. The largest: {named}"
        )


def human_size(size: int) -> str:
    """Return a number of bytes as text for users, such as ``20.0 MiB``."""
    value = float(size)
    for unit in ("bytes", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


class Span(NamedTuple):
    """A range of bytes of one content that travels in one message."""

    digest: str
    size: int  # bytes of the whole content
    offset: int
    length: int


def batches(blobs: Iterable[Blob], most_bytes: int, most_spans: int) -> Iterator[list[Span]]:
    """Cut contents into spans, and yield batches of limited bytes and spans. An empty content has one span."""
    batch: list[Span] = []
    room = most_bytes
    for digest, size in blobs:
        offset = 0
        while True:
            length = min(size - offset, room)
            batch.append(Span(digest, size, offset, length))
            offset += length
            room -= length
            if room == 0 or len(batch) == most_spans:
                yield batch
                batch, room = [], most_bytes
            if offset >= size:
                break
    if batch:
        yield batch
