"""The HTTP application of a generator: its token, completions in OpenAI's form, and new weights."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hmac
import json
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from loom import tracing
from loom.errors import LoomError
from loom.rl.generation import weight_files as weights
from loom.rl.generation.completions import Sampling
from loom.rl.generation.openai import MODEL, ApiError, CompletionAnswers, CompletionRequest, UpdateRequest, parse
from loom.rl.generation.weight_client import RELOAD, TRACE_HEADER, UPDATE
from loom.tracing.trace_ids import checked_trace

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from loom.rl.generation.decoding import TextTokenizer
    from loom.rl.generation.engine import CompletionStream, Engine
    from loom.rl.generation.weight_files import WeightUpdates


OPEN = ("/health",)
"""Paths that ask for no token."""

CONNECTION = "loom.connection"
"""The key of a request's connection in its scope."""


class RequestArrival:
    """Notes when a request came, under its trace id, before anything is done for it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        came = tracing.now()
        headers = dict(scope["headers"])
        given = headers.get(TRACE_HEADER.encode(), b"").decode("latin-1")

        with tracing.trace(checked_trace(given)) as trace:

            async def send_traced(message: Any) -> None:
                if message["type"] == "http.response.start":
                    message = {**message, "headers": [*message["headers"], (TRACE_HEADER.encode(), trace.encode())]}
                await send(message)

            if scope["path"] in (UPDATE, RELOAD):
                tracing.event("weights.server.recv", path=scope["path"], t=came)
            await self._app(scope, receive, send_traced)


class TokenFirst:
    """Lets in who shows the token, before a byte of a body is read."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in OPEN:
            if not self._shown(dict(scope["headers"]).get(b"authorization", b"")):
                await _refuse(send, ApiError(401, "this generator wants its token: 'Authorization: Bearer TOKEN'"))
                return
            if (connection := scope.get(CONNECTION)) is not None:
                connection.good = True
        await self._app(scope, receive, send)

    def _shown(self, header: bytes) -> bool:
        kind, _, value = header.partition(b" ")
        if kind.lower() == b"basic":
            try:
                value = base64.b64decode(value.strip(), validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif kind.lower() != b"bearer":
            return False
        return hmac.compare_digest(value.strip(), self._token)


async def _refuse(send: Send, error: ApiError) -> None:
    body = json.dumps(error.body).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"www-authenticate", b"Bearer"),
        (b"connection", b"close"),  # the body has not been read
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TextPieces:
    """Turns tokens into pieces of text. A character of several tokens comes with the last of these."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._told = 0
        """The number of tokens that were sent."""
        self._context = 0
        """The first token that is decoded again, because later text depends on it."""

    def add(self, tokens: list[int], last: bool = False) -> str:
        """Return the text that these tokens add; if they are the ``last``, also an unfinished character."""
        self._tokens += tokens
        before = self._decode(self._context, self._told)
        after = self._decode(self._context, len(self._tokens))
        if not last and after.endswith(_UNFINISHED):
            return ""
        self._context, self._told = self._told, len(self._tokens)
        return after[len(before) :]

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._tokens[start:end]) if end > start else ""


MAX_BODY = 4 << 20
"""Bytes of a request's body."""
MAX_UPDATE = 64 << 10
"""The same for orders to load weights."""
CLIENT_LEFT = 499

T = TypeVar("T")


@dataclass(frozen=True)
class GenerationService:
    """The parts that an application serves."""

    engine: Engine
    updates: WeightUpdates
    default: Sampling
    """The sampling of requests that name none."""
    token: str


def create_app(service: GenerationService, *, only_admin: bool = False) -> ASGIApp:
    """Return the application; if ``only_admin``, without completions."""
    app = FastAPI(openapi_url=None)
    app.add_exception_handler(ApiError, _as_answer)
    app.add_exception_handler(LoomError, _as_answer)
    app.add_exception_handler(HTTPException, _as_answer)
    app.add_exception_handler(Exception, _as_answer)
    _add_weights(app, service)
    if not only_admin:
        _add_completions(app, service)
    return RequestArrival(TokenFirst(app, service.token))


