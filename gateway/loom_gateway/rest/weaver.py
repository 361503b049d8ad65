"""REST under ``/api/v1/weaver/`` and ``/api/v1/runs``: a route for each of `loom.control.operations`.

The weaver's answers are passed on unchanged. The views that an operation names as its result describe them for
OpenAPI and its readers.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields, make_dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Query, Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, BeforeValidator, create_model
from starlette.responses import JSONResponse

from loom.control.operations import (
    INNER,
    MAX_WAIT,
    OPERATIONS,
    GetReplicas,
    GiveCommand,
    Operation,
    Reach,
    is_required,
)
from loom.errors import WrongArguments
from loom.weaver.client import WeaverClient
from loom.weaver.keys import EVERYONE
from loom.weaver.views import CommandState
from loom.wire.plain import exact_json
from loom_gateway.access.control import AccessControl
from loom_gateway.access.middleware import DONE
from loom_gateway.rest.sessions import Sender
from loom_gateway.rest.weaver_changes import ConfigUpdate, Note, WeaverChanges, whose


class ErrorText(BaseModel):
    """The code and text of an error."""

    code: str
    """The code of the error in `loom.errors`."""
    message: str


class ErrorAnswer(BaseModel):
    """The reason why a request was refused."""

    error: ErrorText


REFUSALS: dict[int | str, dict[str, Any]] = {
    404: {"model": ErrorAnswer, "description": "There is no such replica, device, command or run."},
    422: {"model": ErrorAnswer, "description": "A parameter makes no sense."},
    503: {"model": ErrorAnswer, "description": "The weaver is away; a gateway starts its own one again."},
}
"""The errors of each route, for OpenAPI."""

User = Annotated[str, Query(max_length=400, min_length=1)]
Session = Annotated[str, Query(max_length=200, min_length=1)]


async def _asked_of(request: Request, user: User | None = None, session: Session | None = None) -> dict[str, str]:
    """Return whose replicas a request is about, as `whose` does.

    Args:
        user: another user, if the caller is an admin.
        session: the only session whose replicas it is about: the caller's own, or one shared with the caller.
    """
    state, principal = request.app.state, request.scope["loom.principal"]
    return await whose(principal, user, session, _needed(request), state.access, state.weaver)


async def _reported_of(
    request: Request, user: User | None = None, session: Session | None = None
) -> dict[str, str]:
    """Return whose replicas a report is about: those of all users, if an admin names none."""
    if user is None and session is None and request.scope["loom.principal"].is_admin:
        return {"user": EVERYONE}
    return await _asked_of(request, user, session)


async def _of_session(request: Request, name: str) -> dict[str, str]:
    """Return the session whose replicas a request is about."""
    state, principal = request.app.state, request.scope["loom.principal"]
    return await whose(principal, None, name, _needed(request), state.access, state.weaver)


def _needed(request: Request) -> str:
    return "view" if request.method == "GET" else "operate"


Of = Annotated[dict[str, str], Depends(_asked_of)]
"""The user or session of a request's replicas, as arguments for `WeaverClient.ask`."""


def _noting(request: Request) -> Note:
    def note(event: str, details: Mapping[str, object]) -> None:
        request.scope[DONE] = (event, details)

    return note


Noted = Annotated[Note, Depends(_noting)]
"""Takes an event and its details for the audit, which the `AccessMiddleware` writes with the answer."""


def weaver_routes(weaver: WeaverClient, access: AccessControl, changes: WeaverChanges) -> APIRouter:
    """Return the routes. The `AccessMiddleware` requires scope view for reading, and scope operate for the rest."""
    router = APIRouter(prefix="/api/v1", responses=REFUSALS, tags=["weaver"])

    def add(operation: type[Operation], path: str, of: Any) -> None:
        make = _reader(operation, weaver, access) if operation.reads() else _changer(operation, changes)
        _add_route(router, operation, path, _with_arguments(make, operation, path, of))

    for operation in OPERATIONS.values():
        everyones = Reach.EVERYONE in operation.reach and not operation.reads()
        add(operation, operation.route.shown_path, _reported_of if everyones else _asked_of)
    add(GetReplicas, "/sessions/{name}/replicas", _of_session)
    add(GiveCommand, "/sessions/{name}/commands", _of_session)
    return router


def _add_route(router: APIRouter, operation: type[Operation], path: str, endpoint: Callable[..., Any]) -> None:
    route, text = operation.route, inspect.getdoc(operation) or ""
    responses: dict[int | str, dict[str, Any]] = {
        code: {"model": ErrorAnswer, "description": why} for code, why in route.refusals.items()
    }
    shown: dict[str, Any] = {"response_model": _answer_model(operation)}
    if _is_text(operation):
        shown = {"response_class": PlainTextResponse}
        responses[200] = {"content": {"text/plain": {}}, "description": text}
    for name in _named(operation, path):
        if name not in (*operation.of_runs, "alert") and not (operation.of_runs and name == route.called):
            path = path.replace(f"{{{name}}}", f"{{{name}:path}}")  # a name may contain slashes, an id none
    methods = [route.method]
    router.add_api_route(
        path, endpoint, methods=methods, name=operation.name, description=text, responses=responses, **shown
    )


