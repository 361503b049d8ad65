"""REST under ``/api/v1/sessions``: the sessions, their meshes, runs and logs, and with whom they are shared."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, TypeAdapter

from loom.control.operations import GetStatus, GetUsers
from loom.errors import LoomError, UnknownSession
from loom.process.tasks import Turns
from loom.session_alive import AliveBecause
from loom.token_file import ADMIN
from loom.tracing.collecting import LONGEST
from loom.weaver.client import WeaverClient
from loom.weaver.keys import EVERYONE
from loom_gateway.access.control import AccessControl
from loom_gateway.access.middleware import DONE
from loom_gateway.access.sessions import MAX_NAME, Principal
from loom_gateway.relay.spans import RelayedCalls
from loom_gateway.sessions.descriptions import SessionMeshes, SessionRuns, SessionTensors
from loom_gateway.sessions.directory import SessionDirectory
from loom_gateway.sessions.ended_sessions import EndedSession, EndedSessionInfo
from loom_gateway.sessions.logs import LogQuery
from loom_gateway.sessions.session import SessionState, UserSession, ask_lives


class SessionInfo(BaseModel):
    """A living session."""

    model_config = ConfigDict(from_attributes=True)

    name: str
    state: SessionState
    client_connected: bool
    created_at: float
    """Seconds since the epoch."""
    pid: int
    """The process id of the session's driver."""
    operations: int
    """The number of frames that clients have sent."""
    persist: bool
    """True if the session never ends for lack of a client."""
    user: str
    """The user to whom the session belongs."""
    shared: dict[str, str]
    """The users with whom it is shared, each with the scope: view, operate or drive."""
    alive_because: Sequence[AliveBecause] = ()
    """The reasons for which it lives; empty if its driver has not told them."""
    lives_until: float | None = None
    """When it ends unless a client comes or something begins, in seconds since the epoch. None if nobody knows that
    yet, because something goes on, or if it lives until it is ended."""


_ENDED = TypeAdapter(EndedSessionInfo)


class Share(BaseModel, extra="forbid"):
    """A user's rights in another user's session."""

    scope: Literal["view", "operate", "drive"]
    """view reads and watches; operate also sends commands; drive also attaches and takes over."""


class SessionList(BaseModel):
    """Sessions that are the caller's own or shared with the caller, for an admin all; oldest first."""

    sessions: list[SessionInfo]
    """The living sessions."""
    ended: Sequence[EndedSessionInfo] = ()
    """The last hundred ended sessions of each user, if the request asked for them."""


def _sender(request: Request) -> Principal:
    principal: Principal = request.scope["loom.principal"]
    return principal


Sender = Annotated[Principal, Depends(_sender)]
"""The sender of a request."""


_UNBUFFERED = {"x-accel-buffering": "no"}
"""Has nginx pass each line on as it comes, and not when it has several kilobytes."""

_NOT_DESCRIBED: dict[int | str, dict[str, Any]] = {
    404: {"description": "No living session of the caller's, or shared with the caller, has this name."},
    410: {"description": "The session's driver has died."},
    503: {"description": "The session's driver is starting or ending, or too busy to answer within seconds."},
}

_SHARE_REFUSALS: dict[int | str, dict[str, Any]] = {
    403: {"description": "The session is another user's, who shares it with the caller."},
    404: {"description": "The caller has no living session of this name, or it is not shared with the user."},
}


