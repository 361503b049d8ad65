"""The store: what was committed is there again, old history is coarser, and there is never too much of it."""

from __future__ import annotations

import itertools
import math
import random
import sqlite3
from pathlib import Path

import pytest

from loom.control.frame import pack_value
from loom.errors import ProtocolMismatch, UnsafeStateFolder, WrongArguments
from loom.weaver.storage.events import EventStore
from loom.weaver.storage.history import CHUNK, HistoryLevel, MetricHistory
from loom.weaver.storage.store import Store
from loom.weaver.views import WeaverEvent

START = 1_700_000_000.0


class Recorder:
    """A history with its journal, as the weaver keeps them."""

    def __init__(self, path: Path | str = ":memory:", **bounds: object) -> None:
        self.store = Store(path)
        self.history = MetricHistory(self.store, **bounds)  # type: ignore[arg-type]
        for row, entries in self.store.journal():
            for replica, label, time, step, metrics in entries:
                self.history.record_again(replica, label, row, time, step, metrics)

    def record(self, step: int, replica: str = "train_0", every: float = 1.0, **metrics: float) -> None:
        time = START + step * every
        self.history.record(replica, self.store.journal_id, time, step, metrics)
        self.store.log(pack_value([replica, self.history.label(replica), time, step, metrics]))

    def commit(self, now: float = START) -> None:
        commit = self.store.begin()
        commit.execute("DELETE FROM journal WHERE id < ?", self.history.write(commit, now))
        self.store.write(commit)
        commit.stored()

    def steps(self, replica: str = "train_0", metric: str = "loss") -> list[int | None]:
        return [step for _, step, _ in self.history.between(replica, metric, points=1_000_000)]


def test_history_is_read_back_in_order_and_bounded_in_time() -> None:
    recorder = Recorder()
    for step in range(1000):
        recorder.record(step, loss=step / 10)
        if step % 7 == 0:
            recorder.commit()

    found = recorder.history.between("train_0", "loss", START + 300, START + 302)

    assert recorder.steps() == list(range(1000))
    assert found == [(START + 300, 300, 30.0), (START + 301, 301, 30.1), (START + 302, 302, 30.2)]


def test_many_points_are_drawn_as_fewer_means() -> None:
    recorder = Recorder()
    for step in range(1000):
        recorder.record(step, loss=float(step))

    found = recorder.history.between("train_0", "loss", points=10)

    assert len(found) == 10
    assert found[0] == (START + 99, 99, 49.5)


def test_a_metric_that_nobody_reports_has_no_history() -> None:
    recorder = Recorder()
    recorder.record(1, loss=1.0)

    assert recorder.history.between("train_0", "accuracy") == []
    assert recorder.history.between("train_1", "loss") == []
    assert recorder.history.metrics("train_0") == ["loss"]


def test_a_loss_that_is_not_a_number_any_more_is_kept() -> None:
    recorder = Recorder()
    recorder.record(1, loss=math.nan)
    recorder.history.record("train_0", recorder.store.journal_id, START + 2, None, {"loss": math.inf})

    (first, second) = recorder.history.between("train_0", "loss")

    assert math.isnan(first[2])
    assert second == (START + 2, None, math.inf)


@pytest.mark.parametrize("value", ["low", None, [1.0], 10**400])
def test_a_value_that_is_no_number_is_refused_and_leaves_nothing(value: object) -> None:
    recorder = Recorder()
    recorder.record(1, loss=1.0)

    with pytest.raises(ProtocolMismatch, match="which is no number"):
        recorder.record(2, loss=value)  # type: ignore[arg-type]

    recorder.record(3, loss=3.0)
    assert recorder.steps() == [1, 3]


def test_a_replica_cannot_report_metrics_without_end() -> None:
    recorder = Recorder()

    with pytest.raises(ProtocolMismatch, match="more than 1000 metrics"):
        recorder.record(1, **{f"metric_{number}": 1.0 for number in range(1001)})
    with pytest.raises(ProtocolMismatch, match="1 to 200 characters"):
        recorder.record(1, replica="train_1", **{"x" * 201: 1.0})


