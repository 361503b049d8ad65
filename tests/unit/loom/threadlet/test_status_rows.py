"""Status reports: what becomes of the values of a training loop, and which are kept for the weaver."""

from __future__ import annotations

import decimal
import enum
import fractions
import logging
import math
import subprocess
import sys
from typing import Any

import pytest

from loom.control.frame import pack
from loom.threadlet import status_rows as module
from loom.threadlet.status_rows import Given, KeptReports, RowMaker, number, plain
from tests.support.logged import messages


class Color(enum.Enum):
    RED = 1


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


class Hostile(dict[str, int]):
    def items(self) -> Any:
        raise RuntimeError("no")


def given(number: int, step: Any = 1, metrics: dict[str, Any] | None = None, **more: Any) -> Given:
    return number, 12.5, step, more.get("epoch"), more.get("max_step"), metrics, more.get("config")


@pytest.mark.parametrize("value", [0.5, fractions.Fraction(1, 2), decimal.Decimal("0.5")])
def test_numbers_are_floats(value: Any) -> None:
    assert number(value) == 0.5


def test_scalars_of_numpy_and_torch_are_floats() -> None:
    numpy = pytest.importorskip("numpy")
    torch = pytest.importorskip("torch")
    for value in (
        numpy.float32(0.5),
        numpy.array([0.5]),
        torch.tensor(0.5),
        torch.tensor([[0.5]], dtype=torch.bfloat16),
        torch.tensor(0.25, requires_grad=True) * 2,
    ):
        assert number(value) == 0.5
        assert type(number(value)) is float
    assert number(numpy.int64(3)) == number(torch.tensor(3)) == 3.0
    assert math.isnan(number(torch.tensor(math.nan)))


@pytest.mark.parametrize("value", ["0.5", b"1", None, [1], {}, 1j, 10**400, object()])
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError)):
        number(value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (0.1, 0.1),
        ("text", "text"),
        (2**64 - 1, 2**64 - 1),
        (2**64, repr(2**64)),
        (Color.RED, "RED"),
        ((1, [2, {"a": {3}}]), [1, [2, {"a": [3]}]]),
        ({1: 2}, {"1": 2}),
        (1j, "1j"),
        (Unprintable(), "<Unprintable>"),
        ({Unprintable(): Unprintable()}, {"<Unprintable>": "<Unprintable>"}),
        ({"hostile": Hostile(a=1), "b": 2}, {"hostile": "{'a': 1}", "b": 2}),
        ("x" * 300, "x" * 300),
        (range(10**6), "range(0, 1000000)"),
    ],
)
def test_values_of_a_configuration_become_plain(value: Any, expected: Any) -> None:
    assert plain(value) == expected
    pack(["status", plain(value)])


def test_arrays_in_a_configuration_become_plain() -> None:
    numpy = pytest.importorskip("numpy")
    assert plain(numpy.float64(0.5)) == 0.5
    assert plain(numpy.zeros(3)) == repr(numpy.zeros(3))


def test_what_refers_to_itself_becomes_plain() -> None:
    endless: list[Any] = []
    endless.append(endless)

    pack(["status", plain(endless)])


def test_a_row_has_a_number_of_its_own() -> None:
    maker = RowMaker()

    rows = [
        maker.make(given(0, 7, {"loss": 1}, epoch=2, max_step=9, config={"lr": Color.RED})),
        maker.make(given(1)),
    ]

    assert rows == [[1, 12.5, 7, 2, 9, {"loss": 1.0}, {"lr": "RED"}], [2, 12.5, 1, None, None, {}, None]]
    assert maker.missed == 0


def test_a_metric_that_is_no_number_is_left_out_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    maker = RowMaker()

    with caplog.at_level(logging.WARNING, "loom"):
        rows = [maker.make(given(place, 1, {"loss": 0.5, "name": "x", "none": None})) for place in range(3)]

    assert [row[5] for row in rows] == [{"loss": 0.5}] * 3
    assert sorted(text.split(" is no number")[0] for text in messages(caplog)) == [
        "the metric 'name'",
        "the metric 'none'",
    ]


