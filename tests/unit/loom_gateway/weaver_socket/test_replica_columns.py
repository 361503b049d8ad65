"""Numbers and columns of replicas: what has changed since when, and numbers that are given again."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from loom_gateway.weaver_socket.replica_columns import AWAY, NOBODY, STATES, Column, Roster, encode_frame, loss_of
from tests.support.page_frames import Section, read_frame
from tests.unit.loom_gateway.weaver_socket.replicas import info, reports

RUNNING = STATES.index("running")


def roster_of(*infos: dict[str, Any]) -> Roster:
    made = Roster()
    for one in infos:
        made.describe(one, 1)
    return made


def section(roster: Roster, column: Column, since: int | None = None) -> Section | None:
    found = roster.section(column, since)
    return None if found is None else read_frame(encode_frame(0, [found])).sections[0]


def values(roster: Roster, column: Column, since: int | None = None) -> dict[int, Any]:
    found = section(roster, column, since)
    return {} if found is None else found.values


def rows(roster: Roster, **sent: int | None) -> dict[str, Any]:
    return {id: json.loads(text) for id, text in roster.rows(sent)}


def test_columns_have_what_replicas_report() -> None:
    roster = roster_of(
        info("a"), info("b", connected=False, state="recovering", step=None, metrics={}, step_time=2.0)
    )

    assert roster.numbers == {"a": 0, "b": 1}
    assert values(roster, Column.STATE) == {0: RUNNING, 1: STATES.index("recovering") | AWAY}
    assert values(roster, Column.STEP) == {0: 1, 1: None}
    assert values(roster, Column.LOSS) == {0: 0.5, 1: None}
    assert values(roster, Column.PACE) == {0: None, 1: 2.0}


def test_a_section_has_what_changed_after_a_position() -> None:
    roster = roster_of(*(info(name) for name in "abcdefgh"))
    roster.take(reports(a={"step": 2}, b={}), 2)
    roster.take(reports(c={"step": 3, "metrics": {"loss": math.nan}}), 3)

    assert section(roster, Column.STEP, 1) == Section("step", False, {0: 2, 2: 3})
    assert values(roster, Column.STEP, 2) == {2: 3}
    assert section(roster, Column.STEP, 3) is None
    assert [str(one) for one in values(roster, Column.LOSS, 1).values()] == ["nan"]
    assert section(roster, Column.STATE, 1) is None
    roster.take(reports(c={"step": 3, "metrics": {"loss": float("nan")}}), 4)
    assert section(roster, Column.LOSS, 3) is None


def test_the_pace_is_smoothed_and_begins_anew_with_a_new_process() -> None:
    roster = roster_of(info("a", step=0, reported=0.0))
    for at, (step, reported) in enumerate([(2, 4.0), (3, 7.0), (3, 9.0), (2, 10.0), (3, 10.0)]):
        roster.take(reports(a={"step": step, "reported": reported}), at + 2)

    assert math.isclose(values(roster, Column.PACE)[0], 2.0 + 0.3 * (3.0 - 2.0), rel_tol=1e-6)
    roster.describe(info("a", instance="another", step=10, step_time=None, reported=20.0), 9)
    assert values(roster, Column.PACE, 8) == {0: None}
    roster.take(reports(a={"step": 11, "reported": 25.0}), 10)
    assert values(roster, Column.PACE, 9) == {0: 5.0}


def test_a_step_that_has_too_many_bits_is_none_in_columns_and_whole_in_rows() -> None:
    roster = roster_of(info("a", step=1 << 40))

    assert values(roster, Column.STEP) == {0: None}
    assert rows(roster, a=None)["a"]["step"] == 1 << 40


def test_rows_come_whole_when_they_are_new_or_have_changed() -> None:
    roster = roster_of(info("a"), info("b"))
    roster.take(reports(b={"step": 5, "metrics": {"loss": math.inf}, "connected": False}), 2)

    assert rows(roster, a=None, nobody=None) == {"a": reports(a={})["a"]}
    assert rows(roster, a=1, b=1) == {
        "b": {**reports(b={})["b"], "step": 5, "metrics": {"loss": "Infinity"}, "connected": False}
    }
    assert rows(roster, a=1, b=2) == {}
    roster.take(reports(b={"step": 6}), 3)
    assert rows(roster, b=2)["b"]["step"] == 6


def test_a_replica_that_is_not_described_yet_is_left_out() -> None:
    roster = roster_of(info("a"))
    roster.take(reports(new={"step": 7}), 2)

    assert len(roster) == 1
    assert roster.describe(info("new", step=8), 3) == 1
    assert values(roster, Column.STEP, 1) == {1: 8}


def test_a_number_is_given_again_once_its_replica_is_forgotten() -> None:
    roster = roster_of(*(info(name) for name in "abcd"))
    roster.forget(["b", "nobody"])

    assert values(roster, Column.STATE) == {0: RUNNING, 1: NOBODY, 2: RUNNING, 3: RUNNING}
    assert rows(roster, b=None) == {}
    assert roster.describe(info("e", step=9), 5) == 1
    assert values(roster, Column.STEP, 4) == {1: 9}
    assert roster.describe(info("b"), 6) == 4


def test_a_replica_that_changes_its_job_is_in_one() -> None:
    roster = roster_of(info("a"), info("b"))
    roster.describe(info("a", group="other", session="s-1"), 2)
    roster.dirty.clear()
    roster.forget(["b"])

    assert roster.members == {"other@s-1": {0: None}}
    assert roster.about == {"other@s-1": ("other", "s-1", "ann")}
    assert roster.dirty == {"train"}


@pytest.mark.parametrize(
    ("metrics", "loss"),
    [
        ({}, None),
        ({"reward": 1.0}, None),
        ({"train/loss": 3.0, "eval_loss": 4.0}, 3.0),
        ({"Loss": 3.0}, 3.0),
        ({"train/loss": 3.0, "loss": 2.0}, 2.0),
    ],
)
def test_the_loss_is_the_metric_of_its_name_or_the_first_one_like_it(
    metrics: dict[str, float], loss: float | None
) -> None:
    assert loss_of(metrics) == loss
