"""A picture of goodput."""

from __future__ import annotations

from pathlib import Path

import pytest

from loom.errors import MissingDependency
from loom.weaver.goodput.goodput import Goodput
from loom.weaver.goodput.plot import BARS, save_plot
from loom.weaver.storage.store import Store
from loom.weaver.views import GoodputRecord
from tests.support.processes import run
from tests.unit.loom.weaver.test_goodput import START, Bench

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def record() -> GoodputRecord:
    """Of a job of one replica, which died once."""
    bench = Bench()
    bench.registers(0)
    for at in range(100):
        if at == 50:
            bench.fails(50.9, last_sign=50.2)
            bench.registers(53)
        if not 50 <= at <= 53:
            began = 0.0 if at < 50 else 53.0
            bench.tells(at, began=began, first_at=0.5, compute=0.8 * (at - began), data=0.1 * (at - began))
        bench.goodput.tick(START + at)
    return bench.goodput.record("train", START + 100)


def test_a_plot_is_a_png(record: GoodputRecord, tmp_path: Path) -> None:
    path = save_plot(record, tmp_path / "goodput.png")

    assert path.read_bytes().startswith(PNG)
    assert path.stat().st_size > 10_000


def test_a_long_course_that_ends_with_a_death_can_be_drawn(tmp_path: Path) -> None:
    bench = Bench()
    bench.registers(0)
    for at in range(3 * BARS):
        bench.tells(at, compute=float(at))
        bench.goodput.tick(START + at)
    bench.fails(3 * BARS)
    record = bench.goodput.record("train", START + 3 * BARS)
    assert len(record.course) > 2 * BARS
    assert record.faults[0].stepped is None

    path = save_plot(record, tmp_path / "goodput.png")

    assert path.read_bytes().startswith(PNG)


def test_a_job_without_time_can_be_drawn(tmp_path: Path) -> None:
    goodput = Goodput(Store(":memory:"))
    goodput.registered("$odd_{name", "train_0", START, 0.0)

    path = save_plot(goodput.record("$odd_{name", START), tmp_path / "empty.png")

    assert path.read_bytes().startswith(PNG)


def test_matplotlib_is_needed_when_a_plot_is_made_and_not_before() -> None:
    ended = run("-c", "import sys, loom.weaver.goodput.plot; print('matplotlib' in sys.modules)")

    assert ended.stdout == "False\n"


def test_a_plot_without_matplotlib_says_what_to_install(
    record: GoodputRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(MissingDependency, match=r"monarch-loom\[plot\]"):
        save_plot(record, tmp_path / "goodput.png")
