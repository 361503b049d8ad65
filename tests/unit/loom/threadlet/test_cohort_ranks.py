"""Ranks of a cohort in one process: threadlets with real threads, a store of the test's own, and a fake weaver."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from loom.control.commands import Change, Command, CommandKind
from loom.control.handshake import CohortPlace
from loom.threadlet import Deferred, Threadlet, cohort_member
from loom.threadlet.cohort import Letter, Meeting, Put, Read, Word
from loom.threadlet.cohort_member import CohortMember, bound_below
from loom.threadlet.handlers import Settlement
from loom.threadlet.inbox import Application
from loom.threadlet.threadlet import close_those_of
from tests.unit.loom.threadlet.fake_weaver import BOUND, Connection, FakeWeaver, Loop, Make, eventually

Values = list[tuple[int, float]]


class JobStore:
    """The methods of a c10d store that the protocol uses, which a test may break."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self.broken = False

    def _use(self) -> threading.Lock:
        if self.broken:
            raise RuntimeError("Broken pipe")
        return self._lock

    def set(self, key: str, value: str) -> None:
        with self._use():
            self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        with self._use():
            return self._values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def check(self, keys: list[str]) -> bool:
        with self._use():
            return all(key in self._values for key in keys)

    def add(self, key: str, number: int) -> int:
        with self._use():
            self._values[key] = str(int(self._values.get(key, b"0")) + number).encode()
            return int(self._values[key])

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self._use():
            return self._values.setdefault(key, desired.encode())

    def delete_key(self, key: str) -> bool:
        with self._use():
            return self._values.pop(key, None) is not None

    @property
    def keys(self) -> set[str]:
        with self._lock:
            return set(self._values)

    @property
    def size(self) -> int:
        return len(self._values)


class Rank:
    """A rank: its threadlet, its loop, and the weaver's end of its line."""

    def __init__(self, threadlet: Threadlet, line: Connection, rank: int) -> None:
        self.threadlet = threadlet
        self.line = line
        self.values: Values = []
        self.skew = 0
        self.raises: Exception | None = None
        self.loop = Loop(self.body)

        @threadlet.handler("learning_rate")
        def set_learning_rate(value: float) -> None:
            if self.raises is not None and value > 0.1:
                raise self.raises
            self.values.append((threadlet._step, value))

    def body(self, number: int) -> None:
        with self.threadlet.step(number + self.skew):
            pass

    @property
    def holds(self) -> bool:
        return self.threadlet._gate.meeting is not None


class Job:
    """Two ranks."""

    def __init__(self, store: JobStore, ranks: list[Rank]) -> None:
        self.store = store
        self.ranks = ranks
        self.numbers = 0

    def give(self, kind: str, **params: Any) -> str:
        self.numbers += 1
        id = f"k{self.numbers}"
        for rank in self.ranks:
            rank.line.send("command", id, kind, params, False, self.cohort)
        return id

    @property
    def cohort(self) -> str:
        place = self.ranks[0].threadlet._cohort.place
        assert place is not None
        return place.id

    def await_named(self) -> None:
        """Wait until all ranks know the boundary of the command under way."""
        eventually(lambda: all(one.holds and one.threadlet._gate.meeting.verdicts for one in self.ranks), "naming")  # type: ignore[union-attr]

    def answers(self, id: str) -> list[list[Any]]:
        return [rank.line.ack(id) for rank in self.ranks]

    def step(self) -> None:
        """Let both make a step."""
        for rank in self.ranks:
            rank.loop.go()
        for rank in self.ranks:
            rank.loop.done.get(timeout=BOUND)

    def apply(self, kind: str, **params: Any) -> list[list[Any]]:
        """Give a command, let both ranks make steps until they have answered; return the answers."""
        id = self.give(kind, **params)
        self.await_named()
        self.step()
        return self.answers(id)


