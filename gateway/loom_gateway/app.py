"""The gateway's web application: health, REST, and the WebSocket, on one port.

It is apart from the server, which is about sockets and signals.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from starlette.routing import WebSocketRoute

from loom._version import __version__
from loom.mutual_auth.over_http import PROOF_PATH
from loom.process import tasks
from loom.token_file import ADMIN
from loom.tracing import flush
from loom.wings import Part
from loom_gateway.access.audit import audit_session_commands
from loom_gateway.access.control import AccessControl
from loom_gateway.access.sessions import Principal
from loom_gateway.dashboard import file_routes
from loom_gateway.dashboard.sign_in import sign_in_routes
from loom_gateway.exports import Exports
from loom_gateway.offload import OFFLOAD
from loom_gateway.relay.driver_lines import DriverLines
from loom_gateway.relay.endpoint import DrainState, Relay
from loom_gateway.relay.http_tunnel import IDLE, Tunnels
from loom_gateway.rest.errors import answer_errors
from loom_gateway.rest.metrics import CONTENT_TYPE, metrics_text
from loom_gateway.rest.readiness import Readiness, Ready, ReadyStatus
from loom_gateway.rest.sessions import session_routes, user_routes
from loom_gateway.rest.weaver import alias_routes, weaver_routes
from loom_gateway.rest.weaver_changes import Components, WeaverChanges
from loom_gateway.session_hosts.other_gateways import OtherGateways
from loom_gateway.sessions.directory import SessionDirectory
from loom_gateway.trainer_status import trainer_routes
from loom_gateway.weaver_process import GatewayWeaver
from loom_gateway.weaver_socket.endpoint import WeaverSocket
from loom_gateway.weaver_socket.page_feed import GatewayFeed, WorkerInfo, check_workers


class Proof(BaseModel):
    """The proof that the gateway knows a token: see `loom.mutual_auth`."""

    nonce: str
    """The gateway's own part of what the proof is over."""
    proof: str


class Isolation(BaseModel):
    """The separation of one user's code from another's."""

    drivers: Literal["user ids", "none"]
    """True if each session's driver has a user id of its own."""
    workers: Literal["per user", "shared"]
    """True if processes of different users can be on one worker."""

    @classmethod
    def of(cls, manager: SessionDirectory) -> Isolation:
        ids, leases = manager.isolation
        return cls(drivers="user ids" if ids else "none", workers="per user" if leases else "shared")


class GatewayStatus(BaseModel):
    """The gateway at a glance."""

    version: str
    workers: list[WorkerInfo]
    workers_missing: str
    """The workers that have not been found yet, and advice; empty if all have been."""
    sessions: int
    """The number of living sessions that the caller may see."""
    spare_ready: bool
    """True if a warm driver waits for the next session."""
    isolation: Isolation
    refused: dict[str, int] | None
    """The number of refusals since the gateway started, by reason; None for a user who does not see all users."""


class Health(BaseModel):
    """The answer of a healthy gateway."""

    status: str = "ok"


