"""Which tests are slow, and which of them run: a numbered part of them all, or those whose turn it is.

Slow is what is marked so, and what took `LONG` seconds when it was recorded.

``--slow-part 2/5`` selects the second of five parts that take alike long; a file stays whole, since its tests share
what they set up. ``--slow-turn COUNT`` leaves out all slow tests but some of at most `SHORT` seconds that together
take no longer than `TURN`: the next ones for each count, so that all have had their turn after some commits. How
long a test takes is read from `SECONDS`, which ``--slow-record`` writes; a test that is not in it counts as long.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from time import perf_counter

import pytest

__all__ = ["Recorder", "add_options", "part_of", "select", "turn_of"]

SECONDS = Path(__file__).with_name("slow_seconds.json")
"""Seconds of each slow test, by node id."""

LONG = 2.0
"""Seconds from which on a test is slow, marked or not."""

SHORT = 60.0
"""Seconds that a test takes at most to have its turn."""

TURN = 60.0
"""Seconds that the tests of a turn take together, one after the other."""

UNKNOWN = 120.0
"""Seconds that a test counts as whose time is not known."""


def add_options(parser: pytest.Parser) -> None:
    """Add the options, see the module."""
    group = parser.getgroup("slow tests")
    group.addoption("--slow-part", metavar="N/OF", help="run this part of the slow tests")
    group.addoption("--slow-turn", metavar="COUNT", type=int, help="of them, run the short ones whose turn it is")
    group.addoption("--slow-record", action="store_true", help="write down how long slow tests take")


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that take long as slow, and deselect those that were not asked for.

    Raises:
        pytest.UsageError: the part is not one of ``1/OF`` to ``OF/OF``.
    """
    seconds = _recorded()
    for item in items:
        if seconds.get(item.nodeid, 0) >= LONG:
            item.add_marker("slow")
    part, turn = config.getoption("--slow-part"), config.getoption("--slow-turn")
    if part is None and turn is None:
        return
    slow = [item.nodeid for item in items if item.get_closest_marker("slow")]
    chosen = part_of(part, slow, seconds) if part is not None else turn_of(turn, slow, seconds)
    if part is None:
        chosen |= {item.nodeid for item in items} - set(slow)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]


def part_of(part: str, slow: Iterable[str], seconds: Mapping[str, float]) -> set[str]:
    """The tests of part ``N/OF``: each file, longest first, goes to the part that takes the least time so far."""
    number, _, of = part.partition("/")
    if not (number.isdigit() and of.isdigit() and 1 <= int(number) <= int(of)):
        raise pytest.UsageError(f"--slow-part is {part!r}: give N/OF, such as 1/4, with N from 1 to OF")
    files: dict[str, list[str]] = defaultdict(list)
    for test in slow:
        files[test.partition("::")[0]].append(test)
    taken = [0.0] * int(of)
    parts: list[set[str]] = [set() for _ in taken]
    for _, tests in sorted(files.items(), key=lambda file: (-_sum(file[1], seconds), file[0])):
        least = taken.index(min(taken))
        taken[least] += _sum(tests, seconds)
        parts[least].update(tests)
    return parts[int(number) - 1]


def turn_of(count: int, slow: Sequence[str], seconds: Mapping[str, float]) -> set[str]:
    """The short tests whose turn it is."""
    turns: list[set[str]] = []
    left = 0.0
    for test in sorted(test for test in slow if seconds.get(test, UNKNOWN) <= SHORT):
        if not turns or seconds[test] > left:
            turns.append(set())
            left = TURN
        turns[-1].add(test)
        left -= seconds[test]
    return turns[count % len(turns)] if turns else set()


def _sum(tests: Iterable[str], seconds: Mapping[str, float]) -> float:
    return sum(seconds.get(test, UNKNOWN) for test in tests)


def _recorded() -> dict[str, float]:
    return json.loads(SECONDS.read_text()) if SECONDS.exists() else {}


class Recorder:
    """Writes down how long each slow or long test took that passed, with its own fixtures. A plugin of pytest.

    Fixtures of several tests are not counted to the first one, which would be slow by what others need, too.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._slow: set[str] = set()
        self._failed: set[str] = set()
        self._shared = 0.0  # seconds of the phase under way in which fixtures of several tests were set up

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
        """Measure the fixtures of several tests, each with those that it asks for meanwhile."""
        before, started = self._shared, perf_counter()
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                self._shared = before + perf_counter() - started

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Leave them out of how long the phase took."""
        report = yield
        report.duration -= self._shared
        self._shared = 0.0
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a phase of a test. What ends may be of several tests."""
        if report.when != "teardown":
            self._seconds[report.nodeid] += report.duration
        if "slow" in report.keywords or (report.when == "call" and report.duration >= LONG):
            self._slow.add(report.nodeid)
        if not report.passed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the file; with xdist only the process that all others report to."""
        passed = {test: round(self._seconds[test], 1) for test in self._slow - self._failed}
        if passed and not hasattr(session.config, "workerinput"):
            SECONDS.write_text(json.dumps({**_recorded(), **passed}, indent=0, sort_keys=True) + "\n")
