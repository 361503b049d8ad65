"""The HTTP interface of a pod's keeper, for `LoomPod` and the keepers of the job's other pods."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request

from loom.errors import LoomError
from loom_gateway.pod.peers import JOB_HEADER
from loom_gateway.pod.settings import PodSettings
from loom_gateway.pod.supervisor import PodSupervisor


def create_app(keeper: PodSupervisor, end: Callable[[], None]) -> FastAPI:
    """Return the keeper's HTTP application; ``end`` ends the keeper soon, with its worker and its gateway."""

    def belongs(request: Request) -> None:
        shown = request.headers.get(JOB_HEADER, "")
        if not hmac.compare_digest(shown.encode(), keeper.settings.token_sha256.encode()):
            raise HTTPException(403, "this pod is another job's, or the job has another token")

    def from_this_pod(request: Request) -> None:
        if request.client is None or request.client.host not in ("127.0.0.1", "::1", keeper.address):
            raise HTTPException(403, "only from the pod itself")

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    job_only, pod_only = [Depends(belongs)], [Depends(from_this_pod)]

    @app.get("/pod", dependencies=job_only)
    async def pod() -> dict[str, Any]:
        return keeper.state()

    @app.get("/pods", dependencies=job_only)
    async def pods() -> dict[str, Any]:
        return {"pods": await keeper.states()}

    @app.post("/configure", dependencies=pod_only)
    async def configure(settings: dict[str, Any]) -> dict[str, Any]:
        # A job that is applied again may have another token, so any process in the pod may send new settings.
        try:
            await keeper.configure(PodSettings.from_json(settings))
        except LoomError as error:
            raise HTTPException(422, str(error)) from error
        return keeper.state()

    @app.post("/restart_worker", dependencies=job_only)
    async def restart_worker() -> dict[str, Any]:
        await keeper.worker.restart()
        return keeper.state()

    @app.post("/shutdown", dependencies=job_only)
    async def shutdown() -> dict[str, Any]:
        end()
        return keeper.state()

    return app
