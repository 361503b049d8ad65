"""The budgets of the benchmarks are those that are written down."""

from __future__ import annotations

import re

from tests.benchmarks.written import BUDGETS, Budget
from tests.support.paths import ROOT

ROW = re.compile(
    r"^\| (?P<name>[^|]+?) \| `[^`]+` \| (?P<bound>at most|at least) \| (?P<value>[\d.]+) \| (?P<aim>[\d.]*) ?\|$",
    re.MULTILINE,
)


def test_check_uses_the_budgets_of_the_page() -> None:
    page = (ROOT / "docs" / "design" / "budgets.md").read_text()

    written = {
        row["name"]: Budget(row["bound"], float(row["value"]), float(row["aim"]) if row["aim"] else None)
        for row in ROW.finditer(page)
    }

    assert written == BUDGETS
