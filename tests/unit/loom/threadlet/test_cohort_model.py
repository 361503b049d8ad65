"""Every interleaving of the ranks of a cohort: all that decide, decide the same, and nothing waits for ever.

The threads of the ranks are generators here, of which hypothesis resumes one at a time. Time passes as it likes: a
wait may end before anything has come.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from loom.control.commands import Command, CommandKind
from loom.control.handshake import CohortPlace
from loom.threadlet.cohort import (
    Await,
    Count,
    Decide,
    Forget,
    Gate,
    Hear,
    Letter,
    Look,
    Meeting,
    Operation,
    Put,
    Read,
    Standing,
    StoreFailed,
    Word,
    confer,
    settle,
)

RANKS = 3
BLOCKED = object()

THREADS = ("side", "side", "training", "hurried side")


class ModelStore:
    """The job's store as one dict; it never loses anything, but a rank's line to it may break for good."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.counts: dict[str, int] = {}

    def do(self, operation: Operation, impatient: bool) -> Any:
        match operation:
            case Put(key, value):
                self.values[key] = value
            case Count(key):
                self.counts[key] = self.counts.get(key, 0) + 1
                return self.counts[key]
            case Decide(key, value):
                return self.values.setdefault(key, value)
            case Look(key, seconds):
                if key in self.values or impatient or not seconds:
                    return self.values.get(key)
                return BLOCKED
            case Read(keys):
                return [self.values.get(key) for key in keys]
            case Forget(keys):
                for key in keys:
                    self.values.pop(key, None)
                    self.counts.pop(key, None)


@dataclass
class Given:
    """A command of the model."""

    id: str
    confirms: bool
    refuses: frozenset[int]
    """The ranks that refuse when they are asked."""
    raises: frozenset[int]
    """The ranks whose handlers raise."""
    hurried: Letter
    """The round in which a rank may lose its patience."""
    waiting: set[int] = field(default_factory=lambda: set(range(RANKS)))
    """The ranks that have not acknowledged it."""
    ranks: frozenset[int] = frozenset()
    """The ranks that it was given to."""
    kept: dict[int, int] = field(default_factory=dict)
    """The boundary where each rank applied it for good."""
    unkept: set[int] = field(default_factory=set)
    """The ranks that did not apply it, or took it back."""
    nobody: bool = False
    """Whether a rank has said that none applies it."""
    moved: bool = False
    """Whether a rank has said that it may be given to others that form the job now."""
    before: tuple[Given, ...] = ()
    """The attempts before, of the same command."""

    @property
    def command(self) -> Command:
        return Command(self.id, CommandKind.UPDATE_CONFIG if self.confirms else CommandKind.PAUSE, {})


