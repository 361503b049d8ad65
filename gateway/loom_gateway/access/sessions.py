"""`SessionAccess`: who may see, watch, command, drive, share and end which session.

A session belongs to the user whose token opened it. Others do not learn of it, unless its user shares it with them
or their token is of scope ``admin``.
"""

from __future__ import annotations

from dataclasses import dataclass

from loom.errors import LimitReached, NotFound, ScopeError, UnknownSession, WrongArguments
from loom.token_file import ADMIN, SCOPES, Token
from loom_gateway.access.audit import Audit
from loom_gateway.access.sign_ins import SignIn
from loom_gateway.sessions.directory import SessionDirectory
from loom_gateway.sessions.ended_sessions import EndedSession
from loom_gateway.sessions.session import UserSession

SHARED_SCOPES = SCOPES[:-1]
"""The scopes for which a session can be shared."""

MAX_SHARES = 1000
"""The number of users with whom a session can be shared."""

MAX_NAME = 300
"""The number of characters of a user's name at most; those of OpenID Connect are longer than those of the file."""


@dataclass(frozen=True)
class Principal:
    """The sender of an admitted request."""

    token: Token
    peer: str
    """The address that the connection came from."""
    sign_in: SignIn | None = None
    """The sign-in that a page shows in the token's place."""

    @property
    def user(self) -> str:
        """The user to whom the token, and the sessions opened with it, belong."""
        return self.token.user

    @property
    def is_admin(self) -> bool:
        """True if what belongs to other users is reachable, too."""
        return self.token.scope == ADMIN

    def right(self, session: UserSession | EndedSession) -> str | None:
        """Return the largest scope in which a session is reachable; None if it is not."""
        if self.is_admin or self.user == session.user:
            return self.token.scope
        given = session.shared.get(self.user)
        return None if given is None else min(given, self.token.scope, key=SCOPES.index)


class SessionAccess:
    """Decides about the sessions of a manager, and notes in an audit whom it refuses."""

    def __init__(self, audit: Audit) -> None:
        self.audit = audit
        self._manager: SessionDirectory

    def guard(self, manager: SessionDirectory) -> None:
        """Decide about the sessions of a manager from now on."""
        self._manager = manager

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

    def sessions(self, principal: Principal) -> list[UserSession]:
        """Return the living sessions that a principal may see: the user's own, and those shared with the user."""
        return [one for one in self._manager.sessions() if principal.right(one) is not None]

    def ended_sessions(self, principal: Principal) -> list[EndedSession]:
        """Return the sessions that have ended and that a principal could see."""
        return [one for one in self._manager.ended.all() if principal.right(one) is not None]

    def find_session(self, principal: Principal, name: str, scope: str, what: str) -> UserSession:
        """Return a living session for a principal who has a scope in it.

        Args:
            what: what the principal wants, for the error: ``to watch a session``.

        Raises:
            UnknownSession: there is none, or it is another user's and not shared: the text is the same.
            SessionLost: its driver has died.
            ScopeError: the principal's token, or the session's share, is of a smaller scope.
        """
        self._with_right(principal, name, scope, what)
        return self._manager.get(name)

    def find_own_session(self, principal: Principal, name: str, what: str) -> UserSession:
        """Return a living session of the principal's own, or for an admin any. Raise as `find_session`.

        Raises:
            ScopeError: it is shared with the principal.
        """
        user = self._with_right(principal, name, "view", what).user
        if not (principal.is_admin or user == principal.user):
            raise self._denied(principal, f"{what} is for {user!r}, whose session {name!r} is, and for an admin")
        self.require(principal, "operate", what)
        return self._manager.get(name)

    def find_readable(self, principal: Principal, name: str) -> UserSession | EndedSession:
        """Return a session, living or ended, whose log a principal may read. Raise as `find_session`."""
        return self._with_right(principal, name, "view", "to read a session's log")

    def _with_right(self, principal: Principal, name: str, scope: str, what: str) -> UserSession | EndedSession:
        session = self._manager.find(name)
        right = None if session is None else principal.right(session)
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
                f"Ask for more: `loom sessions share {name} {principal.user} --scope {scope}`",
            )
        return session

    async def share(self, principal: Principal, name: str, user: str, scope: str) -> UserSession:
        """Share a session of the principal's with a user, in a scope up to ``drive``, in place of the one before.

        Raises:
            WrongArguments: there is no such scope or user.
            LimitReached: the session is shared with `MAX_SHARES` users. Others: as `find_own_session`.
        """
        session = self.find_own_session(principal, name, "to share a session")
        if scope not in SHARED_SCOPES:
            raise WrongArguments(f"a session is shared for {', '.join(SHARED_SCOPES)}; not for {scope!r:.40}")
        if not user.isprintable() or not 0 < len(user) <= MAX_NAME:
            raise WrongArguments(f"a user has a name of 1 to {MAX_NAME} printable characters")
        if user == session.user:
            raise WrongArguments(f"session {name!r} is {user!r}'s own")
        self.require(principal, scope, f"to share a session for {scope}")
        if user not in session.shared and len(session.shared) >= MAX_SHARES:
            raise LimitReached(f"session {name!r} is shared with {MAX_SHARES} users: take one back first")
        await self._manager.share(session, user, scope)
        return session

    async def unshare(self, principal: Principal, name: str, user: str) -> UserSession:
        """Take back a share of a session.

        Raises:
            NotFound: the session is not shared with the user. Others: as `find_own_session`.
        """
        session = self.find_own_session(principal, name, "to take back a share of a session")
        if user not in session.shared:
            known = ", ".join(map(repr, session.shared)) or "nobody"
            raise NotFound(f"session {name!r} is not shared with {user!r}; it is with: {known}")
        await self._manager.share(session, user, None)
        return session

    def guest(self, principal: Principal, session: UserSession) -> str | None:
        """Return a principal's user if a session is shared with the user, and not the user's own or an admin's."""
        return None if principal.is_admin or principal.user == session.user else principal.user

    def check_shared(self, principal: Principal, session: UserSession | EndedSession, scope: str) -> None:
        """Raise `ScopeError` if a principal has not a scope in a session any more."""
        right = principal.right(session)
        if right is None or SCOPES.index(right) < SCOPES.index(scope):
            raise ScopeError(f"session {session.name!r} is not shared with you for {scope} any more")

    def _denied(self, principal: Principal, message: str) -> ScopeError:
        error = ScopeError(message)
        self.audit.refused(error, principal.token, principal.peer)
        return error
