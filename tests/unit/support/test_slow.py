"""Which slow tests run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support import slow as module
from tests.support.slow import TURN, Recorder, part_of, turn_of

pytest_plugins = ("pytester",)

SLOW = ["a.py::one", "a.py::two", "b.py::one", "c.py::one", "d.py::new"]
SECONDS = {"a.py::one": 50.0, "a.py::two": 20.0, "b.py::one": 150.0, "c.py::one": 60.0}


def test_the_parts_are_all_tests_and_files_stay_whole() -> None:
    parts = [part_of(f"{n}/3", SLOW, SECONDS) for n in (1, 2, 3)]

    assert parts == [{"b.py::one"}, {"d.py::new"}, {"a.py::one", "a.py::two", "c.py::one"}]


def test_one_part_of_one_is_everything() -> None:
    assert part_of("1/1", SLOW, {}) == set(SLOW)


@pytest.mark.parametrize("part", ["0/3", "4/3", "3", "a/b", "1/0", ""])
def test_a_part_that_there_is_not(part: str) -> None:
    with pytest.raises(pytest.UsageError, match="give N/OF"):
        part_of(part, SLOW, SECONDS)


def test_every_short_test_has_its_turn_and_no_other() -> None:
    slow = [f"a.py::{n}" for n in range(10)] + ["long.py::one", "new.py::one"]
    seconds = dict.fromkeys(slow[:10], TURN / 3) | {"long.py::one": 61.0}

    turns = [turn_of(count, slow, seconds) for count in range(4)]

    assert set().union(*turns) == set(slow[:10])
    assert [len(turn) for turn in turns] == [3, 3, 3, 1]
    assert turn_of(4, slow, seconds) == turns[0]


def test_no_turn_where_nothing_is_short() -> None:
    assert turn_of(7, ["long.py::one"], {}) == set()


def test_a_test_that_took_long_is_slow_though_nobody_marked_it(
    pytester: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = tmp_path / "seconds.json"
    seconds.write_text('{"test_here.py::test_long": 2.0, "test_here.py::test_short": 1.9}')
    monkeypatch.setattr(module, "SECONDS", seconds)
    pytester.makeconftest("""
        from tests.support import slow

        def pytest_addoption(parser):
            slow.add_options(parser)

        def pytest_configure(config):
            if config.getoption("--slow-record"):
                config.pluginmanager.register(slow.Recorder(), "slow-recorder")

        def pytest_collection_modifyitems(config, items):
            slow.select(config, items)
    """)
    pytester.makepyfile(
        test_here="""
        import time

        def test_long(): pass
        def test_short(): pass
        def test_grown(): time.sleep(0.02)
    """
    )

    assert pytester.runpytest_inprocess("-m", "not slow").parseoutcomes() == {"passed": 2, "deselected": 1}
    assert pytester.runpytest_inprocess("--slow-part", "1/1").parseoutcomes() == {"passed": 1, "deselected": 2}

    monkeypatch.setattr(module, "LONG", 0.01)
    pytester.runpytest_inprocess("--slow-record", "-k", "grown").assert_outcomes(passed=1)
    assert set(json.loads(seconds.read_text())) == {
        f"test_here.py::test_{which}" for which in ("long", "short", "grown")
    }


def test_what_several_tests_share_makes_none_of_them_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    clock = iter([0.0, 1.0, 6.0, 8.0, 8.0, 8.5])
    monkeypatch.setattr(module, "perf_counter", lambda: next(clock))
    outer, inner, own = (
        recorder.pytest_fixture_setup(cast(Any, SimpleNamespace(scope=scope)))
        for scope in ("module", "session", "function")
    )
    for step in (outer, inner, inner, outer, own, own):  # the inner one is asked for by name
        next(step, None)

    report = recorder.pytest_runtest_makereport()
    next(report)
    with pytest.raises(StopIteration) as made:
        report.send(cast(Any, SimpleNamespace(duration=8.75)))

    assert made.value.value.duration == 0.75