def session_routes(manager: SessionDirectory, access: AccessControl) -> APIRouter:
    """Return the routes. `AccessControl` decides whose sessions a caller sees and may end."""
    router = APIRouter(prefix="/api/v1/sessions")

    @router.get("", response_model=SessionList)
    async def list_sessions(principal: Sender, ended: bool = False) -> Response:
        """The living sessions that the caller may see and, with ``ended``, the last ended ones, with reasons."""
        shown = access.sessions(principal)
        await ask_lives(shown)
        text = await _session_list(shown, access.ended_sessions(principal) if ended else [])
        return Response(text, media_type="application/json")

    @router.delete(
        "/{name}",
        responses={
            404: {"description": "No living session has this name."},
            410: {"description": "The session's driver has died."},
        },
    )
    async def end_session(name: str, principal: Sender) -> SessionInfo:
        """End a session of the caller's own: stop its meshes on every host. The answer comes when they are stopped.

        An admin may end any session.
        """
        session = access.find_own_session(principal, name, "to end a session")
        await manager.end(session, "it was ended over REST")
        return SessionInfo.model_validate(session)

    @router.get("/{name}/meshes", response_model=SessionMeshes, responses=_NOT_DESCRIBED)
    async def meshes(name: str, principal: Sender) -> Response:
        """The hosts, processes and actors of a living session as a tree, with their states and their calls."""
        session = access.find_session(principal, name, "view", "to see a session's meshes")
        return Response(await session.questions.meshes(), media_type="application/json")

    @router.get("/{name}/runs", response_model=SessionRuns, responses=_NOT_DESCRIBED)
    async def runs(name: str, principal: Sender) -> Response:
        """The functions that `Job.run` runs or has run in a living session. `/logs?run=ID` has what one prints."""
        session = access.find_session(principal, name, "view", "to see a session's runs")
        return Response(await session.questions.runs(), media_type="application/json")

    @router.get("/{name}/tensors", response_model=SessionTensors, responses=_NOT_DESCRIBED)
    async def tensors(name: str, principal: Sender) -> Response:
        """The tensors that `lt.watch` watches in a living session: norms over the steps, and newest histograms."""
        session = access.find_session(principal, name, "view", "to see a session's tensors")
        return Response(await session.questions.tensors(), media_type="application/json")

    @router.get(
        "/{name}/spans",
        responses={
            404: {"description": "No living session of the caller's, or shared with the caller, has this name."},
            429: {"description": "The calls of the session are being observed already."},
        },
    )
    async def spans(
        name: str, request: Request, principal: Sender, seconds: Annotated[float, Query(gt=0, le=LONGEST)] = 10.0
    ) -> Response:
        """The calls that the gateway passes on for a session while the request waits, for `loom trace`."""
        session = access.find_session(principal, name, "view", "to see a session's spans")
        relayed = RelayedCalls(session.traffic)
        ends = [asyncio.ensure_future(session.over.wait()), asyncio.ensure_future(_client_gone(request))]
        try:
            done, _ = await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            relayed.stop()
            for end in ends:
                end.cancel()
        if not done:
            access.confirm_right(principal, session, "view")
        found = await asyncio.to_thread(lambda: json.dumps(relayed.spans()))
        return Response(found, media_type="application/json")

    @router.put("/{name}/shares/{user:path}", responses=_SHARE_REFUSALS)
    async def share(name: str, user: str, share: Share, request: Request, principal: Sender) -> SessionInfo:
        """Share a session of the caller's own with a user, or change what the user may do in it."""
        request.scope[DONE] = ("shared", {"session": name[:200], "with": user[:MAX_NAME], "for": share.scope})
        return SessionInfo.model_validate(await access.share(principal, name, user, share.scope))

    @router.delete("/{name}/shares/{user:path}", responses=_SHARE_REFUSALS)
    async def unshare(name: str, user: str, request: Request, principal: Sender) -> SessionInfo:
        """Take a share back. The user's connections to the session are closed."""
        request.scope[DONE] = ("unshared", {"session": name[:200], "with": user[:MAX_NAME]})
        return SessionInfo.model_validate(await access.unshare(principal, name, user))

    @router.get(
        "/{name}/logs",
        response_class=StreamingResponse,
        responses={
            200: {"content": {"application/x-ndjson": {}}, "description": "A line of JSON for each line printed."},
            404: {"description": "No log of this session, or no such mesh or rank in it."},
            422: {"description": "A parameter makes no sense."},
        },
    )
    async def logs(
        name: str,
        principal: Sender,
        mesh: str | None = None,
        rank: int | None = None,
        stream: str | None = None,
        tail: int | None = None,
        run: int | None = None,
        follow: bool = False,
    ) -> StreamingResponse:
        """The output of a session's processes, also of a session that ended recently.

        With ``follow``, the answer goes on until the session ends, or until its reader may not read it any more. A
        line has time, mesh, rank, place, stream and text; one that a function of `Job.run` has printed also has its
        run and run_name. A follower gets empty lines as signs of life.
        """
        query = LogQuery(mesh, rank, stream, tail, run)
        try:
            session = access.find_readable(principal, name)
        except UnknownSession as error:
            raise UnknownSession(f"no log of a session named {name!r}: {error}") from error
        lines = await (manager.logs.follow if follow else manager.logs.read)(name, query, principal.user)
        allowed = _while_allowed(lines, access, principal, session)
        return StreamingResponse(allowed, headers=_UNBUFFERED, media_type="application/x-ndjson")

    return router


async def _session_list(shown: Sequence[UserSession], ended: Sequence[EndedSession]) -> bytes:
    """Return a `SessionList` as JSON. It is made in turns, because the event loop relays every session's calls."""
    turns, living, over = Turns(), list[bytes](), list[bytes]()
    for session in shown:
        living.append(SessionInfo.model_validate(session).model_dump_json().encode())
        await turns.rest()
    for one in ended:
        over.append(_ENDED.dump_json(one))
        await turns.rest()
    return b'{"sessions":[' + b",".join(living) + b'],"ended":[' + b",".join(over) + b"]}"


async def _while_allowed(
    lines: AsyncIterator[bytes], access: AccessControl, principal: Principal, session: UserSession | EndedSession
) -> AsyncIterator[bytes]:
    """Pass a session's lines on until their reader's token is revoked or expires, or the share is taken back."""
    reading: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()

    async def disconnect(error: LoomError) -> None:
        reading.cancel()  # which waits for the next line, perhaps for long

    with access.connected(principal, disconnect, session, "view"):
        try:
            while access.has_right(principal, session, "view"):
                reading = asyncio.ensure_future(anext(lines, None))
                await asyncio.wait((reading,))
                if reading.cancelled() or (line := reading.result()) is None:
                    return
                yield line
        finally:
            reading.cancel()


async def _client_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


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
        known = await weaver.ask_for(GetUsers(), user=EVERYONE)
        states = await asyncio.gather(*(weaver.ask_for(GetStatus(), user=user) for user in known))
        replicas = {user: sum(state["replicas"].values()) for user, state in zip(known, states, strict=True)}
        names = sorted(user for user in {*replicas, *sessions} if replicas.get(user) or sessions[user])
        return UserList(
            users=[UserInfo(name=one, replicas=replicas.get(one, 0), sessions=sessions[one]) for one in names]
        )

    return router