@pytest.fixture
def job(weaver: FakeWeaver, threadlet: Make, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setenv("LOOM_COHORT_BOUND", "0.5")
    monkeypatch.setattr(CohortMember, "look", lambda self, wait=False: None)
    store, ranks = JobStore(), []
    monkeypatch.setattr(cohort_member, "_clone_of_store", lambda group: (store, 60.0))
    for number in range(2):
        made = threadlet(f"train_{number}", group="train", config={"learning_rate": 0.05})
        line, _ = weaver.welcome(cohorts=True)
        made._cohort._join(SimpleNamespace(rank=lambda number=number: number, size=lambda: 2), 1)
        assert line.expect("cohort")[2:] == [number, 2]
        ranks.append(Rank(made, line, number))
    job = Job(store, ranks)
    yield job
    for rank in ranks:
        rank.threadlet.evict()  # which ends a pause
        rank.loop.end()


def outcomes(answers: list[list[Any]]) -> list[tuple[int | None, bool, Any]]:
    return [(step, rest["ok"], rest["reason"]) for step, rest in answers]


def test_both_apply_it_after_the_same_step_though_one_is_ahead(job: Job) -> None:
    job.step()
    job.ranks[0].loop.step()  # nothing holds it: it is one step ahead
    id = job.give("update_config", learning_rate=0.01)
    job.await_named()
    job.ranks[0].loop.go()
    assert job.ranks[1].loop.step() == 1  # it is behind, and does not wait
    job.ranks[1].loop.go()

    answers = job.answers(id)

    assert outcomes(answers) == [(2, True, None)] * 2
    assert [one.values for one in job.ranks] == [[(2, 0.01)]] * 2
    assert answers[0][1]["changes"] == {"learning_rate": {"old": 0.05, "new": 0.01}}


def test_a_handler_that_raises_in_one_rank_is_undone_in_the_others(job: Job) -> None:
    job.ranks[1].raises = ValueError("too high")

    answers = job.apply("update_config", learning_rate=0.2)

    reason = "rank 1: learning_rate: the handler raised ValueError: too high"
    assert outcomes(answers) == [(0, False, reason)] * 2
    assert [one.values for one in job.ranks] == [[(0, 0.2), (0, 0.05)], []]
    assert job.ranks[0].threadlet._config["learning_rate"] == 0.05


def test_one_refused_key_refuses_all_of_them(job: Job) -> None:
    job.step()
    id = job.give("update_config", learning_rate=0.01, momentum=0.9)

    answers = outcomes(job.answers(id))

    assert {ok for _, ok, _ in answers} == {False}
    assert "momentum: no handler for it" in str(answers[0][2])
    assert [one.values for one in job.ranks] == [[], []]


def test_before_the_first_step_a_handler_may_still_come(job: Job) -> None:
    id = job.give("update_config", momentum=0.9)
    job.await_named()
    job.step()

    reasons = {rest["reason"] for _, rest in job.answers(id)}

    assert len(reasons) == 1
    assert "momentum: no handler for it" in reasons.pop()


def test_nobody_waits_long_for_a_rank_whose_line_is_cut(job: Job) -> None:
    job.numbers += 1
    job.ranks[0].line.send("command", "k1", "update_config", {"learning_rate": 0.01}, False, job.cohort)

    assert outcomes([job.ranks[0].line.ack("k1")]) == [(None, False, "rank 1 did not answer within 0.5 s")]
    job.step()
    job.ranks[1].line.send("command", "k1", "update_config", {"learning_rate": 0.01}, False, job.cohort)
    assert outcomes([job.ranks[1].line.ack("k1")]) == [(0, False, "rank 1 did not answer within 0.5 s")]
    assert outcomes(job.apply("update_config", learning_rate=0.01)) == [(1, True, None)] * 2


def test_nobody_waits_long_for_a_rank_that_does_not_come(job: Job) -> None:
    id = job.give("pause")
    job.await_named()
    began = time.monotonic()
    job.ranks[0].loop.step()
    waited = time.monotonic() - began

    answers = outcomes(job.answers(id))

    assert {(ok, reason) for _, ok, reason in answers} == {
        (False, "rank 1 did not come to the step boundary within 0.5 s")
    }
    assert 0.4 < waited < 5
    job.ranks[1].loop.step()
    assert outcomes(job.apply("update_config", learning_rate=0.01)) == [(1, True, None)] * 2


def test_ranks_at_different_steps_refuse(job: Job) -> None:
    job.ranks[1].skew = 7

    answers = outcomes(job.apply("update_config", learning_rate=0.01))

    assert [ok for _, ok, _ in answers] == [False, False]
    assert "different steps at this boundary (rank 0 at 0, rank 1 at 7)" in str(answers[0][2])
    assert [one.values for one in job.ranks] == [[], []]


def test_a_pause_is_for_both_and_takes_updates(job: Job) -> None:
    id = job.give("pause")
    job.await_named()
    for rank in job.ranks:
        rank.loop.go()
    paused = outcomes(job.answers(id))
    changed = outcomes(job.answers(job.give("update_config", learning_rate=0.01)))
    refused = outcomes(job.answers(job.give("update_config", learning_rate="fast")))
    resumed = outcomes(job.answers(job.give("resume")))
    for rank in job.ranks:
        rank.loop.done.get(timeout=BOUND)

    assert paused == changed == resumed == [(0, True, None)] * 2
    assert {ok for _, ok, _ in refused} == {False}
    assert [one.values for one in job.ranks] == [[(0, 0.01)]] * 2
    assert outcomes(job.apply("update_config", learning_rate=0.02)) == [(1, True, None)] * 2


def test_a_store_that_is_gone_refuses_and_holds_nobody(job: Job) -> None:
    job.store.broken = True
    id = job.give("update_config", learning_rate=0.01)

    answers = outcomes(job.answers(id))
    job.step()

    assert {ok for _, ok, _ in answers} == {False}
    assert "the store of the job's process group failed" in str(answers[0][2])
    assert [one.values for one in job.ranks] == [[], []]


def test_a_store_that_hangs_holds_the_training_for_a_bounded_time(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = job.give("update_config", learning_rate=0.01)
    job.await_named()
    over = threading.Event()
    monkeypatch.setattr(JobStore, "add", lambda *arguments: over.wait(BOUND))

    began = time.monotonic()
    job.step()
    took = time.monotonic() - began
    monkeypatch.undo()
    over.set()

    assert took < 5
    assert {ok for _, ok, _ in outcomes(job.answers(id))} == {False}
    assert [one.values for one in job.ranks] == [[], []]


class LostLine:
    """A rank's line to the store, which it loses after it has counted itself in a round, for good or for once."""

    def __init__(self, store: JobStore, letter: str, for_good: bool) -> None:
        self._store = store
        self._letter = letter
        self._for_good = for_good
        self._lost = False

    def clone(self) -> JobStore:
        if self._for_good:
            raise RuntimeError("Connection refused")
        return self._store

    def __getattr__(self, name: str) -> Any:
        if self._lost:
            raise RuntimeError("Broken pipe")
        return getattr(self._store, name)

    def add(self, key: str, number: int) -> int:
        count = self._store.add(key, number)
        self._lost = key.endswith(f"/{self._letter}#")
        if self._lost and count == 2:
            raise RuntimeError("Broken pipe")
        return count


COME, CONFIRM = "c", "w"


@pytest.mark.parametrize(("kind", "letter"), [("pause", COME), ("update_config", CONFIRM)])
def test_a_rank_that_has_lost_the_store_hears_the_verdict_from_the_weaver(job: Job, kind: str, letter: str) -> None:
    lost, other = job.ranks
    lost.threadlet._cohort._store = cohort_member.JobStore(LostLine(job.store, letter, for_good=True))
    id = job.give(kind, **({"learning_rate": 0.01} if kind == "update_config" else {}))

    def await_count() -> None:
        eventually(lambda: f"loom/{id}/{letter}#" in job.store.keys, "counting")

    @other.threadlet.handler("learning_rate")
    def set_learning_rate(value: float) -> None:
        await_count()

    job.await_named()
    lost.loop.go()
    if letter == COME:
        await_count()
    other.loop.go()
    first = other.line.ack(id)
    lost.line.send("applied_by_others", id)

    assert outcomes([first, lost.line.ack(id)]) == [(0, True, None)] * 2


def test_a_rank_whose_line_to_the_store_is_cut_connects_again(job: Job) -> None:
    lost = job.ranks[0].threadlet._cohort
    lost._store = cohort_member.JobStore(LostLine(job.store, COME, for_good=False))
    id = job.give("update_config", learning_rate=0.01)
    job.await_named()
    job.ranks[0].loop.go()
    eventually(lambda: f"loom/{id}/c#" in job.store.keys, "counting")
    job.ranks[1].loop.go()

    assert outcomes(job.answers(id)) == [(0, True, None)] * 2


def test_a_rank_that_nobody_tells_goes_on_after_a_while(job: Job) -> None:
    lost = job.ranks[0].threadlet._cohort
    lost._store = cohort_member.JobStore(LostLine(job.store, COME, for_good=True))
    id = job.give("pause")
    job.await_named()
    began = time.monotonic()
    job.ranks[0].loop.go()
    eventually(lambda: f"loom/{id}/c#" in job.store.keys, "counting")

    answer = job.ranks[0].line.ack(id)
    job.ranks[0].loop.done.get(timeout=BOUND)

    assert not answer[1]["ok"]
    assert "verdict" not in answer[1]  # the other one may have applied it
    assert "the store of the job's process group failed" in answer[1]["reason"]
    assert 0.5 < time.monotonic() - began < 5


def test_a_command_from_before_the_cohort_is_refused(job: Job) -> None:
    for rank in job.ranks:
        rank.line.send("command", "early", "update_config", {"learning_rate": 0.01})
        eventually(lambda rank=rank: rank.threadlet._pending)
    job.step()

    answers = outcomes(job.answers("early"))

    assert {(ok, "give it again" in str(reason)) for _, ok, reason in answers} == {(False, True)}
    assert [one.values for one in job.ranks] == [[], []]


def test_ranks_in_different_epochs_refuse(job: Job) -> None:
    for epoch, rank in enumerate(job.ranks):
        rank.loop._body = lambda step, rank=rank, epoch=epoch: check_in_epoch(rank.threadlet, step, epoch)

    answers = outcomes(job.apply("update_config", learning_rate=0.01))

    assert [ok for _, ok, _ in answers] == [False, False]
    assert "different epochs at this boundary (rank 0 at 0, rank 1 at 1)" in str(answers[0][2])


def check_in_epoch(t: Threadlet, number: int, epoch: int) -> None:
    t.publish_status(number, epoch)
    t.check_and_apply_updates()


def test_a_training_that_ends_refuses_what_is_under_way(job: Job) -> None:
    id = job.give("update_config", learning_rate=0.01)
    job.await_named()
    job.ranks[1].threadlet.close()

    job.ranks[0].loop.go()

    assert job.ranks[0].line.ack(id)[1]["reason"] == "rank 1: its training has ended"
    job.ranks[0].loop.done.get(timeout=BOUND)


def test_a_command_of_an_earlier_process_group_is_refused(job: Job) -> None:
    before = job.cohort
    for number, rank in enumerate(job.ranks):
        rank.threadlet._cohort._join(SimpleNamespace(rank=lambda number=number: number, size=lambda: 2), 2)
        assert rank.line.expect("cohort")[1] != before

    job.ranks[0].line.send("command", "old", "pause", {}, False, before)

    assert "another one than when this was sent" in str(job.ranks[0].line.ack("old"))


@pytest.mark.parametrize("shared", [True, False], ids=["the store of all attempts", "a store of this one"])
def test_launchers_need_to_have_started_equally_often_only_in_one_store(
    job: Job, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(shared))
    ids = []
    for number, rank in enumerate(job.ranks):  # the second one's launcher has come later
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(1 - number))
        rank.threadlet._cohort._join(SimpleNamespace(rank=lambda number=number: number, size=lambda: 2), 2)
        ids.append(rank.line.expect("cohort")[1])

    assert len(set(ids)) == 1 + shared


def test_a_command_that_comes_again_is_answered_again(job: Job) -> None:
    answers = job.apply("update_config", learning_rate=0.01)
    job.ranks[0].line.send("command", "k1", "update_config", {"learning_rate": 0.01}, False, job.cohort)

    assert job.ranks[0].line.ack("k1") == answers[0]


def test_other_commands_pass_by_a_cohort(job: Job) -> None:
    job.ranks[0].line.send("command", "own", "device_failed", {"device": "GPU-a", "reason": "Xid"})
    eventually(lambda: job.ranks[0].threadlet._pending)
    job.step()

    assert "nobody acts on it" in str(job.ranks[0].line.ack("own"))


def test_the_words_of_many_ranks_are_read_with_two_questions() -> None:
    asked: list[str] = []

    class Store(JobStore):
        def check(self, keys: list[str]) -> bool:
            asked.append("check")
            return super().check(keys)

        def multi_get(self, keys: list[str]) -> list[bytes]:
            asked.append("multi_get")
            return super().multi_get(keys)

    store = cohort_member.JobStore(Store())
    keys = tuple(f"k/n{rank}" for rank in range(1000))
    for key in keys:
        store.do(Put(key, "{}"))

    assert store.do(Read(keys)) == ["{}"] * 1000
    assert asked == ["check", "multi_get"]
    assert store.do(Read((*keys, "k/n1000")))[-2:] == ["{}", None]


def test_the_store_does_not_grow(job: Job) -> None:
    sizes = []
    for _ in range(24):
        job.apply("pause" if job.ranks[0].threadlet.draining else "update_config", learning_rate=0.01)
        sizes.append(job.store.size)

    assert sizes[-1] == sizes[-6]


def test_an_evicted_rank_is_not_paused_nor_are_the_others(job: Job) -> None:
    job.ranks[1].threadlet.evict()
    id = job.give("pause")

    assert {ok for _, ok, _ in outcomes(job.answers(id))} == {False}


Body = Callable[[Threadlet, int, list[Any]], None]


def check(t: Threadlet, number: int, taken: list[Any]) -> None:
    t.publish_status(number)
    t.check_and_apply_updates()
    t.wait_while_paused()


def check_often(t: Threadlet, number: int, taken: list[Any]) -> None:
    t.check_and_apply_updates()
    t.publish_status(number)
    t.check_and_apply_updates()


def wait_only(t: Threadlet, number: int, taken: list[Any]) -> None:
    t.publish_status(number)
    t.wait_while_paused()


def take(t: Threadlet, number: int, taken: list[Any]) -> None:
    t.publish_status(number)
    while (command := t.get_config_update()) is not None:
        taken.append(command)
    t.wait_while_paused()


def check_then_block(t: Threadlet, number: int, taken: list[Any]) -> None:
    t.check_and_apply_updates()
    with t.step(number):
        t.check_and_apply_updates()
        t.check_and_apply_updates()


@pytest.mark.parametrize("body", [check, check_often, wait_only, take, check_then_block])
def test_each_way_of_a_loop_has_its_boundaries(job: Job, body: Body) -> None:
    taken: list[list[Any]] = [[], []]
    for number, rank in enumerate(job.ranks):
        rank.body = lambda step, rank=rank, number=number: body(rank.threadlet, step, taken[number])  # type: ignore[method-assign]
        rank.loop._body = rank.body
    for _ in range(3):
        job.step()
    steps = []
    for value in (0.01, 0.02, 0.03):
        first, second = outcomes(job.apply("update_config", learning_rate=value))
        assert first == second
        assert first[1:] == (True, None)
        steps.append(first[0])

    assert steps == list(range(steps[0], steps[0] + 3))
    assert job.ranks[0].values == job.ranks[1].values
    assert [value for _, value in job.ranks[0].values] == [0.01, 0.02, 0.03]
    assert len(taken[0]) == len(taken[1]) == (3 if body is take else 0)


def test_a_value_without_a_handler_is_the_programs_in_all_ranks(job: Job) -> None:
    taken: list[list[Any]] = [[], []]
    for number, rank in enumerate(job.ranks):
        rank.loop._body = lambda step, rank=rank, number=number: take(rank.threadlet, step, taken[number])
    job.step()
    id = job.give("update_config", clip=0.5)
    job.await_named()
    job.step()
    job.step()

    assert outcomes(job.answers(id)) == [(1, True, None)] * 2
    assert [one[0]["params"] for one in taken] == [{"clip": 0.5}] * 2


def test_an_older_weaver_hears_of_no_cohort(
    weaver: FakeWeaver, threadlet: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CohortMember, "look", lambda self, wait=False: None)
    made = threadlet()
    line, _ = weaver.welcome()
    made._cohort.place = CohortPlace("c", 0, 2)
    line.expect("beat")
    line.expect("beat")

    assert "cohort" not in [frame[0] for frame in line.skipped]


class Group:
    """A process group of two ranks."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 1


def distributed(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand in for torch.distributed, initialized, until the test ends."""
    group, store = Group(), JobStore()
    fake = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, group=SimpleNamespace(WORLD=group)
    )
    monkeypatch.setattr(cohort_member, "_clone_of_store", lambda group: (store, 60.0))
    monkeypatch.setattr(CohortMember, "_of_process", None)
    monkeypatch.setitem(sys.modules, "torch.distributed", fake)  # type: ignore[arg-type]
    return fake


