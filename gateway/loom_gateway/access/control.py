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
    UnknownSession,
)
from loom.token_file import SCOPES, Token, digest
from loom.wire.handshake import Hello
from loom_gateway.access.audit import Audit
from loom_gateway.access.rate_limits import ADDRESSES, RateLimit, address_key
from loom_gateway.access.tokens import Identity, KeyWanted, TokenAuthority, token_shown
from loom_gateway.sessions.history import EndedSession
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

    @property
    def identity(self) -> Identity:
        """The user, and what the token allows."""
        return Identity.of(self.token)


@dataclass(frozen=True)
class _Connection:
    """A connection, which lasts as long as its principal's token and, if it is one to a session, right in it."""

    principal: Principal
    disconnect: Disconnect
    session: Session | None
    scope: str
    """The scope in the session that it needs."""


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
        self._connected: dict[object, _Connection] = {}
        self._opening: Counter[str] = Counter()  # sessions being opened, by token
        self._manager: SessionManager

    def guard(self, manager: SessionManager) -> None:
        """Decide about the sessions of a manager from now on."""
        self._manager = manager

    def user_of(self, owner: str) -> str:
        """Return the user of the token with an id."""
        return self._authority.user_of(owner)

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

    def sessions(self, principal: Principal) -> list[Session]:
        """Return the living sessions that a principal may see: the user's own, and those shared with the user."""
        seen = self._manager.sessions()
        return [one for one in seen if principal.identity.right(one.user, one.shared) is not None]

    def ended_sessions(self, principal: Principal) -> list[EndedSession]:
        """Return the sessions that have ended and that a principal could see."""
        seen = self._manager.ended.all()
        return [one for one in seen if principal.identity.right(one.user, one.shared) is not None]

    def find_session(self, principal: Principal, name: str, scope: str, what: str) -> Session:
        """Return a living session for a principal who has a scope in it.

        Args:
            what: what the principal wants, for the error: ``to watch a session``.

        Raises:
            UnknownSession: there is none, or it is another user's and not shared: the text is the same.
            SessionLost: its driver has died.
            ScopeError: the principal's token, or the session's share, is of a smaller scope.
        """
        self.check_right(principal, name, scope, what)
        return self._manager.get(name)

    def find_own_session(self, principal: Principal, name: str, what: str) -> Session:
        """Return a living session of the principal's own, or for an admin any. Raise as `find_session`.

        Raises:
            ScopeError: it is shared with the principal.
        """
        user = self.check_right(principal, name, "operate", what)
        if not (principal.identity.is_admin or user == principal.identity.user):
            raise self._denied(principal, f"only {user!r}, whose session {name!r} is, may do this: {what}")
        return self._manager.get(name)

    def check_right(self, principal: Principal, name: str, scope: str, what: str) -> str:
        """Return the user of a session, living or ended, in which a principal has a scope.

        Raises:
            UnknownSession: there is none for the principal.
            ScopeError: the principal's token, or the session's share, is of a smaller scope.
        """
        identity = principal.identity
        session = self._manager.find(name)
        right = None if session is None else identity.right(session.user, session.shared)
        if session is None or right is None:
            seen = ", ".join(repr(other.name) for other in self.sessions(principal)) or "none"
            error = UnknownSession(f"no session named {name!r}; living sessions: {seen}. It may have ended.")
            if session is not None:
                self.audit.refused(error, principal.token, principal.peer)
            raise error
        self.require(principal, scope, what)
        if SCOPES.index(right) < SCOPES.index(scope):
            raise self._denied(
                principal,
                f"{what} needs scope {scope}; {session.user!r} shares session {name!r} with you for {right}. "
                f"Ask for more: `loom sessions share {name} {identity.user} --scope {scope}`",
            )
        return session.user

    def _denied(self, principal: Principal, message: str) -> ScopeError:
        error = ScopeError(message)
        self.audit.refused(error, principal.token, principal.peer)
        return error

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
    def connected(
        self, principal: Principal, disconnect: Disconnect, session: Session | None = None, scope: str = "view"
    ) -> Iterator[None]:
        """Call ``disconnect`` if a connected principal's token is revoked or expires.

        Also if the principal has not the scope in the session any more, because its owner took the share back.
        """
        key = object()
        self._connected[key] = _Connection(principal, disconnect, session, scope)
        try:
            yield
        finally:
            self._connected.pop(key, None)

    def confirm(self, principal: Principal) -> None:
        """Raise `TokenRevoked` if a principal's token was revoked or has expired."""
        self._authority.confirm_shown(principal.token)

    def confirm_right(self, principal: Principal, session: Session | EndedSession, scope: str) -> None:
        """Raise `TokenRevoked` as `confirm`, and `ScopeError` if a principal lost a scope in a session."""
        self.confirm(principal)
        right = principal.identity.right(session.user, session.shared)
        if right is None or SCOPES.index(right) < SCOPES.index(scope):
            raise ScopeError(f"session {session.name!r} is not shared with you for {scope} any more")

    async def watch(self, manager: SessionManager) -> None:
        """Disconnect clients whose token was revoked or has expired, and end their sessions. Never returns."""
        while True:
            await asyncio.sleep(TICK)
            self._authority.refresh()
            self.audit.tick()
            for key, connection in list(self._connected.items()):
                principal = connection.principal
                try:
                    if connection.session is None:
                        self.confirm(principal)
                    else:
                        self.confirm_right(principal, connection.session, connection.scope)
                except (TokenRevoked, ScopeError) as error:
                    del self._connected[key]
                    self.audit.write("cut off", principal.token, principal.peer, message=str(error))
                    manager.background(connection.disconnect(error))
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
