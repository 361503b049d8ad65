"""The values with which a branch begins."""

from __future__ import annotations

from typing import Any

import pytest

from loom.branches.branch import Branch
from loom.branches.values import beginning, check_changes, kept_at, times
from loom.errors import WrongArguments


def mark(step: int | None, applied: int = 1, do: str = "update_config", **changes: Any) -> dict[str, Any]:
    told = {key: {"old": None, "new": value} for key, value in changes.items()}
    return {"kind": "command", "do": do, "applied": applied, "step": step, "changes": told}


def begin(
    changes: dict[str, Any],
    kept: dict[str, Any] | None = None,
    known: dict[str, Any] | None = None,
    present: dict[str, Any] | None = None,
    handlers: tuple[str, ...] = (),
) -> dict[str, Any]:
    branch = Branch("r", 9, "/c/9", "/c", "/c-own", kept=kept or {}, changes=changes, known=known or {})
    return beginning(branch, handlers, lambda key: (present or {}).get(key))


@pytest.mark.parametrize(
    ("text", "factor"),
    [
        ("0.5x", 0.5),
        ("2x", 2.0),
        (".1X", 0.1),
        (" 1e-1x ", 0.1),
        ("x", None),
        ("-2x", None),
        ("0.5", None),
        (2, None),
    ],
)
def test_a_relative_value_is_a_number_and_an_x(text: Any, factor: float | None) -> None:
    assert times(text) == factor


def test_values_up_to_the_step_are_kept_and_later_and_refused_ones_are_not() -> None:
    timeline = [
        {"kind": "started", "step": None},
        mark(100, weight_decay=0.1, batch=4),
        mark(200, batch=8),
        mark(300, applied=0, batch=16),
        mark(None, batch=64),
        mark(900, learning_rate_schedule=1.0, clip=1.0),
        mark(901, batch=32),
        mark(100, do="pause"),
    ]
    assert kept_at(timeline, 900) == {"weight_decay": 0.1, "batch": 8, "clip": 1.0}


def test_a_fixed_rate_and_a_factor_take_each_others_place() -> None:
    timeline = [mark(1, learning_rate=0.1), mark(2, learning_rate_factor=0.5), mark(3, **{"learning_rate@1": 0.2})]

    assert kept_at(timeline, 9) == {"learning_rate_factor": 0.5, "learning_rate@1": 0.2}
    assert begin({"learning_rate": 0.3}, kept={"learning_rate_factor": 0.5}) == {"learning_rate": 0.3}


def test_a_relative_rate_multiplies_what_the_run_had_at_the_step() -> None:
    rates = ("learning_rate", "learning_rate_factor", "learning_rate@1", "learning_rate_factor@1")
    half = {"learning_rate": "0.5x"}

    assert begin(half, handlers=rates) == {"learning_rate_factor": 0.5}  # of the schedule, wherever it stands
    assert begin(half, {"learning_rate_factor": 0.1}, handlers=rates) == {"learning_rate_factor": 0.05}
    assert begin(half, {"learning_rate": 0.2}, handlers=rates) == {"learning_rate": 0.1}
    assert begin(half, {"learning_rate": None}, handlers=rates) == {"learning_rate_factor": 0.5}
    assert begin({"learning_rate@1": "2x"}, handlers=rates) == {"learning_rate_factor@1": 2.0}


def test_another_relative_value_multiplies_what_is_known_of_it() -> None:
    assert begin({"clip": "0.5x"}, {"clip": 4.0}, present={"clip": 8.0}) == {"clip": 2.0}
    assert begin({"clip": "0.5x"}, present={"clip": 8.0}, known={"clip": 1.0}) == {"clip": 4.0}
    assert begin({"clip": "0.5x"}, known={"clip": 1}) == {"clip": 0.5}
    assert begin({"clip": "0.5x", "name": "x"}) == {"clip": "0.5x", "name": "x"}  # for the handler to refuse
    assert begin({"learning_rate": "0.5x"}, known={"learning_rate": 0.2}) == {"learning_rate": 0.1}


def test_values_that_the_run_cannot_have_are_refused() -> None:
    known = {"learning_rate": 0.1, "betas": [0.9, 0.99], "clip": None}

    check_changes({"learning_rate": "0.5x", "betas": "x", "clip": "x"}, "r", known)
    check_changes({"learning_rate": " 1e-3"}, "r", known)
    check_changes({"learning_rate": "null"}, "r", known)
    with pytest.raises(
        WrongArguments, match="set lerning: run 'r' has no such key; it has betas, clip, learning_rate"
    ):
        check_changes({"lerning": 1}, "r", known)
    for value in ("half", "nan", "0,5"):
        with pytest.raises(WrongArguments, match=f"has 0.1 there, and '{value}' is no number: write such as"):
            check_changes({"learning_rate": value}, "r", known)
