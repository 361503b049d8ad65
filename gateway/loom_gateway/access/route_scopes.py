"""The paths for which other rules hold than for the rest, which reads with scope view and changes with operate."""

from __future__ import annotations

from loom.mutual_auth.over_http import PROOF_PATH
from loom.rest_client import WEBSOCKET_PATH

PAGE = "/api/v1/page"
SIGN_IN_PATH = f"{PAGE}/sign-in"
ASSETS = "/assets/"

FOR_EVERY_SCOPE = frozenset({f"{PAGE}/code", f"{PAGE}/sign-out"})
"""Change nothing but the caller's own sign-in."""

PLANS = frozenset({"/api/v1/weaver/plans", "/api/v1/weaver/plans/check"})
"""Take a plan of faults, which is longer than what other requests tell."""

TRAINER_STATUS = "/api/v1/weaver/trainer-status"
"""Takes the status of a replica, with a token of scope ``report``, which has no other use."""

_TUNNEL = "/api/v1/tunnel"
"""The tunnel replaces a WebSocket: the hello decides what its client may do, and the paths below continue it."""

_OPEN = frozenset({"/healthz", "/readyz", PROOF_PATH, SIGN_IN_PATH, "/"})


def is_open(path: str) -> bool:
    """Return whether a path needs no token. The page's files have nothing of a user's in them."""
    return path in _OPEN or path.startswith(ASSETS)


def continues_tunnel(path: str) -> bool:
    """Return whether a path continues an HTTP tunnel."""
    return path.startswith(f"{_TUNNEL}/")


def is_tunnel(path: str) -> bool:
    """Return whether a path begins an HTTP tunnel or continues one."""
    return path == _TUNNEL or continues_tunnel(path)


def drives(path: str) -> bool:
    """Return whether a path is one of a session's client."""
    return path == WEBSOCKET_PATH or is_tunnel(path)