class Rank:
    """A rank with its two threads, as generators."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.gate = Gate()
        self.alive, self.store_works = True, True
        self.inbox: list[Given] = []
        self.now: Given | None = None
        self.meeting: Meeting | None = None
        self.side: Generator[Operation, Any, Word] | None = None
        self.operation: Operation | None = None
        self.between = False  # whether the training thread has counted a boundary, and not looked at the gate
        self.training: Generator[float, bool, Any] | None = None
        self.confirming = False
        self.applied: Meeting | None = None  # what it confirms
        self.step_skew = 0

    @property
    def confirm_waits(self) -> bool:
        return self.confirming or not (self.now and self.now.confirms)


class Cohort(RuleBasedStateMachine):
    """Three ranks, the weaver's commands to them, and everything that can go wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.store = ModelStore()
        self.ranks = [Rank(number) for number in range(RANKS)]
        self.members = list(range(RANKS))
        """The ranks that form the job now."""
        self.commands: list[Given] = []
        self.ids = itertools.count()

    # The weaver: one command at a time, until all ranks that live have acknowledged it.

    @property
    def idle(self) -> bool:
        return all(not one.waiting & self.living for one in self.commands)

    @property
    def living(self) -> set[int]:
        return {rank.number for rank in self.ranks if rank.alive}

    @initialize(skew=st.sampled_from([0, 0, 0, 1]))
    def begin(self, skew: int) -> None:
        self.ranks[1].step_skew = skew

    @precondition(lambda self: self.idle)
    @rule(
        confirms=st.booleans(),
        refuses=st.sampled_from([frozenset(), frozenset(), frozenset(), frozenset({0}), frozenset({2})]),
        raises=st.sampled_from([frozenset(), frozenset(), frozenset({1})]),
        lost=st.sampled_from([None, None, None, *range(RANKS)]),
        hurried=st.sampled_from(list(Letter)),
    )
    def give(
        self,
        confirms: bool,
        refuses: frozenset[int] = frozenset(),
        raises: frozenset[int] = frozenset(),
        lost: int | None = None,
        hurried: Letter = Letter.COME,
    ) -> None:
        self.send(Given(f"k{next(self.ids)}", confirms, refuses, raises, hurried), lost)

    def send(self, given: Given, lost: int | None = None) -> None:
        given.ranks, given.waiting = frozenset(self.members), set(self.members)
        self.commands.append(given)
        for rank in self.ranks:
            if rank.alive and rank.number in self.members and rank.number != lost:
                rank.inbox.append(given)

    @rule(number=st.integers(0, RANKS - 1))
    def abandon(self, number: int) -> None:
        """A rank finds that the job has other ranks, or that its step was not committed."""
        meeting = self.ranks[number].gate.meeting
        if meeting is not None:
            meeting.words.setdefault(Letter.COME, Word("the ranks have changed", moved=True))

    @precondition(lambda self: self.idle and bool(self.living))
    @rule(chosen=st.sets(st.integers(0, RANKS - 1)), lost=st.sampled_from([None, None, None, *range(RANKS)]))
    def move(self, chosen: set[int], lost: int | None) -> None:
        """Other ranks form the job, which count from one step. They get the last command again if it may move."""
        self.members = sorted(chosen & self.living) or sorted(self.living)
        passed = max(self.ranks[number].gate.passed for number in self.members)
        for number in self.members:
            self.ranks[number].gate.passed = passed
        last = self.commands[-1] if self.commands else None
        if last is not None and last.moved:
            again = Given(f"{last.id}'", last.confirms, last.refuses, last.raises, last.hurried)
            again.before = (*last.before, last)
            self.send(again, lost)

    @rule(number=st.integers(0, RANKS - 1))
    def give_again(self, number: int) -> None:
        """After a reconnect."""
        rank = self.ranks[number]
        for last in self.commands[-1:]:
            if rank.alive and number in last.waiting and last is not rank.now and last not in rank.inbox:
                rank.inbox.append(last)

    # A rank's side thread.

    @rule(seed=st.integers(0, 1 << 32), moves=st.integers(1, 60))
    def go(self, seed: int, moves: int) -> None:
        """Let the threads make moves in some order, several of a thread without another's at times."""
        choose = random.Random(seed)
        for _ in range(moves):
            number, thread = choose.randrange(RANKS), choose.choice(THREADS)
            for _ in range(choose.choice((1, 1, 2, 3, 4, 8))):
                if thread == "training":
                    self.train(number)
                else:
                    self.side(number, thread == "hurried side" and self.may_hurry(self.ranks[number]))
                self.all_decide_the_same()

    @staticmethod
    def may_hurry(rank: Rank) -> bool:
        looks, given = rank.operation, rank.now
        return given is not None and isinstance(looks, Look) and looks.key.endswith(given.hurried.value)

    def side(self, number: int, impatient: bool) -> None:
        rank = self.ranks[number]
        if not rank.alive:
            return
        if rank.side is None:
            if rank.inbox:
                self.begin_meeting(rank, rank.inbox.pop(0))
            return
        assert rank.operation is not None
        try:
            if isinstance(rank.operation, Await):
                result = None
            elif isinstance(rank.operation, Hear):
                assert rank.meeting is not None
                result = rank.meeting.words.get(rank.operation.letter)
            elif not rank.store_works:
                return self.resume_side(rank, lambda side: side.throw(StoreFailed("gone")))
            else:
                result = self.store.do(rank.operation, impatient)
        except StoreFailed:
            raise AssertionError from None
        if result is not BLOCKED:
            self.resume_side(rank, lambda side: side.send(result))

    def begin_meeting(self, rank: Rank, given: Given) -> None:
        rank.now = given
        rank.meeting = rank.gate.hold(given.command)
        refused = "no handler" if rank.number in given.refuses else None
        place = CohortPlace("c", self.members.index(rank.number), len(self.members))
        rank.side = confer(rank.gate, rank.meeting, place, refused, 5.0)
        self.resume_side(rank, next)

    def resume_side(self, rank: Rank, go: Any) -> None:
        try:
            rank.operation = go(rank.side)
        except StopIteration:
            rank.side, rank.operation = None, None
            meeting, rank.meeting = rank.meeting, None
            assert meeting is not None
            if not meeting.applies:  # else the training thread acknowledges it, or has done so
                self.acknowledge(rank, None, meeting.nobody)

    def acknowledge(self, rank: Rank, at: int | None, nobody: Word | None = None) -> None:
        given = rank.now
        assert given is not None
        if at is None:
            given.unkept.add(rank.number)
            given.nobody = given.nobody or nobody is not None
            given.moved = given.moved or (nobody is not None and bool(nobody.moved))
        else:
            given.kept[rank.number] = at
        given.waiting.discard(rank.number)
        rank.now = None

    # A rank's training thread.

    def train(self, number: int) -> None:
        rank = self.ranks[number]
        if not rank.alive:
            return
        if rank.training is not None:
            self.resume_training(rank, True)
        elif not rank.between:
            rank.gate.passed += 1
            rank.between = True
        else:
            rank.between = False
            if rank.gate.meeting is not None:
                rank.training = rank.gate.attend(rank.gate.passed + rank.step_skew, None, 5.0)
                self.resume_training(rank, None)

    @rule(number=st.integers(0, RANKS - 1))
    def lose_patience(self, number: int) -> None:
        """The training thread waits longer than a store that works ever takes; it may, before it has applied it."""
        rank = self.ranks[number]
        if not rank.alive or rank.training is None or (rank.store_works and rank.confirm_waits):
            return
        if rank.store_works or not self.may_be_told(rank):
            self.resume_training(rank, False)

    def may_be_told(self, rank: Rank) -> bool:
        """Whether a rank without a store waits for the weaver's word: others have applied it, or still decide."""
        given = rank.now
        if given is None or rank.meeting is None or not rank.meeting.open:
            return False
        return bool(given.kept) or any(one.now is given and one.alive and one.store_works for one in self.ranks)

    @rule(number=st.integers(0, RANKS - 1))
    def tell(self, number: int) -> None:
        """The weaver tells a rank that another one has applied the command."""
        rank = self.ranks[number]
        if rank.alive and rank.now is not None and rank.now.kept:
            rank.gate.hear(rank.now.id)

    def resume_training(self, rank: Rank, heard: bool | None) -> None:
        assert rank.training is not None
        try:
            rank.training.send(heard)  # type: ignore[arg-type]
        except StopIteration as ended:
            rank.training = None
            if rank.confirming:
                rank.confirming = False
                assert rank.applied is not None
                self.acknowledge(
                    rank, rank.gate.passed if ended.value.refused is None else None, rank.applied.nobody
                )
            elif ended.value is not None:
                self.apply(rank, ended.value)

    def apply(self, rank: Rank, meeting: Meeting) -> None:
        assert rank.now is not None
        if not meeting.confirms:
            return self.acknowledge(rank, rank.gate.passed)
        rank.confirming, rank.applied = True, meeting
        raised = "the handler raised" if rank.number in rank.now.raises else None
        rank.training = rank.gate.confirm(meeting, raised, 5.0)
        self.resume_training(rank, None)

    # Faults.

    @rule(number=st.integers(0, RANKS - 1), sure=st.integers(0, 9))
    def die(self, number: int, sure: int) -> None:
        if sure == 0:
            self.ranks[number].alive = False

    @rule(number=st.integers(0, RANKS - 1), sure=st.integers(0, 9))
    def lose_the_store(self, number: int, sure: int) -> None:
        if sure == 0:
            self.ranks[number].store_works = False

    # What has to hold.

    @invariant()
    def all_decide_the_same(self) -> None:
        for one in self.commands:
            kept = one.kept
            assert len(set(kept.values())) <= 1, f"{one.id} was applied at {kept}"
            assert not (kept and one.unkept & self.living), f"{one.id}: {kept} applied it, {one.unkept} did not"
            if (one.confirms and one.raises & one.ranks) or one.refuses & one.unkept:
                assert not kept
            assert not (one.nobody and kept), f"{one.id}: a rank has said that nobody applies it, and {kept} did"
            assert not (kept and any(other.kept for other in one.before)), f"{one.id} was applied twice"

    def teardown(self) -> None:
        """Whatever has happened, everything that waits ends, if time passes."""
        for _ in range(80):
            for rank in self.ranks:
                self.give_again(rank.number)
                self.tell(rank.number)
                self.side(rank.number, False)
                self.train(rank.number)
        for _ in range(60):
            for rank in self.ranks:
                self.tell(rank.number)
                self.side(rank.number, True)
                self.train(rank.number)
                if not rank.store_works:
                    self.lose_patience(rank.number)
        for rank in self.ranks:
            if rank.alive:
                assert rank.side is None, "a rank waits for the others for ever"
                assert rank.gate.meeting is None
                assert rank.training is None
        self.all_decide_the_same()


