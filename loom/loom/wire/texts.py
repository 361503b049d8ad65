"""Texts in a payload: tracebacks and reports, which may be too long for a header."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack

from loom.errors import ProtocolMismatch
from loom.wire.messages import Buffer

LONGEST = 64 << 10  # characters that are kept of a longer text: half of them from its start, half from its end


def pack_texts(texts: Mapping[str, Any]) -> bytes:
    """Pack a map of texts and numbers as one part of a payload. Texts over `LONGEST` lose their middle."""
    shortened = {name: _shortened(value) for name, value in texts.items()}
    packed: bytes = msgpack.packb(shortened, default=repr, unicode_errors="replace")
    return packed


def _shortened(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if len(value) > LONGEST:
        left_out = len(value) - LONGEST
        value = f"{value[: LONGEST // 2]}\n… {left_out} characters left out …\n{value[-LONGEST // 2 :]}"
    return value.encode(errors="replace").decode()  # lone surrogates cannot travel


def unpack_texts(part: Buffer) -> Mapping[str, Any]:
    """Unpack a part that `pack_texts` packed; raise `ProtocolMismatch` for another."""
    try:
        texts = msgpack.unpackb(part)
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolMismatch(f"not a map of texts: {error}") from error
    if not isinstance(texts, dict):
        raise ProtocolMismatch(f"not a map of texts but a {type(texts).__name__}")
    return texts
