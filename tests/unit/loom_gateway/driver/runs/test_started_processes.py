"""The environment of processes that functions in the driver start: the function's place, if they may report."""

from __future__ import annotations

import os
from typing import Any

import pytest

from loom_gateway.driver.runs.started_processes import _given_to_fork_exec, _given_to_posix_spawn

OWN, ADDRESS = b"LOOM_PLACE=7@s", b"LOOM_WEAVER=tcp://h:1/k"


@pytest.fixture(autouse=True)
def _of_an_outer_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOM_PLACE", "1@outer")


def by_fork_exec(given: list[bytes] | None, ends: tuple[int, int] | None = (5, 6)) -> Any:
    before = (["true"], [b"true"], True, (), None, given, -1, -1, -1, -1, -1, 1, -1, -1)
    after, _ = _given_to_fork_exec(ends, "7@s", before, {})
    return after


def test_a_process_that_inherits_the_environment_or_finds_the_weaver_gets_the_place() -> None:
    inherited = by_fork_exec(None)[5]
    assert OWN in inherited
    assert len([one for one in inherited if one.startswith(b"LOOM_PLACE=")]) == 1
    assert by_fork_exec([b"A=b=c", ADDRESS])[5] == [b"A=b=c", ADDRESS, OWN]
    assert by_fork_exec([b"A=b"])[5] == [b"A=b"]


def test_its_output_is_redirected_unless_the_function_is_over() -> None:
    assert [by_fork_exec(None)[place] for place in (9, 11)] == [5, 5]
    assert [by_fork_exec(None, None)[place] for place in (9, 11)] == [-1, 1]


def test_a_process_by_posix_spawn_gets_the_same() -> None:
    def spawned(environment: dict[str, str] | None, ends: tuple[int, int] | None = (5, 6)) -> Any:
        return _given_to_posix_spawn(ends, "7@s", ("/bin/true", ["true"], environment), {"setsid": True})

    (*_, variables), options = spawned({"LOOM_WEAVER": "tcp://h:1/k"})
    assert variables["LOOM_PLACE"] == "7@s"
    assert options["setsid"] is True
    assert options["file_actions"] == [(os.POSIX_SPAWN_DUP2, 5, 1), (os.POSIX_SPAWN_DUP2, 6, 2)]
    assert spawned({"A": "b"})[0][2] == {"A": "b"}
    assert spawned(None, None)[0][2]["LOOM_PLACE"] == "7@s"
    assert spawned(None, None)[1]["file_actions"] == []
