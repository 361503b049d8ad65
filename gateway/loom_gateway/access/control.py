"""Access control: every request and every WebSocket passes `AccessControl.admit`.

A good token always comes in, whoever else shows wrong ones from the same address: laptops share an address behind
an ingress or NAT. The look-up of a token takes microseconds, so it comes first; only what is refused is counted.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from loom.errors import (
    AuthenticationError,
    LimitReached,
    LoomError,
    ProtocolMismatch,
    ScopeError,
    TokenRevoked,
    WrongArguments,
)
from loom.mutual_auth import checked_nonce
from loom.mutual_auth.over_http import key_id
from loom.process import tasks
from loom.process.tasks import Turns
from loom.token_file import REPORT, Token, digest
from loom.wire.handshake import MODES, Hello
from loom.wire.length_prefix import TUNNELS
from loom_gateway.access.audit import Audit
from loom_gateway.access.budgets import Budgets
from loom_gateway.access.credentials import credential_of
from loom_gateway.access.origins import Origins
from loom_gateway.access.rate_limits import ADDRESSES, Allowances, address_key
from loom_gateway.access.sessions import Principal, SessionAccess
from loom_gateway.access.sign_ins import SignIn, SignIns
from loom_gateway.access.token_authority import KeyWanted, SignedToken, TokenAuthority
from loom_gateway.sessions.directory import SessionDirectory
from loom_gateway.sessions.ended_sessions import EndedSession, SessionEnd
from loom_gateway.sessions.session import UserSession
from loom_gateway.settings import Limits

logger = logging.getLogger(__name__)

TICK = 1.0  # seconds between two checks of connected clients' tokens

_KEY_ID = re.compile("[0-9a-f]{32}")

Disconnect = Callable[[LoomError], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class _Connection:
    """A connection, which lasts as long as its principal's token and, if it is one to a session, right in it."""

    principal: Principal
    disconnect: Disconnect
    session: UserSession | EndedSession | None
    scope: str
    """The scope in the session that it needs."""