@pytest.mark.parametrize("seed", range(16))
def test_whatever_was_committed_is_there_again_once_and_in_its_run(tmp_path: Path, seed: int) -> None:
    """With commits, chunks written early and late, other runs, and starts again at any time."""
    chance = random.Random(seed)
    bounds = {"write_after": 5.0, "levels": ()}
    recorder = Recorder(tmp_path / "store", **bounds)
    committed: dict[str, list[int]] = {"train_0": [], "train_1": []}
    pending: dict[str, list[int]] = {"train_0": [], "train_1": []}
    runs, of_step = dict.fromkeys(pending, ""), dict[int, str]()
    step, now = 0, START
    for _ in range(300):
        match chance.choice(["record", "record", "commit", "wait", "restart", "run" if seed % 2 else "wait"]):
            case "record":
                replica = chance.choice(list(pending))
                for _ in range(chance.choice([1, 3, CHUNK, CHUNK + 5])):
                    step += 1
                    of_step[step] = runs[replica]
                    recorder.record(step, replica, loss=float(step))
                    pending[replica].append(step)
            case "commit":
                recorder.commit(now)
                for replica, steps in pending.items():
                    committed[replica] += steps
                    pending[replica] = []
            case "wait":
                now += chance.choice([0.1, 6.0])
            case "run":
                replica = chance.choice(list(runs))
                runs[replica] = chance.choice(["run_a", "run_b"])
                recorder.history.enter(replica, runs[replica])
            case "restart":
                recorder.store.close()
                recorder = Recorder(tmp_path / "store", **bounds)
                pending = {replica: [] for replica in pending}
                for replica, run in runs.items():
                    recorder.history.enter(replica, run)

    for replica, steps in committed.items():
        assert recorder.steps(replica) == steps + pending[replica]
        for run in ("", "run_a", "run_b"):
            points = recorder.history.between(replica, "loss", points=1_000_000, run=run)
            expected = [one for one in steps + pending[replica] if of_step[one] == run]
            assert [one for _, one, _ in points] == expected


def test_the_journal_is_dropped_once_everything_in_it_is_elsewhere(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "store", write_after=5.0)
    for step in range(50):
        recorder.record(step, loss=1.0)
        recorder.record(step, replica="train_1", loss=1.0)
        recorder.commit(START + step)
    kept = list(recorder.store.journal())
    recorder.commit(START + 100)

    assert len(kept) < 10
    assert list(recorder.store.journal()) == []
    assert recorder.steps() == recorder.steps("train_1") == list(range(50))


def test_old_history_becomes_coarser_by_levels() -> None:
    recorder = Recorder(levels=(HistoryLevel(1000.0, 10.0), HistoryLevel(5000.0, 100.0)))
    for step in range(10_000):
        recorder.record(step, loss=float(step))
    for _ in range(100):
        recorder.commit(START + 10_000)

    steps = recorder.steps()
    gaps = {(later or 0) - (earlier or 0) for earlier, later in itertools.pairwise(steps)}

    assert len(steps) < 2500
    assert steps[-500:] == list(range(9500, 10_000))
    assert max(gaps) <= 101
    assert recorder.history.between("train_0", "loss", until=START + 99)[0][2] == pytest.approx(49.5, abs=5)


def test_there_is_never_much_more_history_than_allowed() -> None:
    recorder = Recorder(levels=(), max_bytes=100_000)
    for step in range(50_000):
        recorder.record(step, loss=float(step))
        if step % 1000 == 0:
            recorder.commit(START + step)
    recorder.commit(START + 50_000)

    steps = recorder.steps()
    assert recorder.history.size <= 100_000
    assert steps == list(range(50_000 - len(steps), 50_000))
    assert len(steps) > 3000


def test_the_size_is_known_again_after_a_start(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "store", write_after=0.0)
    for step in range(1000):
        recorder.record(step, loss=1.0)
        recorder.commit(START + step)
    before = recorder.history.size
    recorder.store.close()

    (stored,) = sqlite3.connect(tmp_path / "store").execute("SELECT SUM(LENGTH(data)) FROM chunks").fetchone()

    assert Recorder(tmp_path / "store").history.size == before == stored


