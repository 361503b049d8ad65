"""Check that tests take enough of the branches of each package that is gated.

``python -m tests.support.branches`` reads what pytest has just measured with ``--cov``. It prints a line for each
package and, with ``--missing``, the branches that no test took. It exits with 1 if a package has fewer than
`AT_LEAST` percent. The packages are those of ``source_pkgs`` in pyproject.toml.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coverage import Coverage

__all__ = ["AT_LEAST", "Branches", "by_package", "main", "report"]

AT_LEAST = 95.0
"""Percent of a package's branches that tests have to take."""


@dataclass
class Branches:
    """Count of a package's branches, and where those are that no test took."""

    all: int = 0
    taken: int = 0
    missing: list[str] = field(default_factory=list)

    @property
    def percent(self) -> float:
        """How many were taken. A package without branches has 100."""
        return 100.0 * self.taken / self.all if self.all else 100.0


def by_package(measured: Mapping[str, Any], packages: Sequence[str]) -> dict[str, Branches]:
    """Sum up a report of ``coverage json``. Of one that was not measured, one branch was not taken."""
    found = {package: Branches() for package in packages}
    for path, of_file in measured["files"].items():
        module = path.removesuffix(".py").replace("/", ".")
        for package, branches in found.items():
            if f".{package}." in f".{module}.":
                branches.all += of_file["summary"]["num_branches"]
                branches.taken += of_file["summary"]["covered_branches"]
                branches.missing += [_written(path, *ends) for ends in of_file["missing_branches"]]
    return {package: branches if branches.all else Branches(all=1) for package, branches in found.items()}


def report(packages: Mapping[str, Branches], missing: bool) -> list[str]:
    """Lines for a person: a package each, those with too few marked, then what is missing."""
    lines = []
    for package, branches in packages.items():
        verdict = "" if branches.percent >= AT_LEAST else f"  (at least {AT_LEAST:.0f} %)"
        lines.append(f"{package}: {branches.taken} of {branches.all} branches, {branches.percent:.1f} %{verdict}")
    if missing:
        lines += [where for branches in packages.values() for where in branches.missing]
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report and give the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--missing", action="store_true", help="print the branches that no test took")
    options = parser.parse_args(argv)
    packages = by_package(*_measured())
    print(*report(packages, options.missing), sep="\n")
    return 0 if all(branches.percent >= AT_LEAST for branches in packages.values()) else 1


def _measured() -> tuple[Mapping[str, Any], Sequence[str]]:
    coverage = Coverage()
    coverage.load()
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "coverage.json")
        coverage.json_report(outfile=str(written))
        return json.loads(written.read_text()), coverage.get_option("run:source_pkgs") or []  # type: ignore[return-value]


def _written(path: str, line: int, to: int) -> str:
    """A negative line is the end of the function that begins there."""
    return f"{path}:{line} -> {f'end of the function at {-to}' if to < 0 else to}"


if __name__ == "__main__":
    sys.exit(main())
