"""The gate of branches: what is counted for which package, and when it is shut."""

from __future__ import annotations

from typing import Any

from tests.support.branches import Branches, by_package, report


def measured(all: int, taken: int, missing: list[list[int]]) -> dict[str, Any]:
    return {"summary": {"num_branches": all, "covered_branches": taken}, "missing_branches": missing}


FILES = {
    "files": {
        "loom/loom/wire/mux.py": measured(10, 9, [[5, 7]]),
        "loom/loom/wire/bodies/base.py": measured(10, 10, []),
        "loom/loom/weaver/wire.py": measured(4, 3, [[9, -2]]),
    }
}


def test_branches_are_summed_up_by_package() -> None:
    found = by_package(FILES, ["loom.wire", "loom.weaver"])

    assert found["loom.wire"] == Branches(20, 19, ["loom/loom/wire/mux.py:5 -> 7"])
    assert found["loom.weaver"] == Branches(4, 3, ["loom/loom/weaver/wire.py:9 -> end of the function at 2"])


def test_a_package_of_which_nothing_was_measured_is_not_tested() -> None:
    assert by_package(FILES, ["loom.control"])["loom.control"].percent == 0.0


def test_the_report_marks_a_package_with_too_few() -> None:
    lines = report(by_package(FILES, ["loom.wire", "loom.weaver"]), missing=True)

    assert lines == [
        "loom.wire: 19 of 20 branches, 95.0 %",
        "loom.weaver: 3 of 4 branches, 75.0 %  (at least 95 %)",
        "loom/loom/wire/mux.py:5 -> 7",
        "loom/loom/weaver/wire.py:9 -> end of the function at 2",
    ]
