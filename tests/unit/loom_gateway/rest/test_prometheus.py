"""Numbers as Prometheus reads them."""

from __future__ import annotations

import json
import math

import pytest

from loom_gateway.rest.exact_json import exact_json
from loom_gateway.rest.prometheus import Exposition


def test_a_family_is_introduced_and_its_samples_follow() -> None:
    page = Exposition()
    page.family("loom_replicas", "gauge", "Replicas, by state.")
    page.sample(2, state="running")
    page.sample(0, state="failed")
    page.family("loom_devices", "gauge", "Devices.")
    page.sample(8)

    assert page.text() == (
        "# HELP loom_replicas Replicas, by state.\n"
        "# TYPE loom_replicas gauge\n"
        'loom_replicas{state="running"} 2\n'
        'loom_replicas{state="failed"} 0\n'
        "# HELP loom_devices Devices.\n"
        "# TYPE loom_devices gauge\n"
        "loom_devices 8\n"
    )


def test_buckets_add_up() -> None:
    page = Exposition()
    page.family("seconds", "histogram", "How long.")
    page.histogram([0.1, 1.0], [3, 2, 1], 4.5, kind="a")

    assert page.text().splitlines()[2:] == [
        'seconds_bucket{kind="a",le="0.1"} 3',
        'seconds_bucket{kind="a",le="1.0"} 5',
        'seconds_bucket{kind="a",le="+Inf"} 6',
        'seconds_sum{kind="a"} 4.5',
        'seconds_count{kind="a"} 6',
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.nan, "NaN"),
        (math.inf, "+Inf"),
        (-math.inf, "-Inf"),
        (1e-300, "1e-300"),
        (0.1 + 0.2, "0.30000000000000004"),
        (1 << 60, str(1 << 60)),
        (True, "1"),
    ],
)
def test_a_number_is_exact(value: float, text: str) -> None:
    page = Exposition()
    page.family("a", "gauge", "")
    page.sample(value)

    assert page.text().splitlines()[-1] == f"a {text}"


def test_what_others_name_cannot_make_a_sample() -> None:
    page = Exposition()
    page.family("a", "gauge", "two\nlines \\ here")
    page.sample(1, replica='train"0"\\\n} 5\nforged 1')

    assert page.text().splitlines() == [
        "# HELP a two\\nlines \\\\ here",
        "# TYPE a gauge",
        'a{replica="train\\"0\\"\\\\\\n} 5\\nforged 1"} 1',
    ]


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
