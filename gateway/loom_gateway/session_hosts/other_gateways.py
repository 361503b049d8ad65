"""`OtherGateways`, to which a gateway passes on the requests of their HTTP tunnels, by lines as to session hosts.

The requests of one tunnel may come to any gateway of the same session hosts. A tunnel's name says where its gateway
is, with a MAC, so that no client can have a gateway connect elsewhere.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import socket
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass

from starlette.responses import Response

from loom.errors import ConnectionLost, Denied
from loom.process.listen import bracketed
from loom_gateway.session_hosts.line import Line, LineServer, Request, known_fields, open_line

ANSWER_TIMEOUT = 40.0
"""Seconds that the other gateway has for an answer, which it may hold back for 25 s; and that a body may take."""


@dataclass(frozen=True)
class TunnelRequest:
    """A request of a tunnel's client, without its body."""

    kind: str
    """``up``, ``down`` or ``close``."""
    tunnel: str
    token: str
    """The id of the client's token."""
    number: int
    """The number of the batch; 0: none."""


class OtherGateways:
    """The other gateways of the same session hosts.

    Args:
        listener: where they connect to this one.
        key: the session hosts'.
    """

    def __init__(self, listener: socket.socket, key: str) -> None:
        host, port = listener.getsockname()[:2]
        self._here = f"tcp://{bracketed(host)}:{port}"
        self._listener = listener
        self._key = key
        self._server = LineServer(key, self._serve)
        self.answer: Callable[[TunnelRequest, bytes], Awaitable[Response]]
        """Answers a request of a tunnel of this gateway."""

    async def start(self) -> None:
        await self._server.start(self._listener)

    def close(self) -> None:
        self._server.close()

    def new_name(self) -> str:
        """Return the name of a new tunnel of this gateway."""
        return self._signed(f"{base64.urlsafe_b64encode(self._here.encode()).decode()}.{secrets.token_urlsafe(24)}")

    def _signed(self, text: str) -> str:
        return f"{text}.{hmac.new(self._key.encode(), f'loom tunnel {text}'.encode(), hashlib.sha256).hexdigest()}"

    def place_of(self, name: str) -> str | None:
        """Return the address of the gateway that has a tunnel; None if no other one has it."""
        text = name.rpartition(".")[0]
        if not name.isascii() or not hmac.compare_digest(self._signed(text), name):
            return None
        place = base64.urlsafe_b64decode(text.partition(".")[0]).decode()
        return None if place == self._here else place

    async def ask(self, place: str, request: TunnelRequest, body: bytes) -> Response:
        """Return another gateway's answer to a request of its tunnel, or raise its error.

        Raises:
            ConnectionLost: it gives none.
        """
        try:
            line = await open_line(place, self._key, Request("tunnel", asdict(request)))
        except (ConnectionLost, Denied) as error:
            raise ConnectionLost(f"the gateway at {place}, which has this tunnel, does not answer") from error
        try:
            line.send(body)
            status, headers, content = await line.take(ANSWER_TIMEOUT)
            return Response(content, status, headers)
        finally:
            line.close()

    async def _serve(self, line: Line, request: Request) -> None:
        asked = known_fields(TunnelRequest, request.about)
        body = bytes(await line.take(ANSWER_TIMEOUT))
        try:
            answer = await self.answer(asked, body)
        except ConnectionLost as error:  # of the tunnel, and not of this line
            return line.refuse(error)
        line.send([answer.status_code, dict(answer.headers), bytes(answer.body)])
        await line.drained()
