"""`LaunchedJob`: a job that has its hosts launched before it opens a session on them."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from loom.errors import LoomError
from loom.session_alive import SessionLife
from loom_proxy.job import Job, JobState

if TYPE_CHECKING:
    from typing_extensions import Self


class LaunchedJob(ABC):
    """A job that has its hosts launched before it opens a session on them. It has all attributes of the session."""

    def __init__(self) -> None:
        self._job: Job | None = None
        self._launched = False  # whether this object has launched hosts that there were not before
        self._detached = False

    @abstractmethod
    def apply(self) -> Self:
        """Launch the hosts and open a session, unless this object has an open one."""

    @abstractmethod
    def kill(self) -> None:
        """End the session and the hosts."""

    @property
    def job(self) -> Job:
        """The open session.

        Raises:
            LoomError: there is no session yet.
        """
        if self._job is None:
            raise LoomError(
                f"this {type(self).__name__} has no session yet: call apply(), or use it in a with statement"
            )
        return self._job

    def __getattr__(self, name: str) -> Any:
        kind = type(self).__name__
        # Special methods, which copy and pickle look for, must not come from the job.
        if name.startswith("__") or "_job" not in self.__dict__:
            raise AttributeError(f"a {kind} has no {name!r}")
        if self._job is None:
            raise AttributeError(
                f"a {kind} has no {name!r} before it has a session: call apply(), or use it with `with`"
            )
        return getattr(self.job, name)

    def state(self) -> JobState:
        """Return the host meshes by name. Call `apply` first if there is no session yet."""
        return self.apply().job.state()

    def detach(self) -> SessionLife:
        """Leave the hosts and the session running, also after the ``with`` block; see `Job.detach`."""
        self._detached = True
        return self.job.detach()

    @property
    def _is_open(self) -> bool:
        return self._job is not None and not self._job.closed

    def _close_session(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            with contextlib.suppress(LoomError):  # the hosts may be gone
                job.close()

    def __enter__(self) -> Self:
        return self.apply()

    def __exit__(self, *error: object) -> None:
        if self._detached:
            return
        self._close_session()
        if self._launched:
            self.kill()
