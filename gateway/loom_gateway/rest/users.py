"""REST under ``/api/v1/users``: the users that there are, for an admin who chooses one."""

from __future__ import annotations

import asyncio
from collections import Counter

from fastapi import APIRouter
from pydantic import BaseModel

from loom.token_file import ADMIN
from loom.weaver.client import WeaverClient
from loom.weaver.keys import EVERYONE
from loom_gateway.access.control import AccessControl
from loom_gateway.rest.sessions import Sender


class UserInfo(BaseModel):
    """A user with replicas or sessions."""

    name: str
    replicas: int
    """The number of the user's replicas that are known, also of those that have ended."""
    sessions: int
    """The number of the user's living sessions."""


class UserList(BaseModel):
    """Users, by name."""

    users: list[UserInfo]


def user_routes(weaver: WeaverClient, access: AccessControl) -> APIRouter:
    """Return the route, which needs a token of scope admin."""
    router = APIRouter(prefix="/api/v1", tags=["sessions"])

    @router.get("/users")
    async def users(principal: Sender) -> UserList:
        """The users that have replicas or sessions. Needs a token of scope admin."""
        access.require(principal, ADMIN, "to list the users")
        sessions = Counter(one.user for one in access.sessions(principal))
        known = await weaver.ask("users", user=EVERYONE)
        states = await asyncio.gather(*(weaver.ask("status", user=user) for user in known))
        replicas = {user: sum(state["replicas"].values()) for user, state in zip(known, states, strict=True)}
        names = sorted(user for user in {*replicas, *sessions} if replicas.get(user) or sessions[user])
        return UserList(
            users=[UserInfo(name=one, replicas=replicas.get(one, 0), sessions=sessions[one]) for one in names]
        )

    return router