def test_so_many_metrics_are_sent_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    maker = RowMaker()
    many = {f"metric {place}": place for place in range(1000)}

    assert len(maker.make(given(0, 1, many))[5]) == 1000
    assert maker.make(given(1, 1, {"one more": 1, "metric 7": 7.5}))[5] == {"metric 7": 7.5}
    assert maker.make(given(2, 1, {"x" * 201: 1, "": 1, 5: 1}))[5] == {}  # type: ignore[dict-item]
    assert "more than 1000 metrics are published; not sent: 'one more'" in caplog.text
    assert "a metric's name is a text of 1 to 200 characters" in caplog.text


def test_a_step_may_be_a_scalar_too(caplog: pytest.LogCaptureFixture) -> None:
    numpy = pytest.importorskip("numpy")
    maker = RowMaker()

    assert maker.make(given(0, numpy.int64(3)))[2] == 3
    assert maker.make(given(1, "three"))[2] is None
    assert maker.make(given(2, math.nan))[2] is None
    assert maker.make(given(3, 2**53))[2] is None
    assert maker.make(given(4, -1, epoch=-1, max_step=10**400))[2:5] == [None, None, None]
    assert "step='three' is no count" in caplog.text
    assert "epoch=-1 is no count" in caplog.text


def test_reports_that_never_came_are_counted() -> None:
    maker = RowMaker()

    maker.make(given(0))
    maker.make(given(4))
    maker.make(given(3))

    assert maker.missed == 2


def rows(count: int, begin: int = 1) -> list[list[Any]]:
    return [[seq, 0.0, seq * 10, None, None, {}, None] for seq in range(begin, begin + count)]


def kept(count: int) -> KeptReports:
    reports = KeptReports()
    reports.add(rows(count))
    return reports


def seqs(taken: list[list[Any]]) -> list[int]:
    return [row[0] for row in taken]


def test_a_row_without_a_step_leaves_the_last_step_what_it_was() -> None:
    reports = kept(3)

    reports.add([[4, 0.0, None, None, None, {"loss": 0.5}, None]])

    assert reports.last_step == 30


def test_each_row_is_taken_once_and_kept_until_it_is_stored() -> None:
    reports = kept(5)

    assert seqs(reports.next_rows(3)) == [1, 2, 3]
    assert seqs(reports.next_rows(3)) == [4, 5]
    assert reports.next_rows(3) == []
    assert len(reports) == 5

    reports.stored(4)
    assert len(reports) == 1
    assert reports.next_rows(3) == []
    assert reports.last_step == 50


def test_on_a_new_connection_what_is_not_stored_is_taken_again() -> None:
    reports = kept(5)
    reports.next_rows(4)

    reports.resume(2)

    assert seqs(reports.next_rows(10)) == [3, 4, 5]
    reports.resume(0)
    assert seqs(reports.next_rows(10)) == [3, 4, 5]


def test_of_too_many_the_oldest_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEPT_REPORTS", 4)
    reports = kept(10)

    assert seqs(reports.next_rows(10)) == [7, 8, 9, 10]
    assert reports.dropped == 6


def test_what_was_dropped_after_it_was_sent_does_not_hide_what_was_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEPT_REPORTS", 4)
    reports = kept(4)
    assert seqs(reports.next_rows(2)) == [1, 2]

    for row in rows(3, begin=5):
        reports.add([row])

    assert seqs(reports.next_rows(10)) == [4, 5, 6, 7]


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_a_jump_of_the_systems_time_does_not_move_reports(jump: float) -> None:
    code = (
        f"import time; real, jump = time.time, 0.0; time.time = lambda: real() + jump; "
        f"from loom.threadlet.status_rows import now_of_system; before = now_of_system(); jump = {jump}; "
        f"print(abs(before - real()) < 60 and 0 <= now_of_system() - before < 60)"
    )

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).stdout == b"True\n"