@pytest.mark.parametrize("cohort", [True, False])
def test_hello_has_the_place_of_a_process_that_has_one_already(
    weaver: FakeWeaver, threadlet: Make, monkeypatch: pytest.MonkeyPatch, cohort: bool
) -> None:
    distributed(monkeypatch)
    threadlet(cohort=cohort)

    place = weaver.accept()[1]["cohort"]

    assert (place and place[1:]) == ([1, 2] if cohort else None)


def test_a_process_group_is_found_without_importing_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = distributed(monkeypatch)
    first, second = (CohortMember(lambda c: None, lambda c, r: None, lambda: None) for _ in range(2))
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    first.look()
    none = first.place
    monkeypatch.setitem(sys.modules, "torch.distributed", fake)  # type: ignore[arg-type]
    first.look(wait=True)
    second.look(wait=True)  # another threadlet of this process
    found, other = first.place, second.place
    fake.is_initialized = lambda: False
    first.look()

    assert none is other is first.place is None
    assert found is not None
    assert (found.rank, found.world) == (1, 2)
    first.close(1.0)
    second.close(1.0)


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        ({}, 0),
        ({"WORLD_SIZE": "4"}, 0),
        ({"TORCHELASTIC_RESTART_COUNT": "0", "WORLD_SIZE": "4"}, 0),
        ({"TORCHELASTIC_RESTART_COUNT": "2", "WORLD_SIZE": "4"}, 4),
        ({"TORCHELASTIC_RESTART_COUNT": "0", "LOOM_STARTED_AGAIN": "1", "WORLD_SIZE": "4"}, 4),
        ({"SLURM_RESTART_COUNT": "1"}, 1),
    ],
)
def test_hello_says_that_a_launcher_has_started_the_ranks_again(
    weaver: FakeWeaver, threadlet: Make, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], ranks: int
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    threadlet()

    assert weaver.accept()[1]["restarted"] == ranks


