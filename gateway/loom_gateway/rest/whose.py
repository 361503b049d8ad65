"""Whose replicas a request is about."""

from __future__ import annotations

from loom.errors import NotFound, WrongArguments
from loom.token_file import ADMIN
from loom.weaver.client import WeaverClient
from loom.weaver.keys import EVERYONE
from loom.weaver.views import few
from loom_gateway.access.control import AccessControl
from loom_gateway.access.sessions import Principal


async def whose(
    principal: Principal,
    user: str | None,
    session: str | None,
    scope: str,
    access: AccessControl,
    weaver: WeaverClient,
) -> dict[str, str]:
    """Return whose replicas a request is about, as arguments for `WeaverClient.ask`.

    These are the principal's own; for an admin those of the named user, or with ``*`` everyone's; with a session,
    the replicas of that session only, in which the principal needs the scope.

    Raises:
        WrongArguments: both a user and a session are named.
        ScopeError: the principal names another user and is no admin. Also as `AccessControl.find_session`.
        NotFound: the weaver knows no user of that name.
    """
    if session is not None:
        if user is not None:
            raise WrongArguments("name a user or a session: a session is of one user")
        found = access.find_session(principal, session, scope, "to reach a session's replicas")
        return {"user": found.user, "in_session": found.name}
    own = principal.user
    if user is None or user == own:
        return {"user": own}
    access.require(principal, ADMIN, "to name another user")
    if user == "*":
        return {"user": EVERYONE}
    known = await weaver.ask("users", user=EVERYONE)
    if user not in known:
        raise NotFound(f"the weaver knows no user {user!r:.80}; it knows {few(known)}")
    return {"user": user}