def create_app(
    manager: SessionDirectory,
    lines: DriverLines,
    access: AccessControl,
    supervisor: GatewayWeaver,
    exports: Exports | None = None,
    tunnel_idle: float = IDLE,
    injectable: bool = False,
    page_path: str = "/",
    others: OtherGateways | None = None,
) -> FastAPI:
    """Return the gateway's application, to be wrapped in an `AccessMiddleware`.

    Args:
        lines: lead to the sessions' drivers.
        exports: those to trackers.
        tunnel_idle: seconds without a poll after which an HTTP tunnel is closed.
        injectable: whether injected faults may kill the gateway, its weaver and its drivers.
        page_path: the path under which browsers reach the page on an origin that is the gateway's alone.
        others: the gateways of the same session hosts, to which clients over HTTP may belong.
    """
    weaver = supervisor.client
    access.guard(manager)
    draining = DrainState(manager)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        OFFLOAD.enable()
        await manager.adopt(access.user_of)
        if others is not None:
            await others.start()
        manager.prepare_spare()
        supervisor.start()
        manager.on_end = access.session_ended
        watching = tasks.keep_running("watch tokens", lambda: access.watch(manager))
        auditing = tasks.keep_running("audit commands", lambda: audit_session_commands(weaver, access.audit))
        exporting = exports.start() if exports is not None else []
        yield
        for export in exporting:
            export.cancel()
        await asyncio.gather(*exporting, return_exceptions=True)
        watching.cancel()
        auditing.cancel()
        if others is not None:
            others.close()
        await supervisor.close(manager.end_sessions)
        await manager.close()
        await access.audit.close()
        OFFLOAD.close()
        flush()  # uvicorn ends the process by the signal that it got

    app = FastAPI(
        title="Loom gateway",
        version=__version__,
        lifespan=lifespan,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
    )
    answer_errors(app)

    @functools.cache
    def schema() -> bytes:
        return json.dumps(app.openapi(), ensure_ascii=False).encode()

    @app.get("/api/v1/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        # Writing it takes a fifth of a second, in which the event loop would relay nothing.
        return Response(await asyncio.to_thread(schema), media_type="application/json")

    @app.get("/healthz")
    async def healthz() -> Health:
        """Whether the gateway answers. Needs no token."""
        return Health()

    readiness = Readiness(manager, access.audit)
    unready = {"model": Ready, "description": "The gateway was told to stop, or cannot write what it has to."}

    @app.get("/readyz", responses={503: unready})
    async def readyz(response: Response) -> Ready:
        """Whether the gateway takes new sessions, and how many of its workers answer. Needs no token."""
        ready = await readiness.check(draining.begun)
        if ready.status is not ReadyStatus.OK:
            response.status_code = 503
        return ready

    @app.get(PROOF_PATH)
    async def proof(request: Request, key: str = "", challenge: str = "") -> Proof:
        """Prove that the gateway knows a token, to a client that has not shown it yet. Needs no token."""
        return Proof(**access.prove(key, challenge, request.client.host if request.client else ""))

    @app.get("/api/v1/status")
    async def status(request: Request) -> GatewayStatus:
        """Version, workers and sessions of this gateway."""
        workers = await check_workers(manager.workers)
        return GatewayStatus(
            version=__version__,
            workers=workers,
            workers_missing=manager.workers_missing,
            sessions=len(access.sessions(request.scope["loom.principal"])),
            spare_ready=manager.spare_ready,
            isolation=Isolation.of(manager),
            refused=dict(access.audit.refusals) if _sees_all(request) else None,
        )

    @app.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {}}, "description": "Numbers as Prometheus reads them."}},
    )
    async def metrics(request: Request) -> Response:
        """The gateway, its weaver, replicas and devices in numbers, for Prometheus.

        A token of the user admin, or of scope admin, sees the numbers of all users, any other its own user's.
        """
        only = None if _sees_all(request) else request.scope["loom.principal"].user
        connections = access.budgets.connections.by_user()
        page = await metrics_text(manager, weaver, only, access.audit.refusals, connections)
        return Response(page, media_type=CONTENT_TYPE)

    app.include_router(session_routes(manager, access))
    app.include_router(sign_in_routes(access, page_path))
    changes = WeaverChanges(weaver, Components(access, supervisor, injectable))
    app.state.plans = Part.FAULT_PLANS.load()(app, weaver, changes, access)
    app.include_router(user_routes(weaver, access))
    app.include_router(trainer_routes(weaver))
    app.include_router(weaver_routes(weaver, access, changes))
    app.include_router(alias_routes(changes))
    relay = Relay(manager, lines, access, draining)
    app.state.draining = draining
    app.state.access, app.state.weaver = access, weaver
    app.state.tunnels = Tunnels(relay, tunnel_idle, access.budgets, others)
    app.router.routes += [
        *file_routes(access.origins.others),
        WebSocketRoute("/ws/v1/weaver", WeaverSocket(weaver, access, changes, GatewayFeed(manager, access))),
        WebSocketRoute("/ws/v1", relay),
        *app.state.tunnels.routes,
    ]
    return app


def _sees_all(request: Request) -> bool:
    """Return whether numbers of all users are for who asks."""
    principal: Principal = request.scope["loom.principal"]
    return principal.is_admin or principal.user == ADMIN