class AccessControl(SessionAccess):
    """Authenticates requests, limits their rate, and disconnects clients whose token was revoked.

    Args:
        origins: origins of web pages that may open WebSockets, such as ``https://host:8080``, besides the gateway's
            own.
        sign_ins: those of pages; None: they last as long as this process.
    """

    def __init__(
        self,
        authority: TokenAuthority,
        limits: Limits | None = None,
        audit: Audit | None = None,
        origins: Sequence[str] = (),
        sign_ins: SignIns | None = None,
    ) -> None:
        self.sign_ins = sign_ins or SignIns()
        self.limits = limits = limits or Limits()
        super().__init__(audit or Audit(None))
        self._authority = authority
        self.origins = Origins(origins)
        self.allowances = Allowances(limits)
        self.budgets = Budgets.of(limits.max_connections_per_user)
        self._signed: OrderedDict[str, None] = OrderedDict()  # digests of an issuer's good tokens, the newest last
        self._connected: dict[object, _Connection] = {}
        self._opening: Counter[str] = Counter()  # sessions being opened, by user

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
            token, sign_in = self._admit(scope, address_key(peer), counts)
            return Principal(token, peer, sign_in)
        except KeyWanted:  # `enter` finds out whether it is a refusal
            raise
        except LoomError as error:
            self.audit.refused(error, None, peer)
            raise

    def _admit(self, scope: MutableMapping[str, Any], address: str, counts: bool) -> tuple[Token, SignIn | None]:
        headers = scope["headers"]
        if scope["type"] == "websocket":
            self.origins.check(headers)
        try:
            shown = credential_of(headers, self.sign_ins.cookie)
        except AuthenticationError:
            if counts:
                self.allowances.count_connection(address)
            raise
        sign_in = None
        with self.allowances.counting_failures(address, counts):
            if shown.is_sign_in:
                if shown.in_cookie:
                    self.origins.check_page(scope)
                sign_in = self.sign_ins.read(shown.text)
                if sign_in.in_cookie != shown.in_cookie:
                    raise AuthenticationError("this sign-in was not made to be shown so: sign in again")
                token = self._authority.token_of(sign_in)
            else:
                token = self._check(shown.text, address)
        # Clients that come back to their sessions, perhaps hundreds after a restart, are never refused.
        if counts and scope["type"] == "http" and scope.get("path") != TUNNELS:
            self.allowances.count_connection(_counted_as(address, token))
        return token, sign_in

    def count_request(self, principal: Principal) -> None:
        """Count a request of a user. Raise `RateLimited` if there are too many."""
        self.allowances.count_connection(_counted_as(address_key(principal.peer), principal.token))

    def shows_nothing(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Return whether a request with these headers will be refused, as it shows no token, or an unknown one."""
        try:
            shown = credential_of(headers, self.sign_ins.cookie)
        except AuthenticationError:
            return True
        return not shown.is_sign_in and not self._authority.may_know(digest(shown.text), shown.text)

    async def exchange(self, peer: str, token: str | None, code: str | None) -> tuple[Principal, bool]:
        """Return who shows a token or a code to sign in, and whether a cookie may keep the sign-in.

        Raises: as `admit`; `WrongArguments` unless one of the two is shown.
        """
        address = address_key(peer)
        if (token is None) == (code is None):
            raise WrongArguments("to sign in, show a token or a code")
        try:
            with self.allowances.counting_failures(address):
                if code is not None:
                    begun = await self.sign_ins.use_code(code)
                    return Principal(self._authority.token_of(begun), peer), begun.in_cookie
                try:
                    return Principal(self._check(str(token), address), peer), True
                except KeyWanted as wanted:
                    await wanted.fetch()
                    return Principal(self._check(str(token), address), peer), True
        except LoomError as error:
            self.audit.refused(error, None, peer)
            raise

    async def sign_in(self, principal: Principal, in_cookie: bool) -> tuple[SignIn, str]:
        """Sign a page in, for a principal of `exchange`; return the sign-in and the text that the page shows."""
        token = principal.token
        if token.scope == REPORT:
            raise ScopeError(f"this token reports the status of the replica {token.replica!r} alone")
        await self.audit.ask(token, principal.peer, page="sign in")
        sign_in, text = self.sign_ins.begin(token, key_id(token.sha256), in_cookie, _issuer_key(token))
        await self.audit.write("signed in", token, principal.peer, sign_in=sign_in.id)
        return sign_in, text

    async def new_code(self, principal: Principal, scope: str | None, in_cookie: bool) -> tuple[str, float]:
        """Do as `SignIns.new_code`, for a principal with a token."""
        token = principal.token
        return await self.sign_ins.new_code(token, key_id(token.sha256), scope, in_cookie, _issuer_key(token))

    def revoked(self) -> Mapping[str, None]:
        """Return the ids of the tokens that this gateway's token file says are revoked."""
        return dict.fromkeys(self._authority.revoked)

    async def learn_revoked(self, idents: Mapping[str, None]) -> None:
        """Refuse tokens that the file of another gateway says are revoked, and disconnect their clients."""
        self._authority.learn_revoked(idents)
        self._disconnect_denied()

    async def sign_out(self, principal: Principal) -> None:
        """Refuse a page's sign-in from now on, and close its WebSocket."""
        assert principal.sign_in is not None
        await self.sign_ins.end(principal.sign_in)
        await self.audit.write("signed out", principal.token, principal.peer, sign_in=principal.sign_in.id)
        self._disconnect_denied()

    def _check(self, text: str, address: str) -> Token:
        """Return the record of a token. Raise as `TokenAuthority.check`, and `RateLimited`."""
        shown = digest(text)
        if not self._authority.needs_signature(shown, text):
            return self._authority.check(shown)
        if shown not in self._signed:
            self.allowances.count_signature(address)
        token = self._authority.check(shown, text)
        self._signed[shown] = None
        self._signed.move_to_end(shown)
        if len(self._signed) > ADDRESSES:
            self._signed.popitem(last=False)
        return token

    def prove(self, key: str, challenge: str, peer: str) -> dict[str, str]:
        """Return the gateway's proof that it knows a token; see `loom.mutual_auth`. Nobody needs a token to ask.

        Raises:
            WrongArguments: the key is not of the form that a client sends.
            ProtocolMismatch: the challenge is not, or is of another version of the proof.
            AuthenticationError: no good token has the key; `RateLimited` if an address asks for too many such keys.
        """
        if not _KEY_ID.fullmatch(key):
            raise WrongArguments("a proof needs key=…, of 32 hexadecimal digits, and challenge=…")
        checked_nonce(challenge)
        with self.allowances.counting_failures(address_key(peer)):
            try:
                return self._authority.prove(key, challenge)
            except AuthenticationError as error:
                self.audit.refused(error, None, peer)
                raise

    async def check_hello(self, principal: Principal, hello: Hello) -> UserSession | None:
        """Return the session that a hello asks for, if its client may have it; None if it asks for a new one.

        Raises: as `find_session` and `SessionDirectory.look_up`.
        """
        if hello.mode not in MODES or (hello.mode != "drive" and hello.session is None):
            raise ProtocolMismatch(
                f"a client drives, or it watches, debugs or calls a session that there is; not {hello.mode!r:.40}"
            )
        scope, what = scope_of(hello), f"to {hello.mode} a session"
        if hello.session is not None:
            await self._manager.look_up(hello.session)
            session = self.find_session(principal, hello.session, scope, what)
        else:
            session = None
            self.require(principal, scope, what)
        if not hello.stream:  # what comes back goes on with what was written down
            name = hello.session or "a new one"
            await self.audit.ask(principal.token, principal.peer, session=name, mode=hello.mode)
        return session

    @contextmanager
    def opening(self, principal: Principal) -> Iterator[None]:
        """Count a new session while it is being opened. Raise `LimitReached` if the user has all that one may."""
        user = principal.user
        most = self.limits.max_sessions
        has = sum(session.user == user for session in self._manager.sessions()) + self._opening[user]
        if most and has >= most:
            error = LimitReached(
                f"the user {user!r} has {has} sessions, and --max-sessions allows {most} to each: end "
                f"one (`loom sessions list`, `loom sessions end NAME`) or attach to it with session=…"
            )
            self.audit.refused(error, principal.token, principal.peer)
            raise error
        self._opening[user] += 1
        try:
            yield
        finally:
            self._opening[user] -= 1
            if not self._opening[user]:
                del self._opening[user]

    @contextmanager
    def connected(
        self,
        principal: Principal,
        disconnect: Disconnect,
        session: UserSession | EndedSession | None = None,
        scope: str = "view",
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

    def confirm(self, principal: Principal, now: float | None = None) -> None:
        """Raise `TokenRevoked` if a principal's token or sign-in was revoked, or has expired.

        ``now`` is the time of day for what has to survive its jumps; else it is the machine's.
        """
        if principal.sign_in is not None:
            self.sign_ins.confirm(principal.sign_in, now)
        self._authority.confirm_shown(principal.token, now)

    def confirm_right(self, principal: Principal, session: UserSession | EndedSession, scope: str) -> None:
        """Check that a principal who had a scope in a session still has it.

        Raises:
            TokenRevoked: the token was revoked or has expired.
            ScopeError: the session is not shared with the principal any more.
        """
        self.confirm(principal)
        self.check_shared(principal, session, scope)

    def has_right(self, principal: Principal, session: UserSession | EndedSession, scope: str) -> bool:
        """Return whether `confirm_right` would raise nothing."""
        try:
            self.confirm_right(principal, session, scope)
        except (TokenRevoked, ScopeError):
            return False
        return True

    async def share(self, principal: Principal, name: str, user: str, scope: str) -> UserSession:
        """Do as `SessionAccess.share`, and disconnect the clients for whom the share has become too small."""
        session = await super().share(principal, name, user, scope)
        self._disconnect_denied()
        return session

    async def unshare(self, principal: Principal, name: str, user: str) -> UserSession:
        """Do as `SessionAccess.unshare`, and disconnect the clients that the share let in."""
        session = await super().unshare(principal, name, user)
        self._disconnect_denied()
        return session

    def _disconnect_denied(self) -> None:
        """Disconnect clients whose token or share of a session is not valid any more."""
        for key in list(self._connected):
            self._disconnect_if_denied(key)

    def _disconnect_if_denied(self, key: object) -> None:
        if (connection := self._connected.get(key)) is None:
            return
        principal = connection.principal
        try:
            if connection.session is None:
                self.confirm(principal)
            else:
                self.confirm_right(principal, connection.session, connection.scope)
        except (TokenRevoked, ScopeError) as error:
            del self._connected[key]
            self.audit.put("cut off", principal.token, principal.peer, message=str(error))
            tasks.run("disconnect a client", connection.disconnect(error))

    async def watch(self, manager: SessionDirectory) -> None:
        """Disconnect clients that may not stay, and end the sessions of revoked tokens. Never returns."""
        while True:
            await asyncio.sleep(TICK)
            self._authority.refresh()
            self.audit.tick()
            turns = Turns()  # with thousands of clients it takes long, and this loop relays their frames
            for key in list(self._connected):
                self._disconnect_if_denied(key)
                await turns.rest()
            for session in manager.sessions():
                await turns.rest()
                try:
                    self._authority.confirm_any(session.tokens)
                except TokenRevoked as error:
                    if not session.is_ending:
                        tasks.run("end a session", manager.end(session, str(error).partition(":")[0]))

    @contextmanager
    def inside(self, principal: Principal, session: UserSession, hello: Hello) -> Iterator[None]:
        """Note in the audit that a client enters and leaves a session."""
        if hello.stream:
            event = "resumed"
        elif hello.session is None:
            event = "opened"
        else:
            event = {"watch": "watched", "debug": "debugged", "ranks": "reached", "call": "called"}.get(
                hello.mode, "drove"
            )
        details = {"session": session.name, "client": hello.client[:100], "took_over": hello.take_over}
        self.audit.put(event, principal.token, principal.peer, **details)
        try:
            yield
        finally:
            self.audit.put("left", principal.token, principal.peer, session=session.name)

    def session_ended(self, end: SessionEnd) -> Future[None]:
        """Note a session's end in the audit; return what is done once the disk has, or refuses, it."""
        return self.audit.put("ended", None, "", **asdict(end))


def scope_of(hello: Hello) -> str:
    """Return the scope in its session that a client needs."""
    return MODES[hello.mode]


def _issuer_key(token: Token) -> str:
    return token.key if isinstance(token, SignedToken) else ""


def _counted_as(address: str, token: Token) -> str:
    """Return the name under which a token's requests are counted: its user's, or its replica's if it has one."""
    return f"{address} {token.user}" if token.replica is None else f"{address} {token.user} {token.replica}"
