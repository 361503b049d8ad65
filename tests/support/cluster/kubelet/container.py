"""One container of a pod: its process, and what Kubernetes says about it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.cluster.kubelet.memory import MemoryGroup
from tests.support.cluster.kubelet.sandbox import ENTERING

__all__ = ["Container"]

LAST_SECONDS = 2.0
"""Seconds from SIGTERM to SIGKILL that are left in any case, if ``preStop`` has taken the whole grace period."""

POLL = 0.1


@dataclass
class Container:
    """One container of a pod.

    Args:
        memory: its control group; None without a limit.
    """

    spec: dict[str, Any]
    memory: MemoryGroup | None = None
    process: asyncio.subprocess.Process | None = None
    started: bool = False
    """Whether it has passed its startup probe."""
    ready: bool = False
    restarts: int = 0
    waiting: str = "ContainerCreating"
    """Why it was not started; empty if it was."""
    message: str = ""
    exit_code: int | None = None
    """Of the last time that it ended; of a signal, 128 and its number."""
    reason: str = ""
    """Why it ended."""
    _killed: bool = False
    _entered: tuple[int, int] | None = None
    """Its process's id, and that of its first process, once that was in its file system."""

    @property
    def init(self) -> int | None:
        """The process id, on this machine, of the container's first process, once it has its file system."""
        if self.process is None or self.process.returncode is not None:
            return None
        pid = self.process.pid
        if self._entered is not None and self._entered[0] == pid:
            return self._entered[1]
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            words = Path(f"/proc/{children[0]}/cmdline").read_bytes().split(b"\0") if children else []
            # It is empty while another program takes the process over, and unshare's own just after the fork.
            if any(words) and ENTERING not in words:
                self._entered = pid, int(children[0])
                return int(children[0])
        return None

    @property
    def why_not(self) -> str:
        """Why it does not run; empty if it does."""
        return self.waiting or ("ContainerCreating" if self.init is None else "")

    def kill(self) -> None:
        """Kill all its processes: the kernel does when the first is killed, which its parent then reaps."""
        if self.process is not None and self.process.returncode is None:
            self._killed = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.init or self.process.pid, signal.SIGKILL)

    async def wait(self) -> None:
        """Wait for its end, and note how it came."""
        assert self.process is not None
        self._killed = False
        code = await self.process.wait()
        no_memory = self.memory is not None and self.memory.kills() > 0
        # unshare, its parent, does not tell when a signal has ended it.
        self.exit_code = 128 + signal.SIGKILL if self._killed or no_memory else code
        self.reason = "OOMKilled" if no_memory else "Error" if self.exit_code else "Completed"

    async def keep_within_memory(self) -> None:
        """Kill the whole of it when the kernel has killed one of its processes for want of memory.

        This is what Kubernetes does from 1.28 on (``memory.oom.group``).
        """
        assert self.memory is not None
        while True:
            await asyncio.sleep(POLL)
            if self.memory.kills():
                self.kill()
                return

    async def stop(self, grace: float, before: Callable[[], Awaitable[object]] | None) -> None:
        """Stop it as Kubernetes does: ``before``, SIGTERM, and SIGKILL after the grace period, in seconds."""
        process, loop = self.process, asyncio.get_running_loop()
        if process is None or process.returncode is not None:
            return
        deadline = loop.time() + grace
        if before is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(before(), grace)
        if (init := self.init) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(init, signal.SIGTERM)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(process.wait(), max(deadline - loop.time(), LAST_SECONDS if before else 0.0))
        self.kill()
        await process.wait()

    def state(self) -> dict[str, Any]:
        """As in a pod's ``status.containerStatuses``."""
        if self.why_not:
            return {"waiting": {"reason": self.why_not, "message": self.message}}
        return {"running": {}}

    def to_json(self) -> dict[str, Any]:
        ended = {"exitCode": self.exit_code, "reason": self.reason}
        return {
            "name": self.spec["name"],
            "image": self.spec.get("image", ""),
            "ready": self.ready,
            "started": self.started,
            "restartCount": self.restarts,
            "state": self.state(),
            "lastState": {} if self.exit_code is None else {"terminated": ended},
        }