Cohort.TestCase.settings = settings(
    max_examples=200, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCohort = Cohort.TestCase


@settings(max_examples=100, deadline=None)
@given(
    moves=st.lists(st.tuples(st.integers(0, RANKS - 1), st.sampled_from("st")), max_size=200),
    ahead=st.lists(st.integers(0, 3), min_size=RANKS, max_size=RANKS),
    confirms=st.booleans(),
)
def test_without_a_fault_all_apply_it(moves: list[tuple[int, str]], ahead: list[int], confirms: bool) -> None:
    cohort = Cohort()
    for rank, count in zip(cohort.ranks, ahead, strict=True):
        rank.gate.passed = count
    cohort.give(confirms)
    for number, move in [*moves, *(itertools.product(range(RANKS), "st"))] * 60:
        if move == "s":
            cohort.side(number, False)
        else:
            cohort.train(number)

    (one,) = cohort.commands
    assert len(one.kept) == RANKS
    assert set(one.kept.values()) == {max(one.kept.values())}


def explore(seed: int) -> list[Given]:
    """Give one command, and let everything happen in some order, a fault in the middle of it at times.

    Return its attempts.
    """
    choose = random.Random(seed)
    cohort = Cohort()
    cohort.give(choose.random() < 0.5, hurried=choose.choice(list(Letter)))
    for _ in range(choose.randint(1, 6)):
        cohort.go(choose.getrandbits(32), choose.randint(5, 20))
        match choose.randrange(12):
            case 0:
                cohort.die(choose.randrange(RANKS), 0)
            case 1:
                cohort.lose_the_store(choose.randrange(RANKS), 0)
            case 2 | 3:
                cohort.lose_patience(choose.randrange(RANKS))
            case 4 | 5:
                cohort.tell(choose.randrange(RANKS))
            case 6 | 7:
                cohort.abandon(choose.randrange(RANKS))
        if cohort.idle and cohort.living and cohort.commands[-1].moved:
            cohort.move(set(choose.sample(range(RANKS), 2)), None)
    cohort.teardown()
    return cohort.commands


def test_many_orders() -> None:
    attempts = [one for seed in range(1000) for one in explore(seed)]

    assert sum(bool(one.before and one.kept) for one in attempts) > 10


@settings(max_examples=200, deadline=None)
@given(
    standings=st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=RANKS, max_size=RANKS),
    moves=st.lists(st.tuples(st.integers(0, RANKS - 1), st.booleans()), max_size=60),
    dead=st.sets(st.integers(0, RANKS - 1), max_size=1),
)
def test_the_ranks_of_a_new_cohort_agree_on_one_standing(
    standings: list[tuple[int, bool]], moves: list[tuple[int, bool]], dead: set[int]
) -> None:
    store = ModelStore()
    own = [Standing(version, {"of": rank}, behind, str(rank)) for rank, (version, behind) in enumerate(standings)]
    ranks = [settle("s", CohortPlace("c", rank, RANKS), one, 5.0) for rank, one in enumerate(own)]
    operations: dict[int, Any] = {rank: next(steps) for rank, steps in enumerate(ranks)}
    agreed: dict[int, Standing] = {}
    ended: set[int] = set()
    finish = [(rank, True) for _ in range(9) for rank in range(RANKS) if rank not in dead]
    for rank, impatient in [*moves, *finish]:
        if rank not in operations or (result := store.do(operations[rank], impatient)) is BLOCKED:
            continue
        try:
            operations[rank] = ranks[rank].send(result)
        except StopIteration as end:
            ended.add(rank)
            del operations[rank]
            if end.value is not None:
                agreed[rank] = end.value

    assert {*range(RANKS)} - dead <= ended
    assert {rank for rank in ended if not own[rank].behind} <= set(agreed)
    assert len({one.cohort for one in agreed.values()}) <= 1
    if any(one.behind for one in agreed.values()):
        assert all(one.behind for one in own), "a rank that is behind has decided for one that is not"
    if store.counts["s#"] == RANKS and not any(impatient for _, impatient in moves):
        newest = [one for one in own if not one.behind] or own
        assert next(iter(agreed.values())).version == max(one.version for one in newest)


@pytest.mark.slow
def test_very_many_orders() -> None:
    for seed in range(1000, 40_000):
        explore(seed)
