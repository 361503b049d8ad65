"""JSON that every reader takes."""

from __future__ import annotations

import json
import math

import pytest

from loom.wire.plain import exact_json


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"loss": math.nan}, '{"loss": "NaN"}'),
        ([math.inf, -math.inf, 1.5], '["Infinity", "-Infinity", 1.5]'),
        ({"a": (1, None, True, "ü")}, '{"a": [1, null, true, "ü"]}'),
        ({"a": b"bytes"}, '{"a": "b\'bytes\'"}'),
        ({1: math.nan}, '{"1": "NaN"}'),
    ],
)
def test_json_is_what_every_reader_takes(value: object, text: str) -> None:
    assert exact_json(value) == text
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
