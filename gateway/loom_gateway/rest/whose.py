"""Whose replicas a request is about."""

from __future__ import annotations

from loom.errors import NotFound
from loom.token_file import ADMIN
from loom.weaver.client import WeaverClient
from loom.weaver.keys import EVERYONE
from loom.weaver.views import few
from loom_gateway.access.control import AccessControl
from loom_gateway.access.sessions import Principal


async def whose(principal: Principal, user: str | None, access: AccessControl, weaver: WeaverClient) -> str:
    """Return the user that a request is about: the principal's own, or for an admin the named one; ``*``: everyone.

    Raises:
        ScopeError: the principal names another user and is no admin.
        NotFound: the weaver knows no user of that name.
    """
    own = principal.user
    if user is None or user == own:
        return own
    access.require(principal, ADMIN, "to name another user")
    if user == "*":
        return EVERYONE
    known = await weaver.ask("users", user=EVERYONE)
    if user not in known:
        raise NotFound(f"the weaver knows no user {user!r:.80}; it knows {few(known)}")
    return user
