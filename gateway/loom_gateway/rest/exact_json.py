"""Responses of JSON that every reader accepts, from a value of the gateway or from a text of the weaver."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse, Response

from loom.wire.exact_json import exact_json


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
