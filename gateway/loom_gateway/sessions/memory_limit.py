"""The memory that a container allows, in bytes."""

from __future__ import annotations

from pathlib import Path

from loom.wire.mux import MAX_MESSAGE

SHARE = 4
"""The largest message is this part of the memory: its bytes and what they are unpickled to are there at once."""

_UNLIMITED = 1 << 60  # version 1 writes a number near 2**63


def largest_message() -> int:
    """Return the largest message that this container's memory allows, `MAX_MESSAGE` at most."""
    limit = memory_limit()
    return MAX_MESSAGE if limit is None else min(MAX_MESSAGE, limit // SHARE)


def memory_limit(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the smallest limit of this process's control groups (version 1 or 2); None if there is none.

    Within a container, the paths in ``groups`` may be those outside of it, where its own group is at ``root``.
    """
    limits = []
    for hierarchy, names, path in _groups(groups):
        if hierarchy == "0":
            limits += _limits(root, path, "memory.max")
        elif "memory" in names.split(","):
            limits += _limits(root / "memory", path, "memory.limit_in_bytes")
    return min(limits, default=None)


def _groups(groups: Path) -> list[list[str]]:
    try:
        return [line.split(":", 2) for line in groups.read_text().splitlines() if line.count(":") >= 2]
    except OSError:  # another system than Linux
        return []


def _limits(mount: Path, path: str, name: str) -> list[int]:
    group = mount / path.strip("/")
    found = []
    for folder in (group, *group.parents):
        if folder == mount or mount in folder.parents:
            try:
                limit = int((folder / name).read_text())
            except (OSError, ValueError):  # another namespace's path, the root, or "max"
                continue
            if limit < _UNLIMITED:
                found.append(limit)
    return found
