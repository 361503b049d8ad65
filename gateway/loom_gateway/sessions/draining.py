"""The end of a gateway that was told to stop: it refuses new sessions, notifies clients, and lets sessions finish.

Kubernetes sends SIGTERM to a pod, and SIGKILL some time later. In between, a gateway with ``--drain`` serves its
living sessions, and ``/readyz`` tells the Service to send no new ones.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from loom.errors import GatewayDraining
from loom.wire.bodies import Notice
from loom.wire.stream import unnumbered_frame
from loom.wire.texts import pack_texts
from loom_gateway.sessions.manager import SessionManager

logger = logging.getLogger(__name__)

SendFrame: TypeAlias = Callable[..., None]  # sends a client a frame, given in pieces


class DrainState:
    """The state of draining, and the clients to notify."""

    def __init__(self, manager: SessionManager) -> None:
        self._manager = manager
        self._clients: set[SendFrame] = set()
        self._until: float | None = None  # None until draining begins

    @property
    def begun(self) -> bool:
        return self._until is not None

    @property
    def _left(self) -> float:
        """The seconds until the gateway ends."""
        assert self._until is not None
        return max(0.0, self._until - time.monotonic())

    def begin(self, seconds: float) -> None:
        """Refuse new sessions, and notify every client that the gateway ends. A second call does nothing."""
        if self._until is not None:
            return
        self._until = time.monotonic() + seconds
        logger.info("told to stop: %d sessions, %g s", len(self._manager.sessions()), seconds)
        for send_frame in list(self._clients):
            self._notify(send_frame)

    async def over(self) -> None:
        """Wait until no session is left, or until the seconds given to `begin` are over."""
        while sessions := self._manager.sessions():
            try:
                await asyncio.wait_for(sessions[0].over.wait(), self._left)
            except asyncio.TimeoutError:
                return

    def check_open(self) -> None:
        """Raise `GatewayDraining` if no new session may begin."""
        if self._until is not None:
            raise GatewayDraining(
                f"the gateway was told to stop, ends in {self._left:.0f} s and takes no new sessions: connect "
                f"again when the next one runs"
            )

    @contextmanager
    def notified(self, send_frame: SendFrame) -> Iterator[None]:
        """Notify a connected client when the gateway is told to stop."""
        self._clients.add(send_frame)
        if self._until is not None:
            self._notify(send_frame)
        try:
            yield
        finally:
            self._clients.discard(send_frame)

    def _notify(self, send_frame: SendFrame) -> None:
        details = {"seconds": self._left, "sessions_end": self._manager.end_sessions}
        # Unnumbered, because it does not come from the driver and need not be repeated to a client that comes back.
        send_frame(*unnumbered_frame(Notice("gateway_draining").message(parts=[pack_texts(details)])))
