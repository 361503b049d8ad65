"""`Exports`: the gateway's exports to trackers, each in a process of its own that is started again when it ends.

The processes end with the gateway. Trackers' packages may take as long, and fail, as they like there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from loom.errors import WrongArguments
from loom.process import tasks
from loom.process.backoff import Backoff
from loom.process.child import python
from loom.wings import Part

logger = logging.getLogger(__name__)

BACKOFF = Backoff(1.0, 60.0)  # seconds before an export that ended is started again
STEADY = 120.0  # seconds after which its end does not count as early, so that the pauses start anew
END_TIMEOUT = 10.0  # seconds that an export has to write what is there before it is killed
_LAST = 2000  # characters of the last output in the log


@dataclass(frozen=True)
class Exports:
    """The exports of a gateway.

    Args:
        trackers: their names.
        weaver: where it is, as for `WeaverClient`.
        key: returns the gateway's key to the weaver.
    """

    trackers: Sequence[str]
    project: str
    folder: Path
    weaver: str
    key: Callable[[], str]

    @classmethod
    def checked(
        cls, trackers: Sequence[str], project: str, folder: Path, weaver: str, key: Callable[[], str]
    ) -> Exports:
        """Return the exports. Raise `WrongArguments` or `MissingDependency` if one of them cannot be made."""
        kinds, check_installed = Part.TRACKERS.load(), Part.CHECK_TRACKER.load()
        for name in trackers:
            if name not in list(kinds):
                known = ", ".join(one.value for one in kinds)
                raise WrongArguments(f"--export: there is no tracker {name!r:.40}; there are {known}")
            check_installed(kinds(name))
        return cls(trackers, project, folder, weaver, key)

    def start(self) -> list[asyncio.Task[None]]:
        """Start the exports; each ends with its task."""
        return [
            tasks.keep_running(f"export to {name}", lambda name=name: self._run(name), BACKOFF, STEADY)  # type: ignore[misc]
            for name in self.trackers
        ]

    async def _run(self, name: str) -> None:
        command = python("loom.exporters", "--to", name, "--weaver", self.weaver, "--project", self.project)
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(
            *command, "--folder", str(self.folder), stdin=pipe, stdout=asyncio.subprocess.DEVNULL, stderr=pipe
        )
        assert child.stdin is not None
        assert child.stderr is not None
        last = b""
        try:
            child.stdin.write(f"{self.key()}\n".encode())
            while some := await child.stderr.read(_LAST):
                last = (last + some)[-_LAST:]
            await child.wait()
        finally:
            child.stdin.close()  # by which it ends
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(child.wait(), END_TIMEOUT)
            if child.returncode is None:
                child.kill()
        logger.error(
            "the export to %s ended with %s and is started again; its last output:\n%s",
            name,
            child.returncode,
            last.decode(errors="replace"),
        )
