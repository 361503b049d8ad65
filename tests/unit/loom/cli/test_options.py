"""Times that users write on the command line."""

from __future__ import annotations

import time

import pytest

from loom.cli.options import read_moment
from loom.errors import WrongArguments


@pytest.mark.parametrize(("text", "seconds"), [("10m", 600), ("2h", 7200), ("1.5 s", 1.5), ("90", 90)])
def test_a_time_is_so_long_ago(text: str, seconds: float) -> None:
    before = time.time()

    assert before - seconds <= read_moment(text, time.time) <= time.time() - seconds


@pytest.mark.parametrize("text", ["2026-01-31T14:05:00Z", "2026-01-31T14:05+00:00", "2026-01-31T15:05:00+01:00"])
def test_a_time_is_iso(text: str) -> None:
    assert read_moment(text, time.time) == 1769868300.0


def test_a_time_without_a_zone_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC-2")
    time.tzset()
    found = read_moment("2026-01-31T16:05", time.time)
    monkeypatch.undo()
    time.tzset()

    assert found == 1769868300.0


@pytest.mark.parametrize("text", ["yesterday", "", "10 parsecs", "2026-13-01"])
def test_another_text_is_no_time(text: str) -> None:
    with pytest.raises(
        WrongArguments, match="is no time: write such as 10m, 2h or 1d for so long ago, or 2026-01-31T14:05"
    ):
        read_moment(text, time.time)