def test_the_bound_is_below_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOOM_COHORT_BOUND", raising=False)
    assert [bound_below(seconds) for seconds in (2.0, 8.0, 1800.0)] == [0.5, 2.0, 5.0]
    monkeypatch.setenv("LOOM_COHORT_BOUND", "12")
    assert bound_below(8.0) == 12.0
    monkeypatch.setenv("LOOM_COHORT_BOUND", "soon")
    assert bound_below(8.0) == 2.0


def test_values_that_another_rank_has_not_applied_are_taken_back_or_said_to_stay(threadlet: Make) -> None:
    made = threadlet(config={"known": 1})
    given: list[int] = []
    made.handler("known")(given.append)
    undecided = Deferred()
    changes = {"known": Change(1, 2), "new": Change(None, 3), "own": Change(None, 4)}
    update = Command("c", CommandKind.UPDATE_CONFIG, {key: change.new for key, change in changes.items()})
    applied = Application(update, changes=dict(changes), deferred={"late": (5, undecided)}, taken=["own"])
    made._config.update(known=2, new=3, own=4)

    made._take_back(applied, {"known": 1}, "rank 1: no")

    assert given == [1]
    assert made._config == {"known": 1}
    assert applied.reason == (
        "rank 1: no; and this rank keeps the new value, since new: the value before is unknown: "
        "name it in the threadlet's config"
    )
    assert undecided.verdict == Settlement(None, "rank 1: no")
    assert (applied.changes, applied.taken, applied.deferred) == ({}, [], {})


