"""`TimeoutProtocol`, uvicorn's HTTP with a timeout for the first request, for which uvicorn would wait forever."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_TIMEOUT = 10.0
"""Seconds from the connection to the end of the first request's head. Without a limit, silent connections pile
up."""


class TimeoutProtocol(H11Protocol):
    """Closes a connection on which no request arrives."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline = self.loop.call_later(REQUEST_TIMEOUT, self._time_out)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        super().connection_lost(exc)

    def _time_out(self) -> None:
        if self.scope is None:
            self.transport.close()
