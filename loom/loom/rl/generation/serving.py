"""`Serving`: the HTTP servers of a generator, on this host's address, and their token."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from loom.control.address import own_address
from loom.errors import LoomError
from loom.process.listen import listen
from loom.rl.generation.app import GenerationService, create_app
from loom.rl.generation.listener import Listener
from loom.rl.generation.urls import url_with_token

CONNECTIONS = 4096


@dataclass(frozen=True)
class ServingState:
    """Where requests to a server wait."""

    connections: int
    """Connections that are accepted."""
    accept_queue: int
    """Connections that wait in the kernel to be accepted."""
    late_ms: float
    """How late the server's event loop was at most in the last second."""


class Serving:
    """Servers for one engine.

    Args:
        service: what they serve; its token is made by `new_token`.
        port: of completions and administration; 0 picks one.
        admin_port: of a listener for administration alone, with a thread and an accept queue of its own; 0 picks
            one, None makes none.
        connections: how many connections each listener accepts at a time.

    Raises:
        PortInUse: something else listens on a port.
    """

    def __init__(
        self,
        service: GenerationService,
        port: int = 0,
        admin_port: int | None = None,
        connections: int = CONNECTIONS,
    ) -> None:
        host = own_address()
        sock = listen(host, port)
        try:
            admin_sock = None if admin_port is None else listen(host, admin_port)
        except LoomError:
            sock.close()
            raise
        self._main = Listener(create_app(service), sock, connections, "loom-generator-http")
        self.url = url_with_token(host, self._main.port, service.token)
        self.admin_url: str | None = None
        self._admin: Listener | None = None
        if admin_sock is not None:
            app = create_app(service, only_admin=True)
            self._admin = Listener(app, admin_sock, connections, "loom-generator-admin")
            self.admin_url = url_with_token(host, self._admin.port, service.token)

    @property
    def state(self) -> ServingState:
        """Where requests to the first server wait."""
        return ServingState(self._main.connections, self._main.accept_queue, self._main.late_ms)

    def close(self) -> None:
        """Stop serving."""
        for listener in (self._main, self._admin):
            if listener is not None:
                listener.close()


def new_token() -> str:
    """Return a random token."""
    return secrets.token_urlsafe(32)
