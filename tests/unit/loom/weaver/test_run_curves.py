"""Curves of runs: their sections, bands and outliers, and outlines of chunks in place of ten million points."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from loom.control import operations
from loom.control.frame import pack_value
from loom.errors import WrongArguments
from loom.weaver.run_views import RunCurves
from loom.weaver.runs import catalog
from loom.weaver.runs.curves import MAX_OUTLIERS, outliers
from loom.weaver.storage import history as limits
from loom.weaver.storage import wide_outlines
from loom.weaver.storage.samples import CurveSamples, outline
from tests.unit.loom.weaver.bench import Bench, Threadlet
from tests.unit.loom.weaver.test_history import START, Recorder
from tests.unit.loom.weaver.test_runs import die, do, ranks

EVER = (-math.inf, math.inf)


def curves(bench: Bench, metric: str = "loss", **wanted: Any) -> RunCurves:
    found: RunCurves = do(bench, operations.GetRunCurves("train", metric, **wanted))
    return found


def only(bench: Bench, **wanted: Any) -> Sequence[Mapping[str, Any]]:
    """The sections of the only curve."""
    (curve,) = curves(bench, **wanted).curves
    sections: Sequence[Mapping[str, Any]] = curve["sections"]
    return sections


def points(*of: tuple[float, float, float]) -> bytes:
    return array("d", [one for point in of for one in point]).tobytes()


def test_an_outline_has_what_its_points_amount_to() -> None:
    made = outline(3, 7, points((10.0, 1, 4.0), (9.0, 1, 2.0), (12.0, 5, 6.0)))

    assert made == (3, 7, 3, 9.0, 12.0, 1.0, 5.0, 4.0, 2.0, 6.0)


@pytest.mark.parametrize("steps", [(2.0, 1.0), (math.nan, 2.0), (1.0, math.nan), (math.nan,)])
def test_a_chunk_whose_steps_do_not_rise_has_no_outline(steps: Sequence[float]) -> None:
    assert outline(1, 1, points(*((float(at), step, 1.0) for at, step in enumerate(steps)))) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_outline_says_that_a_value_is_not_finite(bad: float) -> None:
    made = outline(1, 1, points((1.0, 1, 3.0), (2.0, 2, bad), (3.0, 3, 5.0)))

    assert made is not None
    assert made[-3:] == (None, 3.0, 5.0)


@pytest.mark.parametrize("by", ["time", "step"])
def test_outlines_and_points_tell_the_same(by: str) -> None:
    recorder, random_ = Recorder(write_after=0.0), random.Random(5)
    values = [random_.random() for _ in range(3000)]
    for step, value in enumerate(values):
        recorder.record(step, loss=value)
        if step % 50 == 0:
            recorder.commit()
    recorder.commit()

    exact = recorder.history.samples("train_0", "loss", None, by, *EVER)
    outlined = recorder.history.samples("train_0", "loss", None, by, *EVER, closely=500)

    assert exact.means == values
    assert max(exact.counts) == 1
    assert len(outlined) < 300
    assert sum(outlined.counts) == 3000
    assert outlined.steps[-1] == 2999
    assert min(outlined.lows) == min(values)
    assert max(outlined.highs) == max(values)
    (all_,), (thin,) = exact.thinned(1).to_body()["value"], outlined.thinned(1).to_body()["value"]
    assert thin == pytest.approx(all_)


def test_a_range_of_many_points_is_read_closely() -> None:
    recorder = Recorder(write_after=0.0)
    for step in range(3000):
        recorder.record(step, loss=float(step))
    for _ in range(5):
        recorder.commit()

    found = recorder.history.samples("train_0", "loss", None, "step", 1000, 1200, closely=400)

    assert found.steps == [float(step) for step in range(1000, 1201)]
    assert max(found.counts) == 1


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide outlines of three chunks, which are used however few the points are."""
    for module in (limits, wide_outlines):
        monkeypatch.setattr(module, "WIDE", 3)
    monkeypatch.setattr(wide_outlines, "MANY", 0)


def wide_rows(recorder: Recorder) -> list[tuple[int, int]]:
    """The first chunk and the number of chunks of each wide outline."""
    return recorder.store.db.execute("SELECT chunk, chunks FROM wide_outlines ORDER BY chunk").fetchall()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("by", ["time", "step"])
