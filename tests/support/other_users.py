"""Programs of other user ids than the tests', which only root can start.

The interpreter of a test may lie in a home that only its owner can open. A mount namespace opens the way to it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import loom
import loom_gateway

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of other user ids")

_OPEN = """
set -e
base=$1; closed=$2; aside=$3; shift 3
mount --bind "$base" "$aside"
mount -t tmpfs -o mode=755 tmpfs "$closed"
mkdir -p "$base"
mount --bind "$aside" "$base"
exec "$@"
"""


@contextmanager
def reachable_python() -> Iterator[list[str]]:
    """The beginning of a command, of which the rest and what it starts can run this interpreter as any user id.

    The processes have the ids of those without it.
    """
    base = Path(sys.base_prefix).resolve()
    for needed in (Path(sys.prefix), Path(loom.__file__), Path(loom_gateway.__file__)):
        for parent in needed.absolute().parents:
            if not parent.is_relative_to(base) and not base.is_relative_to(parent) and _is_closed(parent):
                pytest.skip(f"{parent} is closed to other user ids, and {needed} is below it")
    closed = [parent for parent in reversed(base.parents) if _is_closed(parent)]
    if not closed:
        yield []
        return
    with tempfile.TemporaryDirectory(prefix="loom-test-python-") as aside:
        yield ["unshare", "--mount", "sh", "-c", _OPEN, "open", str(base), str(closed[0]), aside]


def _is_closed(folder: Path) -> bool:
    return not folder.stat().st_mode & 0o001


def as_user(uid: int) -> list[str]:
    """The beginning of a command that runs the rest as a user id, in no group but its own."""
    return ["setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups"]
