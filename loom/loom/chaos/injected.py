"""`Injected`: an injected fault, with its evidence and its removal."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType

_log = logging.getLogger("loom")


Evidence = Mapping[str, object]
"""The evidence of a fault: numbers, texts and lists of them, by name."""


class InjectedFault(Exception):
    """The exception that the fault ``exception`` raises in a step.

    It is no `LoomError`, because nothing of Loom's has gone wrong.
    """


class Injected:
    """An injected fault. As a context manager it removes the fault at the end.

    Args:
        undo: removes the fault, and returns the evidence that it is gone; None if there is nothing to remove.
        duration: seconds after which the fault is removed; None: only by a call of `remove`.
        on_removal: called with the result of ``undo``.
    """

    def __init__(
        self,
        kind: str,
        evidence: Evidence,
        undo: Callable[[], Evidence] | None = None,
        duration: float | None = None,
        on_removal: Callable[[Evidence], None] | None = None,
    ) -> None:
        self.kind = kind
        self.evidence = evidence
        self.time = time.time()
        """The time of the injection, in seconds since the epoch."""
        self.removal: Evidence | None = None
        """Evidence that the fault is gone; None before `remove`."""
        self._undo = undo
        self._on_removal = on_removal
        self._lock = threading.Lock()
        self._gone = threading.Event()
        self._timer: threading.Timer | None = None
        if undo is not None and duration is not None:
            self._timer = threading.Timer(duration, self._time_is_over)
            self._timer.daemon = True
            self._timer.start()

    @property
    def removable(self) -> bool:
        """True if there is anything to remove."""
        return self._undo is not None

    def remove(self) -> Evidence:
        """Remove the fault unless it was removed; return the evidence that it is gone."""
        with self._lock:
            if self.removal is not None:
                return self.removal
            if self._timer is not None:
                self._timer.cancel()
            removal = self.removal = self._undo() if self._undo is not None else {}
            self._gone.set()
        if self._on_removal is not None:
            self._on_removal(removal)
        return removal

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the fault is removed; return whether it was."""
        return self._gone.wait(timeout)

    def _time_is_over(self) -> None:
        try:
            self.remove()
        except Exception:  # noqa: BLE001 - a timer's thread has no caller to raise to
            _log.exception("the fault %s cannot be removed", self.kind)

    def __enter__(self) -> Injected:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<Injected {self.kind}: {'there' if self.removal is None else 'removed'}>"
