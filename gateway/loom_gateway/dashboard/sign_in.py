"""REST under ``/api/v1/page/``: how a browser signs in to the page, and out.

A token is shown once. The browser then has a cookie that its scripts cannot read and that it sends to this gateway
alone, or, where it would keep no cookie or share it with others, a text that the page has in its memory.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from loom.errors import ScopeError, WrongArguments
from loom_gateway.access.control import AccessControl
from loom_gateway.access.credentials import HOST_COOKIE
from loom_gateway.access.origins import PAGE_HEADER
from loom_gateway.access.route_scopes import PAGE
from loom_gateway.access.sessions import Principal
from loom_gateway.access.sign_ins import LASTS, SignIn

Shown = Annotated[str, Field(min_length=1, max_length=16384)]
Path = Annotated[str, Field(pattern=r"^/([A-Za-z0-9._~:@%+-]+/)*$", max_length=1000)]


class SignInRequest(BaseModel, extra="forbid"):
    """A token, or a code of `loom dashboard`."""

    token: Shown | None = None
    code: Shown | None = None
    path: Path = "/"
    """The path of the page in the browser's address."""


class CodeRequest(BaseModel, extra="forbid"):
    """The purpose of a code."""

    scope: Literal["view"] | None = None
    """view: a sign-in that may look only."""
    cookie: bool = True
    """True if a cookie may keep the sign-in; a page in another page's frame has to keep it in its memory."""


class Code(BaseModel):
    """A code with which one browser signs in once."""

    code: str
    expires: float
    """Seconds since the epoch."""


class SignedIn(BaseModel):
    """The user who has signed in."""

    user: str
    name: str
    """The name of the token."""
    scope: str
    expires: float | None
    """When the sign-in ends, in seconds since the epoch; None for a request with a token."""
    key: str | None = None
    """The text to show in the token's place; None if a cookie keeps it."""


def sign_in_routes(access: AccessControl, path: str = "/") -> APIRouter:
    """Return the routes.

    Args:
        access: the gateway's access control.
        path: the path under which browsers reach the gateway, on an origin that is the gateway's alone. A page
            under another path shares its origin, and with it its cookies, with other services.
    """
    router = APIRouter(prefix=PAGE, tags=["page"])

    @router.post("/sign-in")
    async def sign_in(asked: SignInRequest, request: Request, response: Response) -> SignedIn:
        """Sign a browser in, with a token or a code. Sets a cookie, or returns the key that the page keeps."""
        headers = request.scope["headers"]
        access.origins.check(headers)
        if dict(headers).get(PAGE_HEADER) != b"1":
            raise WrongArguments("the page sends the header X-Loom-Page: 1 with its sign-in")
        peer = request.client.host if request.client else ""
        principal, may_keep = await access.exchange(peer, asked.token, asked.code)
        in_cookie = may_keep and asked.path == path
        begun, text = await access.sign_in(principal, in_cookie)
        if in_cookie:
            _set_cookie(request, response, access.sign_ins.cookie, path, text)
        return _shown(principal, begun, None if in_cookie else text)

    @router.get("/me")
    async def me(request: Request) -> SignedIn:
        """The caller."""
        principal: Principal = request.scope["loom.principal"]
        return _shown(principal, principal.sign_in, None)

    @router.post("/code")
    async def code(asked: CodeRequest, request: Request) -> Code:
        """Return a code with which a browser signs in as the caller."""
        principal: Principal = request.scope["loom.principal"]
        if principal.sign_in is not None:
            raise ScopeError("a page gives no codes: `loom dashboard` does, with a token")
        text, expires = await access.new_code(principal, asked.scope, asked.cookie)
        return Code(code=text, expires=expires)

    @router.post("/sign-out")
    async def sign_out(request: Request, response: Response) -> dict[str, Any]:
        """Sign the browser out. Its WebSocket is closed, and its cookie is good for nothing any more."""
        principal: Principal = request.scope["loom.principal"]
        if principal.sign_in is None:
            raise WrongArguments("only a page signs out; a token is revoked with `loom token revoke`")
        await access.sign_out(principal)
        _set_cookie(request, response, access.sign_ins.cookie, path, "")
        return {}

    return router


def _set_cookie(request: Request, response: Response, name: str, path: str, text: str) -> None:
    """Set the cookie of a sign-in; with an empty text, remove it."""
    # A proxy in front may end TLS: what the browser sees is in its origin.
    secure = request.url.scheme == "https" or urlsplit(request.headers.get("origin", "")).scheme == "https"
    response.set_cookie(
        HOST_COOKIE + name if secure and path == "/" else name,
        text,
        max_age=int(LASTS)
        if text
        else 0,  # also longer than the token lasts, so that the page can say that it is over
        path=path,
        secure=secure,
        httponly=True,
        samesite="strict",
    )


def _shown(principal: Principal, sign_in: SignIn | None, key: str | None) -> SignedIn:
    token = principal.token
    expires = token.expires if sign_in is None else sign_in.expires
    return SignedIn(user=token.user, name=token.name, scope=token.scope, expires=expires, key=key)
