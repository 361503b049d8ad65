"""`ServerRoutes`: requests to the HTTP routes of an engine's server, and the errors that its answers mean."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from loom import tracing
from loom.errors import Denied, Unavailable, WrongArguments
from loom.rl.generation.weight_client import TIMEOUT, TRACE_HEADER, PoolWait, bearer, without_token

if TYPE_CHECKING:
    import httpx

CHECK_TIMEOUT = 60.0
"""Seconds that a server has to answer a question about itself."""
RPC_HEADER = "x-rpc-ms"
"""The header with the milliseconds that an order took in a server, if that has Loom's middleware."""


class ServerRoutes:
    """The routes of one server.

    Args:
        http: the connections.
        url: of the server, with its token as password, if it has one.
    """

    def __init__(self, http: httpx.AsyncClient, url: str) -> None:
        self.url = url
        self._http = http
        self._bare, self._headers = bearer(url.rstrip("/"))

    @property
    def shown(self) -> str:
        """The server's URL without its token."""
        return without_token(self.url)

    async def get(self, path: str, timeout: float = CHECK_TIMEOUT) -> dict[str, Any]:
        """Return the server's answer to a question; raise as `post` does."""
        return self._object(path, await self._request("GET", path, None, timeout))

    async def get_queued(self, path: str) -> tuple[dict[str, Any], float]:
        """Return the answer to a question, and the milliseconds that it waited for a connection of the client."""
        wait = PoolWait()
        answer = self._object(path, await self._request("GET", path, None, TIMEOUT, wait.extensions))
        return answer, wait.ms

    async def post(self, path: str, body: object = None) -> dict[str, Any]:
        """Return the server's answer to a request.

        Raises:
            Unavailable: the server does not answer, or its engine has ended.
            WrongArguments: it refuses the request.
            Denied: it asks for another token.
        """
        return self._object(path, await self._request("POST", path, body, TIMEOUT))

    async def post_timed(self, path: str, body: object = None) -> tuple[dict[str, Any], float]:
        """Return the server's answer, and the request's milliseconds: in the server, if it says them, or in all."""
        began = time.monotonic()
        answer = await self._request("POST", path, body, TIMEOUT)
        took_ms = ms_since(began)
        with suppress(KeyError, ValueError):
            took_ms = float(answer.headers[RPC_HEADER])
        return self._object(path, answer), took_ms

    async def post_any(self, path: str, body: object) -> Any:
        """Return the server's answer to a request, of any type; raise as `post` does."""
        return _content(await self._request("POST", path, body, TIMEOUT))

    def _object(self, path: str, answer: httpx.Response) -> dict[str, Any]:
        content = _content(answer)
        if not isinstance(content, dict):
            raise Unavailable(f"{self.shown} answers {path} with no JSON object: {content!r:.200}")
        return content

    async def _request(
        self, method: str, path: str, body: object, timeout: float, extensions: Mapping[str, Any] | None = None
    ) -> httpx.Response:
        import httpx

        headers = {**self._headers, **({TRACE_HEADER: trace} if (trace := tracing.current_trace()) else {})}
        try:
            answer = await self._http.request(
                method,
                self._bare + path,
                json=body,
                headers=headers,
                timeout=timeout,
                extensions=dict(extensions or {}),
            )
        except httpx.HTTPError as error:
            raise Unavailable(f"{self.shown} does not answer {path}: {error!r}") from error
        if answer.status_code != 200:
            self._refused(path, answer)
        return answer

    def _refused(self, path: str, answer: httpx.Response) -> NoReturn:
        says = f"{self.shown} answers {path} with {answer.status_code}: {answer.text:.500}"
        if answer.status_code in (400, 404, 405, 422):
            raise WrongArguments(says)
        if answer.status_code in (401, 403):
            raise Denied(says)
        raise Unavailable(says)


def _content(answer: httpx.Response) -> Any:
    """Return the JSON or the text of an answer; an empty object if it has neither."""
    if not answer.content:
        return {}
    try:
        return answer.json()
    except ValueError:
        return answer.text


def ms_since(began: float) -> float:
    """Return the milliseconds since a time of `time.monotonic`."""
    return round((time.monotonic() - began) * 1000, 3)