def enter(job: Job, name: str, behind: int = -1) -> None:
    """Let both ranks enter a cohort that a manager has named."""
    threads = [
        threading.Thread(target=one.threadlet._cohort.enter, args=(job.store, name, rank, 2, 60.0, rank == behind))
        for rank, one in enumerate(job.ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND)


def test_a_rank_behind_takes_over_the_values_of_a_new_cohort_and_gives_up_its_own(job: Job) -> None:
    first, second = (one.threadlet._cohort for one in job.ranks)
    given_up: list[str] = []
    first.note({"learning_rate": 0.3}, {"learning_rate": 0.05})
    enter(job, "one", behind=1)
    assert first.place is not None
    assert second.place is not None
    assert first.place.id == second.place.id
    assert (first.wanted, second.wanted) == ({}, {"learning_rate": 0.3})
    job.ranks[1].threadlet.take_over()
    job.ranks[1].threadlet.take_over()
    assert [value for _, value in job.ranks[1].values] == [0.3]

    second.note(
        {"momentum": 0.5, "gone": 1}, {"momentum": lambda: given_up.append("momentum"), "gone": lambda: 1 / 0}
    )
    for key in ("momentum", "gone"):
        job.ranks[1].threadlet.handler(key)(lambda value: None)
    for rate in (0.4, 0.2):
        first.note({"learning_rate": rate}, {})
    enter(job, "two", behind=1)
    job.ranks[1].threadlet.take_over()
    assert given_up == ["momentum"]
    assert [value for _, value in job.ranks[1].values] == [0.3, 0.2]


def test_a_former_store_that_is_gone_holds_up_no_new_cohort(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    second, former, settled = job.ranks[1].threadlet._cohort, job.store, threading.Event()
    cloned: list[object] = []
    enter(job, "one")

    def hang(key: str) -> NoReturn:
        settled.wait(BOUND)
        raise RuntimeError("Broken pipe")

    monkeypatch.setattr(former, "delete_key", hang)
    monkeypatch.setattr(former, "clone", lambda: cloned.append(former), raising=False)
    job.store = JobStore()
    job.ranks[0].threadlet._cohort.note({"learning_rate": 0.3}, {})
    entering = threading.Thread(target=enter, args=(job, "two", 1))
    entering.start()
    eventually(lambda: second.wanted == {"learning_rate": 0.3})
    settled.set()
    entering.join(BOUND)

    assert not cloned, "a connection to a store that is gone takes seconds"


def test_a_rank_behind_agrees_on_nothing_with_ranks_that_come_too_late(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (one.threadlet._cohort for one in job.ranks)
    first.note({"learning_rate": 0.3}, {"learning_rate": 0.05})
    monkeypatch.setenv("LOOM_COHORT_BOUND", "0.05")
    second.enter(job.store, "late", 1, 2, 60.0, True)
    assert (second.place, second.behind) == (None, True)
    first.enter(job.store, "late", 0, 2, 60.0, False)
    assert first.wanted == {}
    monkeypatch.undo()

    second.enter(None, "unreachable", 1, 2, 60.0, False)
    assert second.behind
    enter(job, "next")

    assert (first.wanted, second.wanted) == ({}, {"learning_rate": 0.3})
    assert not second.behind


def test_a_rank_without_others_or_without_a_store_is_in_no_cohort(job: Job) -> None:
    member = job.ranks[0].threadlet._cohort
    member.enter(None, "alone", 0, 1, 60.0, False)
    assert member.place is None
    job.store.broken = True
    member.enter(job.store, "broken", 0, 2, 60.0, False)
    assert member.place is None


@pytest.mark.parametrize("follows", [False, True])
def test_a_command_under_way_is_abandoned_with_its_reason(job: Job, follows: bool) -> None:
    for rank in job.ranks:
        rank.threadlet._cohort.follows = follows
    id = job.give("update_config", learning_rate=0.2)
    job.await_named()
    job.ranks[0].threadlet._cohort.abandon("its step was not committed")
    job.step()

    for _, answer in job.answers(id):
        assert "its step was not committed" in answer["reason"]
        assert answer["verdict"] == ("moved" if follows else "nobody")
    assert [one.values for one in job.ranks] == [[], []]


def test_the_weaver_is_told_that_none_has_applied_what_a_handler_refused(job: Job) -> None:
    for rank in job.ranks:
        rank.threadlet._cohort.follows = True
    job.ranks[1].raises = ValueError("too high")

    assert [rest["verdict"] for _, rest in job.apply("update_config", learning_rate=0.2)] == ["nobody"] * 2


def test_a_command_for_the_ranks_before_may_go_to_those_that_follow_them(job: Job) -> None:
    for rank in job.ranks:
        rank.threadlet._cohort.follows = True
    before = job.cohort
    enter(job, "next")
    job.ranks[0].line.send("command", "before", "pause", {}, False, before)
    job.ranks[1].line.send("command", "before", "pause", {})
    eventually(lambda: job.ranks[1].threadlet._pending)
    job.step()

    assert [rank.line.ack("before")[1]["verdict"] for rank in job.ranks] == ["moved"] * 2
    assert outcomes(job.apply("update_config", learning_rate=0.01)) == [(1, True, None)] * 2


def test_what_one_rank_gets_before_its_first_step_lets_it_count_no_step_more(job: Job) -> None:
    job.ranks[1].line.send("command", "alone", "deactivate_device", {"device": "GPU-0"})
    eventually(lambda: job.ranks[1].threadlet._pending)
    job.step()

    assert outcomes(job.apply("update_config", learning_rate=0.01)) == [(1, True, None)] * 2


def test_a_rank_without_the_store_knows_of_all_only_before_it_has_come() -> None:
    failed = Word("the store failed")
    away = Meeting(Command("k1", CommandKind.PAUSE, {}), lost=True, verdicts={Letter.COME: failed})
    come = replace(away, words={Letter.COME: Word(step=1)})

    assert away.nobody is failed
    assert replace(away, words={Letter.COME: Word("it has ended")}).nobody is failed
    assert come.nobody is None
    assert replace(come, lost=False).nobody is failed
    assert replace(come, verdicts={}).nobody is None


def test_words_of_a_newer_rank_are_read() -> None:
    assert Word.from_text('{"refused": "no", "of_tomorrow": 1}') == Word("no")


def test_a_value_is_awaited_for_a_while() -> None:
    store = JobStore()
    store.set("loom/there", "value")

    assert cohort_member.JobStore(store).await_value("loom/there", 0.1) == "value"
    with pytest.raises(Exception, match="missing"):
        cohort_member.JobStore(store).await_value("loom/missing", 0.05)


def test_the_threadlets_of_an_actor_end_with_it(threadlet: Make) -> None:
    made, other = threadlet("mine"), threadlet("others")
    made._made_by, other._made_by = "actor", "another actor"
    close_those_of("actor", None)

    assert made._ended.is_set()
    assert not other._ended.is_set()