def test_wide_outlines_and_points_tell_the_same(wide: None, by: str, seed: int) -> None:
    recorder, random_ = Recorder(write_after=60.0 * (seed % 2)), random.Random(seed)
    step, written = 0, 0
    for number in range(6000):
        if random_.random() < 0.0005:
            step = max(0, step - 700)  # a restart from a checkpoint
        time = START + number
        value = math.nan if random_.random() < 0.0005 else random_.random()
        recorder.history.record("train_0", recorder.store.journal_id, time, step, {"loss": value})
        recorder.store.log(pack_value(["train_0", "", time, step, {"loss": value}]))
        step += 1
        if random_.random() < 0.02:
            recorder.commit(time)
            written = max(written, len(wide_rows(recorder)))
    since, until = (500, 3000) if by == "step" else (START + 700, START + 4400)
    for bounds in (EVER, (since, until)):
        exact = recorder.history.samples("train_0", "loss", None, by, *bounds, closely=10**6)
        told = recorder.history.samples("train_0", "loss", None, by, *bounds, closely=0)
        finite = [one for one in exact.means if math.isfinite(one)]
        # At the edges of a range, a chunk is inside or not as a whole.
        assert sum(told.counts) == pytest.approx(len(exact), abs=0 if bounds == EVER else 8 * limits.CHUNK)
        assert len(told.sections()) == len(exact.sections())
        if bounds == EVER:
            assert min(filter(math.isfinite, told.lows)) == min(finite)
            assert max(filter(math.isfinite, told.highs)) == max(finite)
    assert written >= 6
    assert max(told.counts) > limits.CHUNK


def test_a_wide_outline_ends_where_steps_fall_or_a_chunk_has_no_outline(wide: None) -> None:
    recorder = Recorder(write_after=0.0)
    for chunk, start in enumerate([0, 128, 64, 192, 320, 448, 576, None, 704, 832, 960, 1088]):
        for at in range(limits.CHUNK):
            place, time = None if start is None else start + at, START + chunk * limits.CHUNK + at
            recorder.history.record("train_0", recorder.store.journal_id, time, place, {"loss": 1.0})
        recorder.store.log(pack_value([]))
        recorder.commit()
    recorder.commit()

    assert wide_rows(recorder) == [(1, 2), (3, 3), (6, 2), (9, 3)]


def test_wide_outlines_go_with_their_chunks(wide: None, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "weaver.db", levels=(limits.HistoryLevel(100.0, 10.0),), write_after=0.0)
    for step in range(3000):
        recorder.record(step, loss=1.0)
        if step % 100 == 0:
            recorder.commit(START)
    recorder.commit(START)
    before = wide_rows(recorder)
    recorder.store.db.execute("DELETE FROM chunks WHERE id = 2")  # as an older Loom does
    again = Recorder(tmp_path / "weaver.db", levels=(limits.HistoryLevel(100.0, 10.0),))
    assert len(before) > 5
    assert wide_rows(again) == before[1:]
    assert (
        sum(again.history.samples("train_0", "loss", None, "step", *EVER, closely=0).counts) == 3000 - limits.CHUNK
    )

    for _ in range(3):
        again.commit(START + 1e6)
    assert wide_rows(again) == []
    assert again.steps()[-1] == 2999
    commit = again.store.begin()
    again.history.forget(commit, "train_0")
    again.store.write(commit)


def test_points_of_an_older_store_have_no_outlines_and_are_read() -> None:
    recorder = Recorder(write_after=0.0)
    for step in range(1000):
        recorder.record(step, loss=1.0)
    recorder.commit()
    recorder.store.db.execute("DELETE FROM outlines WHERE chunk % 2 = 0")

    found = recorder.history.samples("train_0", "loss", None, "step", *EVER, closely=0)

    assert sum(found.counts) == 1000
    assert sorted(found.steps) == found.steps


def test_an_older_loom_leaves_outlines_of_deleted_chunks(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "weaver.db", write_after=0.0)
    for step in range(1000):
        recorder.record(step, loss=1.0)
    recorder.commit()
    recorder.store.db.execute("DELETE FROM chunks WHERE id = 2")

    found = Recorder(tmp_path / "weaver.db").history.samples("train_0", "loss", None, "step", *EVER, closely=0)

    assert sum(found.counts) == 1000 - limits.CHUNK