def test_a_chunk_that_has_become_coarser_is_not_written_again() -> None:
    recorder = Recorder(levels=(HistoryLevel(100.0, 10.0),), write_after=0.0)
    for step in range(20):
        recorder.record(step, loss=1.0)
    recorder.commit(START)
    recorder.record(20, loss=1.0)
    recorder.commit(START + 1000)
    recorder.commit(START + 1000)
    recorder.record(2000, loss=1.0)
    recorder.commit(START + 2000)

    assert recorder.steps() == [9, 19, 20, 2000]


def test_points_that_wait_to_be_written_are_read_with_their_metric() -> None:
    recorder = Recorder()
    for step in range(CHUNK + 5):
        recorder.record(step, loss=1.0, accuracy=0.5)

    assert recorder.steps(metric="loss") == recorder.steps(metric="accuracy") == list(range(CHUNK + 5))


def test_a_chunk_that_points_are_about_to_be_added_to_becomes_coarser_later() -> None:
    recorder = Recorder(levels=(HistoryLevel(65.0, 10.0),), write_after=60.0)
    for step in range(20):
        recorder.record(step, loss=1.0)
    recorder.commit(START)
    recorder.commit(START + 60)
    recorder.record(61, loss=1.0)

    recorder.commit(START + 85)
    before = recorder.steps()
    for _ in range(2):  # the first one writes the points, the second one finds them
        recorder.commit(START + 145)

    assert before == [*range(20), 61]
    assert recorder.steps() == [9, 19, 61]


def test_history_that_has_no_room_is_not_kept() -> None:
    recorder = Recorder(levels=(HistoryLevel(1000.0, 10.0),), max_bytes=100, write_after=0.0)
    for step in range(20):
        recorder.record(step, loss=1.0)
    for _ in range(2):  # the first one writes the points, the second one drops them
        recorder.commit(START)
    recorder.record(20, loss=1.0)

    assert recorder.history.size == 0
    assert recorder.steps() == [20]


def test_a_replica_that_is_forgotten_has_no_history(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "store", write_after=0.0)
    for step in range(300):
        recorder.record(step, loss=1.0)
        recorder.record(step, replica="train_1", loss=1.0)
    recorder.commit()
    commit = recorder.store.begin()
    recorder.history.forget(commit, "train_0")
    recorder.store.write(commit)
    recorder.store.close()
    again = Recorder(tmp_path / "store")

    assert again.history.metrics("train_0") == []
    assert again.steps("train_1") == list(range(300))
    assert again.history.size == 300 * 24


