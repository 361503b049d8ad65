"""Texts in a payload."""

from __future__ import annotations

import msgpack
import pytest

from loom.errors import ProtocolMismatch
from loom.wire.frames import LONGEST, pack_texts, unpack_texts


def test_texts_and_numbers_arrive() -> None:
    assert unpack_texts(pack_texts({"text": "it broke", "rank": 3})) == {"text": "it broke", "rank": 3}


def test_a_text_that_is_too_long_loses_its_middle() -> None:
    text = unpack_texts(pack_texts({"text": "a" * LONGEST + "z" * LONGEST}))["text"]

    assert text.startswith("a" * (LONGEST // 2))
    assert text.endswith("z" * (LONGEST // 2))
    assert f"{LONGEST} characters left out" in text


def test_what_no_text_may_hold_is_replaced() -> None:
    assert unpack_texts(pack_texts({"text": "\ud800"})) == {"text": "?"}


@pytest.mark.parametrize("part", [b"", b"\xc1", msgpack.packb(["a", "list"])])
def test_what_is_no_map_of_texts_is_refused(part: bytes) -> None:
    with pytest.raises(ProtocolMismatch, match="not a map of texts"):
        unpack_texts(part)