def test_outlines_go_with_their_chunks() -> None:
    recorder = Recorder(levels=(limits.HistoryLevel(100.0, 10.0),), write_after=0.0)
    for step in range(1000):
        recorder.record(step, loss=1.0)
    recorder.commit(START + 1000)
    recorder.commit(START + 1e6)

    assert recorder.store.db.execute("SELECT COUNT(*) FROM outlines").fetchone() == (0,)
    commit = recorder.store.begin()
    recorder.history.forget(commit, "train_0")
    recorder.store.write(commit)


def test_a_restart_from_a_checkpoint_begins_a_section(bench: Bench) -> None:
    first = Threadlet(bench, "train_0", start="one")
    for step in range(10):
        first.step(step, loss=float(step))
    die(bench, first)
    bench.now += 5
    again = Threadlet(bench, "train_0", start="one")
    for step in range(6, 9):
        again.step(step, loss=100.0 + step)

    assert [one["step"] for one in only(bench)] == [[*range(10)], [6, 7, 8]]
    assert only(bench)[1]["value"] == [106.0, 107.0, 108.0]
    assert [one["step"] for one in only(bench, by="time")] == [[*range(10)], [6, 7, 8]]


def test_a_restart_that_loses_no_step_is_a_gap_all_the_same(bench: Bench) -> None:
    first = Threadlet(bench, "train_0", start="one")
    first.step(1, loss=1.0)
    die(bench, first)
    bench.now += 100
    Threadlet(bench, "train_0", start="one").step(2, loss=2.0)

    assert [one["step"] for one in only(bench)] == [[1], [2]]


def test_a_curve_has_few_points_and_keeps_the_extremes(bench: Bench) -> None:
    one = Threadlet(bench, "train_0")
    for step in range(1000):
        one.step(step, loss=50.0 if step == 500 else 1.0)

    (section,) = only(bench, points=20)

    assert len(section["step"]) <= 20
    assert section["step"][-1] == 999
    assert max(section["high"]) == 50.0
    assert section["low"] == [1.0] * len(section["low"])


def test_a_range_of_steps_is_a_zoom(bench: Bench) -> None:
    one = Threadlet(bench, "train_0")
    for step in range(100):
        one.step(step, loss=1.0)

    (section,) = only(bench, since=40, until=44)

    assert section["step"] == [40, 41, 42, 43, 44]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_a_hole(bench: Bench, bad: float) -> None:
    one = Threadlet(bench, "train_0")
    for step, loss in enumerate([1.0, bad, 3.0, 4.0]):
        one.step(step, loss=loss)

    (section,) = only(bench)
    (thin,) = only(bench, points=2)

    assert section["value"] == [1.0, None, 3.0, 4.0]
    assert thin["value"] == [None, 3.5]
    assert (thin["low"], thin["high"]) == ([1.0, 3.0], [1.0, 4.0])


def test_points_without_a_step_have_a_place_in_time_only(bench: Bench) -> None:
    one = Threadlet(bench, "train_0")
    one.seq = 1
    one.say("status", [[1, bench.now, None, None, None, {"loss": 1.0}, None]])
    one.step(3, loss=2.0)

    assert [one["step"] for one in only(bench)] == [[3]]
    assert [one["step"] for one in only(bench, by="time")] == [[None, 3]]


def test_a_band_has_the_mean_and_the_extremes_of_all_ranks(bench: Bench) -> None:
    members = ranks(bench, 3)
    for step in range(40):
        for rank, member in enumerate(members):
            member.step(step, loss=float(step + rank))

    found = curves(bench, ranks="band", points=10)

    (section,) = found.curves[0]["sections"]
    assert (found.ranks, found.drawn, found.curves[0]["replica"]) == (3, 3, None)
    assert len(section["value"]) == 10
    assert section["low"][0] == 0.0
    assert section["high"][-1] == 41.0
    assert section["value"][0] == pytest.approx(1.0 + 1.5)
    assert curves(bench, ranks="each").curves[2]["replica"] == "train_2"


