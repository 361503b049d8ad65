"""The errors of the gateway's HTTP: their JSON, and the same form for what Starlette and FastAPI refuse."""

from __future__ import annotations

import math

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from loom.errors import AuthenticationError, LoomError, NotFound, RateLimited, WrongArguments


def error_response(error: LoomError) -> JSONResponse:
    """Return an error in the form that all of the gateway's HTTP has."""
    headers = {}
    if isinstance(error, RateLimited):
        headers["retry-after"] = str(math.ceil(error.retry_after))
    elif isinstance(error, AuthenticationError):
        headers["www-authenticate"] = "Bearer"
    return JSONResponse({"error": {"code": error.code, "message": str(error)}}, error.http_status, headers)


def answer_errors(app: FastAPI) -> None:
    """Let an application answer every refusal by `error_response`, also those of Starlette and FastAPI."""

    @app.exception_handler(LoomError)
    async def loom_error(_: Request, error: LoomError) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def wrong_request(_: Request, error: RequestValidationError) -> Response:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        return error_response(WrongArguments(f"the request makes no sense: {wrong[:2000]}"))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        """Answer for a path, a method, or a body that is no text."""
        path = request.url.path[:200]
        match error.status_code:
            case 404:
                return error_response(NotFound(f"there is nothing at {path}; /api/v1/openapi.json has the routes"))
            case 405:
                allowed = (error.headers or {}).get("Allow", "")
                answer = error_response(WrongArguments(f"{path} has no method {request.method}; it has {allowed}"))
                answer.status_code, answer.headers["allow"] = 405, allowed
                return answer
            case _:
                return error_response(WrongArguments(f"the request makes no sense: {error.detail}"))
