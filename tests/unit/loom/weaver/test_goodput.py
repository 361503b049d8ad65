"""Goodput: where each second of a job went, by a clock of the test's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loom.control.reports import TimeAccount
from loom.errors import ProtocolMismatch
from loom.weaver.goodput import goodput as goodput_module
from loom.weaver.goodput.goodput import MAX_FAULTS, MAX_SAMPLES, NEW_RUN_AFTER, Goodput
from loom.weaver.storage.store import Store

START = 1_700_000_000.0


class Bench:
    """Goodput, with time counted from 0."""

    def __init__(self, store: Store | None = None) -> None:
        self.store = store or Store(":memory:")
        self.goodput = Goodput(self.store)

    def registers(
        self, at: float, replica: str = "train_0", job: str = "train", last_sign: float = 0.0, run: str = ""
    ) -> None:
        self.goodput.registered(job, replica, START + at, START + last_sign, run)

    def tells(
        self,
        at: float,
        replica: str = "train_0",
        *,
        began: float = 0.0,
        first_at: float | None = 0.0,
        steps: tuple[int, int] | None = None,
        open: float = 0.0,
        **spent: float,
    ) -> None:
        """An account of a process that began at a time."""
        first, highest = steps or (None, None)
        told = TimeAccount(at - began, first_at, first, highest, open, spent)
        self.goodput.account("train", replica, told, START + at)

    def fails(
        self,
        at: float,
        replica: str = "train_0",
        last_sign: float | None = None,
        last_step: float = 0.0,
        step: int | None = None,
        respawns: bool = False,
    ) -> None:
        heard = at if last_sign is None else last_sign
        times = START + at, START + heard, START + last_step
        self.goodput.failed("train", replica, "killed", *times, step, respawns)

    def finishes(self, at: float, replica: str = "train_0") -> None:
        self.goodput.finished("train", replica, START + at)

    def share(self, at: float) -> float | None:
        return self.goodput.record("train", START + at).ratio

    def seconds(self, at: float) -> dict[str, float]:
        """What there is of each reason, without those of which there is nothing."""
        seconds = self.goodput.record("train", START + at).to_body()["seconds"]
        return {reason: round(value, 6) for reason, value in seconds.items() if abs(value) > 1e-9}

    def faults(self) -> list[dict[str, Any]]:
        faults: list[dict[str, Any]] = self.goodput.record("train", START).to_body()["faults"]
        return faults

    def again(self, at: float) -> Bench:
        """As the next weaver finds it."""
        self.goodput.save(START + at)
        self.store.write(self.store.begin())
        return Bench(self.store)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_what_a_process_tells_adds_up_to_its_time(bench: Bench) -> None:
    bench.registers(0)
    bench.tells(10, compute=6.0, checkpoint=1.0, waiting=0.5, lost=0.5)

    assert bench.seconds(10) == {"compute": 6.0, "checkpoint": 1.0, "waiting": 0.5, "lost": 0.5, "idle": 2.0}
    assert bench.goodput.record("train", START + 10).to_body()["ratio"] == pytest.approx(0.6)


def test_the_newest_account_stands_for_those_before_it(bench: Bench) -> None:
    bench.registers(0)
    bench.tells(10, compute=6.0, data=1.0)
    bench.tells(20, compute=16.0, data=1.5)

    assert bench.seconds(20) == {"compute": 16.0, "data": 1.5, "idle": 2.5}


def test_seconds_that_a_process_takes_back_are_not_its_jobs(bench: Bench) -> None:
    bench.registers(0)
    bench.tells(10, compute=6.0, data=4.0)
    bench.tells(12, compute=12.0)

    assert bench.seconds(12) == {"compute": 12.0}


def test_a_process_that_was_taken_for_finished_and_goes_on_is_counted_again(bench: Bench) -> None:
    bench.registers(0)
    bench.tells(10, compute=10.0)
    bench.finishes(10)

    bench.tells(15, began=10, compute=5.0)

    assert bench.seconds(15) == {"compute": 15.0}
    assert bench.goodput.record("train", START + 15).replicas == 1


def test_what_a_process_tells_after_its_death_does_not_count(bench: Bench) -> None:
    bench.registers(0)
    bench.tells(10, compute=10.0)
    bench.fails(10)

    bench.tells(12, compute=12.0)

    assert bench.seconds(12) == {"compute": 10.0}


def test_a_death_that_is_told_twice_is_one(bench: Bench) -> None:
    bench.registers(0)
    bench.tells(10, compute=10.0)
    bench.fails(10)
    bench.fails(12)
    bench.fails(12, "train_9")

    assert [fault["detected"] for fault in bench.faults()] == [START + 10]


def test_a_step_that_is_being_made_counts_until_its_process_dies(bench: Bench) -> None:
    bench.registers(0)
    bench.tells(10, compute=6.0, open=4.0)
    assert bench.seconds(10) == {"compute": 10.0}

    bench.fails(10)

    assert bench.seconds(10) == {"compute": 6.0, "lost": 4.0}


def test_steps_that_were_reported_count_though_their_time_was_not_told(bench: Bench) -> None:
    bench.registers(0)
    bench.tells(10, compute=9.9, open=0.1, steps=(1, 99))

    bench.fails(11.0, last_sign=10.75, last_step=10.5)

    assert bench.seconds(11) == {"compute": 10.5, "lost": 0.25, "detection": 0.25}


def test_a_death_costs_detection_respawn_and_waiting(bench: Bench) -> None:
    bench.registers(0)
    bench.tells(10, compute=10.0, steps=(1, 100))
    bench.fails(11.0, last_sign=10.25)
    bench.registers(14)
    bench.tells(15, began=13.5, first_at=None, waiting=1.5)
    bench.tells(20, began=13.5, first_at=3.5, waiting=3.5, compute=3.0, steps=(101, 130))

    assert bench.seconds(20) == {
        "compute": 13.0,
        "lost": 0.25,  # of which the process that died could not tell
        "detection": 0.75,
        "respawn": 3.0,
        "waiting": 3.0,  # from registering: before, the place was vacant
    }
    assert sum(bench.seconds(20).values()) == pytest.approx(20.0)
    assert bench.faults() == [
        {
            "replica": "train_0",
            "reason": "killed",
            "time": START + 10.25,
            "detected": START + 11.0,
            "registered": START + 14,
            "stepped": START + 17.0,
        }
    ]


def begin_two(bench: Bench) -> None:
    for replica in ("train_0", "train_1"):
        bench.registers(0, replica)
        bench.tells(10, replica, compute=10.0)


def test_a_vacant_place_costs_while_it_waits_for_another_process(bench: Bench) -> None:
    begin_two(bench)
    bench.fails(10, respawns=True)

    assert bench.seconds(15)["respawn"] == 5.0


def test_a_vacant_place_that_nobody_fills_costs_nothing(bench: Bench) -> None:
    begin_two(bench)
    bench.fails(10)

    assert "respawn" not in bench.seconds(15)


def test_a_process_that_came_all_the_same_costs_the_time_until_then(bench: Bench) -> None:
    begin_two(bench)
    bench.fails(10)

    bench.registers(16)

    assert bench.seconds(16)["respawn"] == 6.0


@pytest.mark.parametrize("respawns", [True, False])
@pytest.mark.parametrize("end", ["finishes", "fails"])
def test_the_share_stays_what_it_was_at_the_end(bench: Bench, respawns: bool, end: str) -> None:
    begin_two(bench)
    bench.fails(10, respawns=respawns)
    bench.tells(15, "train_1", compute=15.0)
    at_end = bench.share(15)

    getattr(bench, end)(15, "train_1")

    assert [bench.share(at) for at in (15, 20, 100)] == [at_end] * 3
    assert bench.seconds(100).get("respawn", 0.0) == (5.0 if respawns else 0.0)


def test_the_time_of_a_vacant_place_is_charged_once_if_a_process_comes_after_the_end(bench: Bench) -> None:
    begin_two(bench)
    bench.fails(10, respawns=True)
    bench.tells(15, "train_1", compute=15.0)
    bench.finishes(15, "train_1")

    bench.registers(20)

    assert bench.seconds(20)["respawn"] == 10.0


def test_a_process_that_lives_after_all_takes_its_vacant_time_back_also_after_the_end(bench: Bench) -> None:
    begin_two(bench)
    bench.fails(10, respawns=True)
    bench.tells(15, "train_1", compute=15.0)
    bench.finishes(15, "train_1")

    bench.goodput.back("train", "train_0", START + 20)

    assert "respawn" not in bench.seconds(20)


def test_the_counters_of_a_job_never_fall(tmp_path: Path) -> None:
    bench = Bench(Store(tmp_path / "weaver.db"))
    begin_two(bench)
    bench.fails(10, respawns=True)
    seen = [bench.goodput.counters("train", START + at) for at in (10, 14)]
    bench.goodput.back("train", "train_0", START + 15)
    bench.tells(15, compute=8.0, lost=7.0)
    seen += [bench.goodput.counters("train", START + at) for at in (15, 16)]

    assert bench.goodput.record("train", START + 16).seconds["respawn"] == 0.0
    assert seen[-1]["respawn"] == 4.0
    for reason in seen[0]:
        assert [one[reason] for one in seen] == sorted(one[reason] for one in seen)


def test_a_replica_of_another_name_takes_the_vacant_place(bench: Bench) -> None:
    bench.registers(0)
    bench.fails(10)
    bench.registers(12, "train_0_again")
    bench.tells(20, "train_0_again", began=12, compute=8.0)

    assert bench.seconds(20) == {"respawn": 2.0, "compute": 8.0}
    assert bench.faults()[0]["registered"] == START + 12


def test_steps_that_the_process_before_had_made_are_lost(bench: Bench) -> None:
    bench.registers(0)
    bench.tells(10, compute=10.0, steps=(1, 100))
    bench.fails(10)
    bench.registers(10)
    bench.tells(12, began=10, compute=2.0, steps=(81, 90))
    bench.tells(16, began=10, compute=6.0, steps=(81, 110))

    assert bench.seconds(16) == {"compute": 12.0, "lost": 4.0}
    bench.tells(20, began=10, compute=10.0, steps=(81, 130))
    assert bench.seconds(20) == {"compute": 16.0, "lost": 4.0}


def test_steps_that_were_only_reported_were_made_too(bench: Bench) -> None:
    bench.registers(0)
    bench.tells(10, compute=10.0, steps=(1, 100))
    bench.fails(11, last_step=11, step=110)
    bench.registers(11)
    bench.tells(14, began=11, compute=3.0, steps=(101, 130))

    assert bench.seconds(14) == {"compute": 13.0, "lost": 1.0}


def test_a_step_that_is_being_made_again_is_lost(bench: Bench) -> None:
    bench.registers(0)
    bench.tells(10, compute=10.0, steps=(1, 100))
    bench.fails(10)
    bench.registers(10)
    bench.tells(12, began=10, compute=1.0, open=1.0, steps=(81, 90))

    assert bench.seconds(12) == {"compute": 10.0, "lost": 2.0}


def test_a_process_that_was_taken_for_dead_gets_its_time_back(bench: Bench) -> None:
    bench.registers(0)
    bench.tells(10, compute=8.0, open=2.0)
    bench.fails(14, last_sign=11)
    assert bench.seconds(14) == {"compute": 8.0, "lost": 3.0, "detection": 3.0}

    bench.goodput.back("train", "train_0", START + 20)
    bench.tells(20, compute=19.0)

    assert bench.seconds(20) == {"compute": 19.0, "idle": 1.0}


def test_a_process_that_is_replaced_before_it_is_known_to_be_dead(bench: Bench) -> None:
    bench.registers(0)
    bench.tells(10, compute=10.0)
    bench.registers(13, last_sign=10.5)
    bench.tells(15, began=13, compute=2.0)

    assert bench.seconds(15) == {"compute": 12.0, "lost": 0.5, "respawn": 2.5}
    assert bench.faults()[0]["detected"] == bench.faults()[0]["time"] == START + 10.5


def test_time_before_the_weaver_knew_a_process_is_not_counted_twice(bench: Bench) -> None:
    bench.registers(0)
    bench.fails(0)
    bench.registers(60)  # the weaver was away
    bench.tells(70, began=10, first_at=5.0, waiting=5.0, compute=55.0)

    assert bench.seconds(70) == {"respawn": 15.0, "compute": 55.0}


def test_a_job_that_was_given_up_begins_anew(bench: Bench) -> None:
    bench.registers(0)
    bench.tells(10, compute=10.0)
    bench.fails(10)

    bench.registers(20 + NEW_RUN_AFTER)

    assert bench.seconds(20 + NEW_RUN_AFTER) == {"compute": 10.0}


@pytest.mark.parametrize("respawns", [False, True], ids=["not awaited", "awaited"])
@pytest.mark.parametrize("names", [("train_0", "train_1"), ("other_0", "other_1")], ids=["same", "other"])
def test_a_new_run_is_no_respawn_of_the_one_before(bench: Bench, names: tuple[str, str], respawns: bool) -> None:
    for replica in ("train_0", "train_1"):
        bench.registers(0, replica, run="first")
        bench.tells(10, replica, compute=10.0)
    for replica in ("train_0", "train_1"):
        bench.fails(10, replica, respawns=respawns)

    for replica in names:
        bench.registers(40, replica, run="second")
        bench.tells(50, replica, began=40, compute=10.0)

    assert bench.seconds(50) == {"compute": 40.0}
    assert all(one.registered is None for one in bench.goodput.record("train", START + 50).faults)


def test_a_new_run_is_no_respawn_of_one_whose_end_is_not_known_yet(bench: Bench) -> None:
    for replica in ("train_0", "train_1"):
        bench.registers(0, replica, run="first")
        bench.tells(10, replica, compute=10.0)

    bench.registers(12, run="second", last_sign=10)
    bench.fails(13, "train_1", last_sign=10)
    bench.registers(14, "train_1", run="second")
    for replica, began in (("train_0", 12), ("train_1", 14)):
        bench.tells(20, replica, began=began, compute=20.0 - began)

    assert bench.seconds(20).get("respawn", 0.0) == 0.0


def test_a_restart_in_the_same_run_is_a_respawn_after_the_weavers_death_too(bench: Bench) -> None:
    bench.registers(0, run="first")
    bench.tells(10, compute=10.0)
    bench.fails(10)

    bench = bench.again(20)
    bench.registers(40, run="first")

    assert bench.seconds(40) == {"compute": 10.0, "respawn": 30.0}


def test_a_run_that_lives_keeps_its_vacant_place_while_another_begins(bench: Bench) -> None:
    for replica in ("train_0", "train_1"):
        bench.registers(0, replica, run="first")
        bench.tells(10, replica, compute=10.0)
    bench.fails(10, "train_1", respawns=True)

    bench.registers(20, "other_0", run="second")
    bench.registers(30, "train_1", run="first")

    assert bench.seconds(30)["respawn"] == 20.0


def test_of_thousands_each_is_heard_less_often(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goodput_module, "ACCOUNTS_A_SECOND", 2)
    pauses = []
    for number in range(9):
        bench.registers(0, f"train_{number}")
        pauses.append(bench.goodput.account_pause)

    assert pauses == [0, 0, 2, 2, 4, 4, 4, 4, 8]


def test_a_process_that_takes_no_step_has_no_goodput(bench: Bench) -> None:
    bench.registers(0)
    bench.tells(10, first_at=None, waiting=10.0)
    assert bench.goodput.record("train", START + 10).to_body()["ratio"] is None

    bench.tells(20, first_at=15.0, waiting=15.0, open=5.0)
    assert bench.seconds(20) == {"waiting": 15.0, "compute": 5.0}


def test_jobs_are_counted_apart(bench: Bench) -> None:
    bench.registers(0)
    bench.registers(0, "other_0", job="other")
    bench.tells(10, compute=10.0)

    assert bench.goodput.jobs() == ["train", "other"]
    assert bench.goodput.record("other", START + 10).to_body()["ratio"] is None


# -- its course ---------------------------------------------------------------------------------------------


def test_the_course_grows_coarser_and_not_longer(bench: Bench) -> None:
    bench.registers(0)
    seconds = 3 * MAX_SAMPLES
    for at in range(seconds):
        bench.tells(at, compute=float(at))
        bench.goodput.tick(START + at)

    course = bench.goodput.record("train", START + seconds).to_body()["course"]

    assert MAX_SAMPLES / 3 < len(course) <= MAX_SAMPLES + 1
    assert all(round(point["time"] - START) in (point["seconds"]["compute"], seconds) for point in course)
    assert (course[0]["time"], course[-1]["time"]) == (START, START + seconds)


def test_a_job_that_is_over_has_no_more_course(bench: Bench) -> None:
    bench.registers(0)
    bench.tells(10, compute=10.0)
    bench.finishes(10)

    bench.goodput.tick(START + 100)

    record = bench.goodput.record("train", START + 100).to_body()
    assert record["until"] == START + 10
    assert [point["time"] for point in record["course"]] == [START + 10]


def test_so_many_faults_are_remembered(bench: Bench) -> None:
    for at in range(MAX_FAULTS + 5):
        bench.registers(at)
        bench.fails(at + 0.5)

    faults = bench.faults()
    assert len(faults) == MAX_FAULTS
    assert faults[0]["time"] == START + 5.5


def test_so_many_jobs_are_remembered(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goodput_module, "MAX_JOBS", 2)
    bench.registers(0, job="one")
    bench.registers(1, job="two")
    bench.goodput.failed("one", "train_0", "killed", START + 1, START + 1)

    bench.registers(2, job="three")

    assert bench.goodput.jobs() == ["two", "three"]
    assert bench.again(0).goodput.jobs() == ["two", "three"]


# -- over a restart of the weaver ---------------------------------------------------------------------------


def test_everything_is_there_after_a_restart(bench: Bench) -> None:
    bench.registers(0)
    bench.registers(0, "train_1")
    bench.goodput.tick(START)
    bench.tells(40, compute=40.0, steps=(1, 40))
    bench.tells(40, "train_1", compute=30.0, open=10.0, steps=(1, 30))
    bench.fails(41, last_sign=40.5)

    after = bench.again(80)

    assert after.goodput.record("train", START + 80) == bench.goodput.record("train", START + 80)
    for one in (bench, after):
        one.registers(81)
        one.tells(90, began=81, compute=8.0, steps=(31, 50))
        one.tells(90, "train_1", compute=80.0, open=10.0, steps=(1, 80))
    assert after.goodput.record("train", START + 90) == bench.goodput.record("train", START + 90)


def test_what_a_living_process_told_last_it_tells_again(bench: Bench) -> None:
    bench.registers(0)
    bench.tells(1, compute=1.0)
    after = bench.again(1)
    bench.tells(20, compute=20.0)

    after.tells(21, compute=21.0)

    assert after.seconds(21) == {"compute": 21.0}


def test_what_was_lost_is_known_once_it_is_made_up_for(bench: Bench) -> None:
    bench.registers(0)
    bench.tells(10, compute=10.0, steps=(1, 100))
    bench.fails(10)
    bench.registers(10)
    bench.tells(12, began=10, compute=2.0, steps=(81, 82))  # the first steps are slow
    bench.goodput.save(START + 12)
    bench.tells(16, began=10, compute=6.0, steps=(81, 100))
    assert bench.seconds(16) == {"compute": 10.0, "lost": 6.0}

    after = bench.again(16)
    after.tells(20, began=10, compute=10.0, steps=(81, 130))

    assert after.seconds(20) == {"compute": 14.0, "lost": 6.0}


def test_an_older_store_is_taken_up(tmp_path: Any) -> None:
    store = Store(tmp_path / "weaver.sqlite")
    store.db.execute("DROP TABLE goodput")
    store.close()

    bench = Bench(Store(tmp_path / "weaver.sqlite"))
    bench.registers(0)

    assert bench.again(1).goodput.jobs() == ["train"]


# -- on the link --------------------------------------------------------------------------------------------


def test_an_account_is_read() -> None:
    assert TimeAccount.from_body(["spent", [2.0, 0.5, 1, 9, 0.1, {"compute": 1.0}]]) == TimeAccount(
        2.0, 0.5, 1, 9, 0.1, {"compute": 1.0}
    )


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        [1.0, None, None, None, 0.0],
        [1.0, None, None, None, 0.0, []],
        [1, None, None, None, 0.0, {}],
        [-1.0, None, None, None, 0.0, {}],
        [float("nan"), None, None, None, 0.0, {}],
        [float("inf"), None, None, None, 0.0, {}],
        [1.0, "a", None, None, 0.0, {}],
        [1.0, None, -1, None, 0.0, {}],
        [1.0, None, None, True, 0.0, {}],
        [1.0, None, None, None, 0.0, {"a": None}],
        [1.0, None, None, None, 0.0, {"": 1.0}],
        [1.0, None, None, None, 0.0, {"\n": 1.0}],
        [1.0, None, None, None, 0.0, {"a" * 41: 1.0}],
        [1.0, None, None, None, 0.0, {1: 1.0}],
        [1.0, None, None, None, 0.0, {str(number): 1.0 for number in range(100)}],
    ],
)
def test_what_is_no_account_is_refused(body: Any) -> None:
    with pytest.raises(ProtocolMismatch, match="not a 'spent' frame"):
        TimeAccount.from_body(["spent", body])
