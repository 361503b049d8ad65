"""The web page's files, for which no token is needed, as nothing of a user's is in them.

They are built from ``gateway/dashboard`` into ``static`` beside this module. A gateway without them says so.
`loom_gateway.dashboard.sign_in` is how a browser signs in to the page.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route

from loom_gateway.access.route_scopes import ASSETS

STATIC = Path(__file__).with_name("static")

NOT_BUILT = """\
This gateway has no page: it was installed where npm was missing. Everything else works.

Install Node.js (with npm), and then in the checkout:

    cd gateway/dashboard && npm ci && npm run build

A wheel of Loom always has the page.
"""

_UNCHANGING = "public, max-age=31536000, immutable"  # the names of assets have a hash of their content


def policy(frames: Iterable[str]) -> str:
    """Return the page's Content-Security-Policy: only its own files, and no request but to its own origin.

    Args:
        frames: origins whose pages may show it in a frame, such as notebooks.
    """
    own = ("script-src", "style-src", "connect-src", "font-src", "manifest-src")
    return "; ".join(
        [
            "default-src 'none'",
            *(f"{one} 'self'" for one in own),
            "img-src 'self' data:",
            "base-uri 'none'",
            "form-action 'none'",
            f"frame-ancestors {' '.join(sorted(frames)) or chr(39) + 'none' + chr(39)}",
        ]
    )


def file_routes(frames: Iterable[str], static: Path = STATIC) -> list[Route]:
    """Return the routes of the page's files.

    Args:
        frames: as for `policy`.
        static: the folder with the files.
    """
    headers = {
        "content-security-policy": policy(frames),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "permissions-policy": "camera=(), geolocation=(), microphone=()",
    }

    def _file(name: str, cached: str) -> Response:
        try:
            path = (static / name).resolve()
            found = path.is_relative_to(static.resolve()) and path.is_file()
        except (OSError, ValueError):  # no file can have that name: it is too long, or has a NUL
            found = False
        if not found:
            raise HTTPException(404)
        return FileResponse(path, headers={**headers, "cache-control": cached})

    async def page(_: Request) -> Response:
        if not (static / "index.html").is_file():
            return PlainTextResponse(NOT_BUILT, 503, headers=headers)
        return _file("index.html", "no-cache")

    async def asset(request: Request) -> Response:
        return _file(f"assets/{request.path_params['name']}", _UNCHANGING)

    return [
        Route("/", page, methods=["GET"]),
        Route(ASSETS + "{name}", asset, methods=["GET"]),
    ]