def test_a_forgotten_replica_leaves_the_points_of_kept_runs_until_these_are_removed(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "store", write_after=0.0)
    for step in range(300):
        if step % 100 == 0:
            recorder.history.enter("train_0", ["", "kept", "gone"][step // 100])
        recorder.record(step, loss=1.0)
    recorder.commit()
    recorder.history.forget(commit := recorder.store.begin(), "train_0", lambda run: run == "kept")
    recorder.store.write(commit)
    recorder.store.close()
    again = Recorder(tmp_path / "store")
    left = again.steps()
    again.history.forget_run(commit := again.store.begin(), "train_0", "kept")
    again.store.write(commit)

    assert left == list(range(100, 200))
    assert again.steps() == []
    assert again.history.size == 0
    assert not again.store.db.execute("SELECT * FROM series, runs_of_series").fetchall()


def test_means_of_old_points_never_mix_two_runs() -> None:
    recorder = Recorder(levels=(HistoryLevel(10.0, 1000.0),), write_after=0.0)
    for step in range(60):
        if step % 20 == 0:
            recorder.history.enter("train_0", f"run_{step // 20}")
        recorder.record(step, loss=float(step // 20))
    for _ in range(5):
        recorder.commit(START + 10_000)

    for run in range(3):
        points = recorder.history.between("train_0", "loss", run=f"run_{run}")
        assert [value for _, _, value in points] == [run]


def test_a_commit_that_fails_writes_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.put("replicas", "train_0", {"id": "train_0"})
    commit = store.begin()
    commit.execute("INSERT INTO missing VALUES (1)")

    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        store.write(commit)

    assert list(store.rows("replicas")) == []
    store.put("replicas", "train_1", {"id": "train_1"})
    store.write(store.begin())
    assert list(store.rows("replicas")) == [("train_1", {"id": "train_1"})]


def test_a_store_of_another_version_is_named(tmp_path: Path) -> None:
    Store(tmp_path / "store").close()
    other = sqlite3.connect(tmp_path / "store")
    other.execute("PRAGMA user_version=99")
    other.close()

    with pytest.raises(UnsafeStateFolder, match="is of version 99; this Loom knows 1"):
        Store(tmp_path / "store")


def write(store: Store, log: EventStore) -> list[WeaverEvent]:
    """Commit the events; return them."""
    commit = store.begin()
    written = log.write(commit)
    store.write(commit)
    commit.stored()
    return written


def test_events_are_found_by_replica_kind_and_number() -> None:
    store = Store(":memory:")
    log = EventStore(store)
    for number in range(6):
        log.append(START + number, "even" if number % 2 == 0 else "odd", f"train_{number % 3}", number=number)
        if number == 3:
            write(store, log)

    def numbers(**wanted: object) -> list[int]:
        arguments = {"id": 0, "limit": 100, **wanted}
        return [event.data["number"] for event in log.after(**arguments)]  # type: ignore[arg-type]

    assert numbers() == [0, 1, 2, 3, 4, 5]
    assert numbers(id=3) == [3, 4, 5]
    assert numbers(limit=2) == [0, 1]
    assert numbers(limit=2, newest=True) == [4, 5]
    assert numbers(replica="train_1") == [1, 4]
    assert numbers(kind="odd") == [1, 3, 5]
    assert numbers(kind="odd", replica="train_2") == [5]
    assert numbers(since=START + 2) == [2, 3, 4, 5]
    assert numbers(since=START + 0.5, until=START + 4) == [1, 2, 3, 4]
    assert numbers(since=START + 1, until=START + 4, limit=2, newest=True) == [3, 4]
    assert numbers(since=START + 1, limit=2) == [1, 2]
    assert numbers(since=START + 5.5) == numbers(until=START - 1) == numbers(since=START + 3, until=START + 2) == []


@pytest.mark.parametrize("back", [0.5, 3.0, 1e6])
def test_events_are_found_by_time_though_the_clock_was_set_back(back: float) -> None:
    store = Store(":memory:")
    times = [START + number - (back if number >= 5 else 0.0) for number in range(10)]
    log = EventStore(store)
    for number, time in enumerate(times):
        log.append(time, "event", None, number=number)
        if number in (2, 6):
            write(store, log)
        if number == 6:
            log = EventStore(store)  # as after a start of the weaver

    bounds = [-math.inf, math.inf, *times, *(time + 0.25 for time in times)]
    for since in bounds:
        for until in bounds:
            expected = [number for number, time in enumerate(times) if since <= time <= until]
            for limit, newest in ((100, False), (2, False), (2, True)):
                found = [one.data["number"] for one in log.after(0, limit, newest=newest, since=since, until=until)]
                assert found == (expected[-limit:] if newest else expected[:limit])


def test_what_is_added_to_an_event_is_there_before_and_after_the_commit() -> None:
    store = Store(":memory:")
    log = EventStore(store)
    event = log.append(START, "stalled", "train_0", step=3)
    write(store, log)

    log.amend(event.id, stack="in train()")
    before = log.after(0, 10)
    (pushed,) = write(store, log)

    assert before[0].data == {"step": 3, "stack": "in train()"}
    assert log.after(0, 10)[0].data == {"step": 3, "stack": "in train()"}
    assert pushed.id == event.id
    assert log.amend(99, stack="nothing") is None


def test_what_is_added_to_an_event_before_its_commit_is_told_once() -> None:
    store = Store(":memory:")
    log = EventStore(store)
    event = log.append(START, "stalled", "train_0", step=3)

    amended = log.amend(event.id, stack="in train()")

    assert write(store, log) == [amended]
    assert log.after(0, 10)[0].data == {"step": 3, "stack": "in train()"}


def test_only_the_last_events_are_kept() -> None:
    store = Store(":memory:")
    log = EventStore(store, keep=100)
    for number in range(1000):
        log.append(START, "event", None, number=number)
        if number % 10 == 0:
            write(store, log)

    (kept,) = store.db.execute("SELECT COUNT(*) FROM events").fetchone()
    assert 90 <= kept <= 101
    assert EventStore(store).last == 991


def read_on(recorder: Recorder, cursor: str, read: list[int | None], limit: int = 7) -> str:
    """Read all points after a cursor, whose steps are added to those that were read."""
    more = True
    while more:
        found, cursor, more = recorder.history.after("train_0", cursor, limit=limit)
        read += [step for _, step, _ in found.get("loss", ())]
    return cursor


@pytest.mark.parametrize("seed", range(20))
def test_each_point_comes_once_after_cursors_over_commits_restarts_and_clocks_that_go_back(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    recorder = Recorder(tmp_path / "w.sqlite", write_after=20.0)
    cursor, read, stored, run = "", list[int | None](), 0, ""
    for step in range(700):
        if seed % 2 and rng.random() < 0.05:
            run = f"run_{rng.choice('abcd')}"
            recorder.history.enter("train_0", run)
        recorder.record(step, every=rng.choice([1.0, 1.0, 0.5]), loss=step, other=step)
        if rng.random() < 0.2:
            recorder.commit(START + step)
            stored = step + 1
            if rng.random() < 0.4:
                cursor = read_on(recorder, cursor, read, rng.choice([1, 7, 500]))
                assert read == list(range(stored))
            if rng.random() < 0.1:
                recorder = Recorder(tmp_path / "w.sqlite", write_after=20.0)
                recorder.history.enter("train_0", run)
    recorder.commit(START + 700)
    read_on(recorder, cursor, read)

    assert read == list(range(700))


def test_points_that_became_coarser_are_passed_and_their_later_means_come(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "w.sqlite", levels=(HistoryLevel(100.0, 10.0),), write_after=0.0)
    read: list[int | None] = []
    for step in range(300):
        recorder.record(step, loss=step)
    recorder.commit(START + 50)
    cursor = read_on(recorder, "", read)
    for step in range(300, 1000):
        recorder.record(step, loss=step)
        if step % 10 == 9:
            recorder.commit(START + step)
    for _ in range(20):
        recorder.commit(START + 1000)
    recorder = Recorder(tmp_path / "w.sqlite", levels=(HistoryLevel(100.0, 10.0),), write_after=0.0)

    found, cursor, more = recorder.history.after("train_0", cursor, since=START + 299, limit=10_000)
    steps = [step for _, step, _ in found["loss"]]

    assert read == list(range(300))
    assert not more
    assert steps[0] == 309
    assert steps[-100:] == list(range(900, 1000))
    assert len(steps) < 300
    assert sorted(set(steps)) == steps
    assert recorder.history.after("train_0", cursor) == ({}, cursor, False)
    assert recorder.history.is_coarse_after("train_0", "")
    assert not recorder.history.is_coarse_after("train_0", cursor)


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        ((math.inf, -math.inf), math.nan),
        ((1e308, 1e308), 1e308),
        ((-1e308, 1e308), 0.0),
        ((math.inf, 1.0), math.inf),
    ],
)
def test_values_without_a_sum_become_coarser(values: tuple[float, float], mean: float) -> None:
    recorder = Recorder(levels=(HistoryLevel(100.0, 10.0),))
    for step, value in enumerate(values):
        recorder.record(step, loss=value)
    for step in range(600):
        recorder.record(10 + step, loss=0.0)
    for _ in range(20):
        recorder.commit(START + 10_000)

    (_, _, found), *_ = recorder.history.between("train_0", "loss")

    assert found == pytest.approx(mean, nan_ok=True)


def test_a_cursor_of_another_store_or_of_a_forgotten_replica_begins_anew() -> None:
    recorder = Recorder()
    for step in range(5):
        recorder.record(step, loss=step)
    recorder.commit()

    for cursor in ("9:3", "1:50"):
        found, after, _ = recorder.history.after("train_0", cursor)
        assert [step for _, step, _ in found["loss"]] == [0, 1, 2, 3, 4]
        assert after == "1:5"
    for wrong in ("x", "1", "1:-1", "1:2,", ":", "1:2:3"):
        with pytest.raises(WrongArguments):
            recorder.history.after("train_0", wrong)
    assert recorder.history.after("nobody", "1:2") == ({}, "", False)