def test_a_band_has_ranks_that_came_late_or_restarted(bench: Bench) -> None:
    lead, other = ranks(bench, 2, start="one")
    for step in range(10):
        lead.step(step, loss=1.0)
    die(bench, lead, other)
    lead, other = ranks(bench, 2, start="one")
    for step in range(5, 8):
        lead.step(step, loss=2.0)
        other.step(step, loss=4.0)

    first, second = curves(bench, ranks="band").curves[0]["sections"]

    assert set(first["high"]) == {1.0}
    assert (second["low"], second["high"], second["value"]) == ([2.0] * 3, [4.0] * 3, [3.0] * 3)


def test_of_many_ranks_some_are_drawn(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(catalog._DRAWN, "each", 3)
    for member in ranks(bench, 10):
        member.step(1, loss=1.0)

    found = curves(bench, ranks="each")

    assert (found.ranks, found.drawn) == (10, 3)
    assert [one["replica"] for one in found.curves] == ["train_0", "train_3", "train_6"]


def test_the_ranks_far_from_the_others_are_named(bench: Bench) -> None:
    for rank, member in enumerate(ranks(bench, 8)):
        member.step(1, loss=math.nan if rank == 3 else 90.0 if rank == 5 else 1.0 + rank / 100)

    found = curves(bench, ranks="band").outliers

    assert [one["replica"] for one in found] == ["train_3", "train_5"]
    assert found[0]["distance"] is None
    assert found[1]["distance"] > 100


def test_equal_ranks_have_no_outliers() -> None:
    assert outliers({str(rank): 2.0 for rank in range(100)}) == []
    assert outliers({"0": 1.0, "1": 500.0}) == []
    assert len(outliers({str(rank): math.nan for rank in range(100)})) == MAX_OUTLIERS


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"by": "epoch"}, "by is one of step, time, not 'epoch'"),
        ({"ranks": "all"}, "ranks is one of one, band, each, not 'all'"),
        ({"metric": "accuracy"}, "has no metric 'accuracy'; it has loss"),
        ({"replica": "train_9"}, "has no metric 'loss' of 'train_9'; it has none"),
    ],
)
def test_what_there_is_not_is_named(bench: Bench, wanted: dict[str, Any], message: str) -> None:
    Threadlet(bench, "train_0").step(1, loss=1.0)

    with pytest.raises(WrongArguments, match=message):
        curves(bench, **wanted)


def test_the_value_at_a_step_needs_no_whole_series() -> None:
    recorder = Recorder(write_after=0.0)
    recorder.history.enter("train_0", "run")
    for step in [*range(1000), *range(600, 900)]:
        recorder.record(step, loss=float(step) if recorder.history.size < 20_000 else step + 0.5)
    recorder.commit()
    value = recorder.history.value_at

    assert value("train_0", "loss", "run", 0) == 0.0
    assert value("train_0", "loss", "run", 700) == 700.5  # the later one counts
    assert value("train_0", "loss", "run", 5000) in (999.0, 999.5)
    assert value("train_0", "loss", "run", -1) is None


def test_samples_in_time_are_sorted() -> None:
    samples = CurveSamples()
    samples.add_points(array("d", points((2.0, 1, 20.0), (1.0, 2, 10.0))))

    assert samples.in_time().means == [10.0, 20.0]


def test_the_life_of_a_run_is_in_the_log(bench: Bench) -> None:
    one = Threadlet(bench, "train_0", start="one")
    one.step(3, loss=1.0)
    die(bench, one, reason="killed")
    again = Threadlet(bench, "train_0", start="one")
    do(bench, operations.TagRun("train", ["best"]))
    again.say("bye", "over", "finished")
    do(bench, operations.RemoveRun("train"))

    told = [(event["kind"], event) for event in bench.events if event["kind"].startswith("run_")]

    assert [kind for kind, _ in told] == [
        "run_began", "run_ended", "run_changed", "run_changed", "run_ended", "run_changed"
    ]  # fmt: skip
    assert all((data["run"], data["name"]) == ("one", "train") for _, data in told)
    crashed, went_on, removed = told[1][1], told[2][1], told[-1][1]
    assert (crashed["state"], crashed["first"], crashed["step"]) == ("crashed", "train_0", 3)
    assert went_on["went_on"] is True
    assert went_on["state"] == "running"
    assert removed["removed"] is True