def _reader(operation: type[Operation], weaver: WeaverClient, access: AccessControl) -> Callable[..., Any]:
    route = operation.route

    async def read(request: Request, of: dict[str, str], **given: Any) -> Response:
        if route.needs:
            access.require(request.scope["loom.principal"], *route.needs)
        given = {name: value for name, value in given.items() if value is not None}
        if route.called in given:
            given["id"] = given.pop(route.called)
        if _is_text(operation):
            return PlainTextResponse(await weaver.do(operation.name, "", **of, **given))
        text = await weaver.do_json(operation.name, "", **of, **given)
        around = {name: given[name] for name in route.echo}
        return written_json(text, **around, **({route.key: ...} if route.key else {}))

    return read


def _changer(operation: type[Operation], changes: WeaverChanges) -> Callable[..., Any]:
    key = operation.route.key

    async def change(request: Request, of: dict[str, str], body: Any = None, **named: Any) -> Response:
        asked = operation(**named, **({} if body is None else vars(body)))
        made = await changes.make(asked, request.scope["loom.principal"], of, _noting(request))
        return ExactJson({key: made} if key else made)

    return change


def _with_arguments(
    endpoint: Callable[..., Any], operation: type[Operation], path: str, of: Callable[..., Any]
) -> Callable[..., Any]:
    """Give an endpoint the parameters of an operation, which FastAPI reads from its signature.

    Those in the path are texts; the others are in the query, or form the posted body.
    """
    hints = typing.get_type_hints(operation, include_extras=True)
    named = _named(operation, path)
    taken = [*named, "id"] if operation.route.called else named
    rest = [one for one in fields(operation) if one.name not in taken and one.metadata != INNER]  # type: ignore[arg-type]
    wanted: dict[str, tuple[Any, Any]] = {
        "request": (Request, inspect.Parameter.empty),
        "of": (Annotated[dict[str, str], Depends(of)], inspect.Parameter.empty),
        **dict.fromkeys(named, (str, inspect.Parameter.empty)),
    }
    if operation.route.method == "POST":
        wanted["body"] = (_body(operation, named), inspect.Parameter.empty)
    else:
        none = inspect.Parameter.empty
        wanted.update(
            {
                one.name: (Annotated[hints[one.name], Query()], none if is_required(one) else one.default)
                for one in rest
            }
        )
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in wanted.items()
    ]
    endpoint.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return endpoint


def _body(operation: type[Operation], named: list[str]) -> Any:
    """Return the type of the posted object: the operation without the arguments in the path."""

    def translated(given: Any) -> Any:
        try:
            return operation.in_own_words(given) if isinstance(given, dict) else given
        except WrongArguments as error:
            raise ValueError(str(error)) from error

    body: Any = operation
    if named:
        hints = typing.get_type_hints(operation, include_extras=True)
        rest = [one for one in fields(operation) if one.name not in named]  # type: ignore[arg-type]
        kept = [(one.name, hints[one.name], *(() if is_required(one) else (one,))) for one in rest]
        body = make_dataclass(
            operation.__name__,
            kept,
            namespace={"__pydantic_config__": operation.__pydantic_config__, "__doc__": operation.__doc__},
        )
    return Annotated[body, BeforeValidator(translated), Body()]


def _named(operation: type[Operation], path: str) -> list[str]:
    """Return the arguments that a path has, by the names that OpenAPI shows."""
    called = operation.route.called or "id"
    names = [called if name == "id" else name for name in operation.route.named]
    return [name for name in names if f"{{{name}}}" in path]


def _is_text(operation: type[Operation]) -> bool:
    return operation.result is str and not operation.route.key


def _answer_model(operation: type[Operation]) -> Any:
    route = operation.route
    if not route.key:
        return operation.result
    around: dict[str, Any] = {
        **dict.fromkeys(route.echo, (str, ...)),
        route.key: (operation.result, ...),
    }
    return create_model(f"{operation.__name__}Answer", __doc__=operation.__doc__, **around)


class ExactJson(JSONResponse):
    """A response with such JSON. For small values: it is written on the event loop that relays."""

    def render(self, content: Any) -> bytes:
        return _encoded(content)


def written_json(text: bytes, **around: Any) -> Response:
    """Return a response of JSON that the weaver has written.

    With ``around``, the response is an object of these names, with the text in the place of ``...``.
    """
    if around:
        values = {name: text if value is ... else _encoded(value) for name, value in around.items()}
        text = b"{" + b", ".join(_encoded(name) + b": " + value for name, value in values.items()) + b"}"
    return Response(text, media_type="application/json")


def _encoded(value: Any) -> bytes:
    return exact_json(value).encode(errors="replace")  # a name may hold a lone surrogate


WAIT = 5.0
"""Seconds to wait for acknowledgements before the answer, if the request does not say how many."""

Wait = Annotated[float, Query(ge=0, le=MAX_WAIT, description="Seconds to wait for acknowledgements.")]


def alias_routes(changes: WeaverChanges) -> APIRouter:
    """Return the routes. The `AccessMiddleware` requires scope operate for them."""
    router = APIRouter(prefix="/api/commands", responses=REFUSALS, tags=["weaver"])

    @router.post("/update-config", response_model=CommandState)
    async def update_config(
        asked: ConfigUpdate, principal: Sender, of: Of, note: Noted, wait: Wait = WAIT
    ) -> Response:
        """Change values of replicas' configurations; the same as ``POST /api/v1/weaver/commands``.

        The answer comes once all replicas have acknowledged the change, or the wait is over.
        """
        return ExactJson(await changes.make(asked.to_command(wait), principal, of, note))

    return router