def _add_weights(app: FastAPI, service: GenerationService) -> None:
    @app.get("/health")
    async def health() -> Response:
        if not service.engine.alive:
            raise ApiError(503, "the engine has ended")
        return JSONResponse({"status": "ok"})

    @app.get("/v1/models")
    async def models() -> Response:
        one = {"id": MODEL, "object": "model", "owned_by": "loom", "weights_step": service.engine.step}
        return JSONResponse({"object": "list", "data": [one]})

    @app.post(UPDATE)
    async def update_weights(request: Request) -> Response:
        asked = parse(await _body(request, MAX_UPDATE), UpdateRequest)
        step, named = asked.step, asked.path or asked.weight_dir
        if named is None and step is None:
            raise ApiError(400, "say the path of the weights, or their step", param="path")
        path = None if named is None else service.updates.inside(named)
        if step is None:
            assert path is not None
            step = weights.step_of(path)
            if step is None:
                raise ApiError(400, f"say the step of the weights, which {path.name!r} does not", param="step")
        return JSONResponse(await asyncio.to_thread(service.updates.update, step, path))

    @app.post("/pause")
    async def pause() -> Response:
        await asyncio.to_thread(service.engine.pause)
        return JSONResponse({"status": "paused"})

    @app.post("/resume")
    async def resume() -> Response:
        service.engine.resume()
        return JSONResponse({"status": "resumed"})

    @app.post(RELOAD)
    async def reload_weights(request: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(service.updates.reload))


def _add_completions(app: FastAPI, service: GenerationService) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        asked = parse(await _body(request, MAX_BODY), CompletionRequest)
        if asked.logprobs not in (None, 0, 1):
            raise ApiError(400, "logprobs is 0 or 1: those of the tokens that were drawn", param="logprobs")
        if asked.stream and asked.stop:
            raise ApiError(400, "stop is not supported in streams", param="stop", code="unsupported_parameter")
        stream = service.engine.open(
            asked.prompts,
            asked.n,
            service.default.with_fields(asked.sampling),
            whole=not asked.stream,
            shorten=asked.max_tokens is None,
        )
        answers = CompletionAnswers.to(asked, service.engine.tokenizer)
        if asked.stream:
            return _Pieces(stream, _events(stream, answers, service.engine.tokenizer))
        async with stream:
            if not await _unless_left(request, _ended(stream)):
                return Response(status_code=CLIENT_LEFT)
            return JSONResponse(answers.whole(stream.completions()))


class _Pieces(StreamingResponse):
    """Server-sent events. The completions are cancelled when the client leaves, also before the first piece."""

    def __init__(self, stream: CompletionStream, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._stream:
            await super().__call__(scope, receive, send)


async def _events(stream: CompletionStream, answers: CompletionAnswers, tokenizer: Any) -> AsyncIterator[bytes]:
    texts = [TextPieces(tokenizer) for _ in stream.rows]
    try:
        async for pieces in stream:
            chunks = []
            for piece in pieces:
                done = stream.completion(piece.index) if piece.done else None
                tokens = piece.tokens
                visible = tokens[:-1] if done is not None and not done.truncated else tokens
                text = texts[piece.index].add(visible, last=piece.done)
                if tokens or done is not None:
                    chunks.append(_event(answers.piece(piece.index, text, tokens, piece.logprobs, done)))
            yield b"".join(chunks)
        options = answers.request.stream_options
        if options is not None and options.include_usage:
            yield _event(answers.end(stream.completions()))
        yield b"data: [DONE]\n\n"
    except LoomError as error:
        yield _event(ApiError.of(error).body)


def _event(value: object) -> bytes:
    return b"data: %s\n\n" % json.dumps(value).encode()


async def _ended(stream: CompletionStream) -> bool:
    async for _ in stream:
        pass
    return True


async def _unless_left(request: Request, work: Awaitable[T]) -> T | None:
    """Return what comes of some work, or None if the client leaves before; the work is then cancelled."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request, most: int) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise ApiError(413, f"a body has at most {most} bytes here", code="body_too_large")
        parts.append(part)
    return b"".join(parts)


async def _as_answer(request: Request, error: Exception) -> Response:
    match error:
        case ApiError():
            answer = error
        case LoomError():
            answer = ApiError.of(error)
        case HTTPException(status_code=status, detail=detail):
            answer = ApiError(status, f"{detail}: {request.method} {request.url.path:.200}")
        case _:
            answer = ApiError(500, "the server failed; its log says why")
    headers = {"retry-after": "1"} if answer.status == 429 else None
    return JSONResponse(answer.body, answer.status, headers)
