"""Access control: every request and every WebSocket passes `AccessControl.admit`.

Refusals are cheap, and are checked in this order: too many requests from an address, a web page of another origin,
too many wrong tokens from an address, and at last an unknown token.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from loom.errors import (
    AuthenticationError,
    LimitReached,
    LoomError,
    OriginRefused,
    ProtocolMismatch,
    RateLimited,
    ScopeError,
    TokenRevoked,
)
from loom.token_file import SCOPES, Token, digest
from loom.wire.handshake import Hello
from loom_gateway.access.audit import Audit
from loom_gateway.access.rate_limits import ADDRESSES, RateLimit, address_key
from loom_gateway.access.tokens import KeyWanted, TokenAuthority, token_shown
from loom_gateway.sessions.manager import SessionManager
from loom_gateway.sessions.session import Session
from loom_gateway.settings import Limits

logger = logging.getLogger(__name__)

BURST = 5.0  # the number of seconds whose allowance of connections an address may use at once
TICK = 1.0  # seconds between two checks of connected clients' tokens

Disconnect = Callable[[LoomError], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Principal:
    """The sender of an admitted request."""

    token: Token
    peer: str
    """The address that the connection came from."""


class AccessControl:
    """Authenticates requests, limits their rate, and disconnects clients whose token was revoked.

    Args:
        origins: origins of web pages that may open WebSockets, such as ``https://host:8080``, besides the gateway's
            own.
    """

    def __init__(
        self,
        authority: TokenAuthority,
        limits: Limits | None = None,
        audit: Audit | None = None,
        origins: Sequence[str] = (),
    ) -> None:
        self.limits = limits = limits or Limits()
        self.audit = audit or Audit(None)
        self._authority = authority
        self._origins = frozenset(origin.lower().rstrip("/") for origin in origins)
        self._connections = RateLimit(limits.connection_rate * BURST, limits.connection_rate)
        self._failures = RateLimit(limits.login_failures, limits.login_failures / limits.login_window)
        # Address and digest of each token that was accepted from there, the newest last.
        self._known: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._connected: dict[object, tuple[Principal, Disconnect]] = {}
        self._opening: Counter[str] = Counter()  # sessions being opened, by token

    async def enter(self, scope: MutableMapping[str, Any], counts: bool = True) -> Principal:
        """Do as `admit`, but first fetch the key that signed the token if it is new."""
        try:
            return self.admit(scope, counts)
        except KeyWanted as wanted:
            await wanted.fetch()
            return self.admit(scope, counts=False)

    def admit(self, scope: MutableMapping[str, Any], counts: bool = True) -> Principal:
        """Authenticate a request or a WebSocket, given its ASGI scope.

        Args:
            counts: whether it counts as a connection; False for later requests of a tunnel.
        """
        client = scope.get("client")
        peer = str(client[0]) if client else ""
        try:
            return Principal(self._admit(scope, address_key(peer), counts), peer)
        except KeyWanted:  # `enter` finds out whether it is a refusal
            raise
        except LoomError as error:
            self.audit.refused(error, None, peer)
            raise

    def _admit(self, scope: MutableMapping[str, Any], address: str, counts: bool) -> Token:
        if counts:
            if wait := self._connections.wait(address):
                limit = f"--connection-rate {self.limits.connection_rate:g} a second from one address"
                raise _too_often(limit, wait)
            self._connections.count(address)
        headers = scope["headers"]
        if scope["type"] == "websocket":
            self._check_origin(headers)
        text = token_shown(headers)
        shown = digest(text)
        # An address with a known good token is not refused because of its neighbours' wrong tokens.
        if (address, shown) not in self._known and (wait := self._failures.wait(address)):
            limits = self.limits
            what = f"--login-failures {limits.login_failures} within {limits.login_window:g} s from one address"
            raise _too_often(what, wait)
        try:
            token = self._authority.check(shown, text)
        except TokenRevoked:  # not a guess, so it does not count as a failure
            raise
        except AuthenticationError:
            self._failures.count(address)
            raise
        self._known[address, shown] = None
        self._known.move_to_end((address, shown))
        if len(self._known) > ADDRESSES:
            self._known.popitem(last=False)
        return token

    def _check_origin(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        given = {name.lower(): value.decode("latin-1") for name, value in headers}
        origin = given.get(b"origin")
        if origin is None:  # not a browser
            return
        own = urlsplit(origin).netloc.lower()
        if origin.lower() not in self._origins and (not own or own != given.get(b"host", "").lower()):
            raise OriginRefused(
                f"a web page of {origin[:200]!r} may not connect; the gateway allows its own host and what "
                f"--allow-origin names"
            )

    def check_hello(self, principal: Principal, hello: Hello) -> None:
        """Check that a client may do what its hello asks for, and that this exists."""
        if hello.mode == "watch" and hello.session is not None:
            self.require(principal, "view", "to watch a session")
        elif hello.mode == "drive":
            self.require(principal, "drive", "to drive a session")
        else:
            raise ProtocolMismatch(f"a client drives, or watches a session that there is; not {hello.mode!r:.40}")

    def require(self, principal: Principal, scope: str, what: str) -> None:
        """Raise `ScopeError` if the scope of a principal's token is too small for ``what``."""
        token = principal.token
        if SCOPES.index(token.scope) < SCOPES.index(scope):
            error = ScopeError(
                f"{what} needs a token of scope {scope}; this one ({token.name!r}) has scope {token.scope}. "
                f"Ask for another: `loom token create --scope {scope}`"
            )
            self.audit.refused(error, token, principal.peer)
            raise error

    @contextmanager
    def opening(self, principal: Principal, sessions: Sequence[Session]) -> Iterator[None]:
        """Count a new session while it is being opened. Raise `LimitReached` if the token has all that it may."""
        token = principal.token
        most = self.limits.max_sessions
        has = sum(session.owner == token.id for session in sessions) + self._opening[token.id]
        if most and has >= most:
            error = LimitReached(
                f"the token {token.name!r} has {has} sessions, and --max-sessions allows {most}: end "
                f"one (`loom sessions list`, `loom sessions end NAME`) or attach to it with session=…"
            )
            self.audit.refused(error, token, principal.peer)
            raise error
        self._opening[token.id] += 1
        try:
            yield
        finally:
            self._opening[token.id] -= 1
            if not self._opening[token.id]:
                del self._opening[token.id]

    @contextmanager
    def connected(self, principal: Principal, disconnect: Disconnect) -> Iterator[None]:
        """Call ``disconnect`` if a connected principal's token is revoked or expires."""
        key = object()
        self._connected[key] = (principal, disconnect)
        try:
            yield
        finally:
            self._connected.pop(key, None)

    def confirm(self, principal: Principal) -> None:
        """Raise `TokenRevoked` if a principal's token was revoked or has expired."""
        self._authority.confirm_shown(principal.token)

    async def watch(self, manager: SessionManager) -> None:
        """Disconnect clients whose token was revoked or has expired, and end their sessions. Never returns."""
        while True:
            await asyncio.sleep(TICK)
            self._authority.refresh()
            self.audit.tick()
            for key, (principal, disconnect) in list(self._connected.items()):
                try:
                    self.confirm(principal)
                except TokenRevoked as error:
                    del self._connected[key]
                    self.audit.write("cut off", principal.token, principal.peer, message=str(error))
                    manager.background(disconnect(error))
            for session in manager.sessions():
                try:
                    self._authority.confirm(session.owner)
                except TokenRevoked as error:
                    if not session.is_ending:
                        manager.background(manager.end(session, str(error).partition(":")[0]))

    @contextmanager
    def inside(self, principal: Principal, session: Session, hello: Hello) -> Iterator[None]:
        """Note in the audit that a client enters and leaves a session."""
        if hello.stream:
            event = "resumed"
        elif hello.session is None:
            event = "opened"
        else:
            event = "watched" if hello.mode == "watch" else "drove"
        details = {"session": session.name, "client": hello.client[:100], "took_over": hello.take_over}
        self.audit.write(event, principal.token, principal.peer, **details)
        try:
            yield
        finally:
            self.audit.write("left", principal.token, principal.peer, session=session.name)

    def session_ended(self, session: Session) -> None:
        reason = session.driver.reason or "its driver ended by itself"
        details = {"session": session.name, "reason": reason, "exit_code": session.driver.exit_code}
        self.audit.write("ended", None, "", opened_by=session.owner, **details)


def _too_often(limit: str, wait: float) -> RateLimited:
    return RateLimited(f"the gateway allows {limit}; try again in {math.ceil(wait)} s", wait)
