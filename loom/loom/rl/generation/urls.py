"""The URLs of a generator's server: its paths, and the token in them."""

from __future__ import annotations

from urllib.parse import quote, unquote, urlsplit, urlunsplit

from loom.process.listen import bracketed

USER = "loom"
TRACE_HEADER = "x-trace-id"
UPDATE, RELOAD = "/update_weights", "/reload_weights"


def url_with_token(host: str, port: int, token: str) -> str:
    """Return ``http://loom:TOKEN@HOST:PORT``, which most HTTP clients understand."""
    return f"http://{USER}:{quote(token, safe='')}@{bracketed(host)}:{port}"


def without_token(url: str) -> str:
    """Return a URL without user and token, to be shown."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def bearer(url: str) -> tuple[str, dict[str, str]]:
    """Return a URL without its token, and the header that shows the token.

    httpx logs whole URLs at the level INFO, so requests that go this way keep the token out of logs.
    """
    token = unquote(urlsplit(url).password or "")
    return without_token(url), {"authorization": f"Bearer {token}"} if token else {}
