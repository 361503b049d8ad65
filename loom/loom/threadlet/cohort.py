"""The protocol by which all ranks of a job apply a command at one step, or none: no threads, no sockets, no clock.

Ranks that average gradients form a cohort. They share a store, that of their process group, and each counts the
step boundaries that it has passed. For each command they make three rounds at most, and the store decides each::

    1. name    Each rank's side thread answers at once with its count, and holds the training at the next
               boundary. The boundary after the highest count is the one where the command applies.
    2. come    Each training thread goes on to that boundary, and says that it is there, and at which step.
    3. confirm Each rank says whether its handlers took the new values, if handlers may refuse.

In a round each rank writes its word and counts itself. The last one to count judges all words and writes the
verdict; a rank that has waited for too long writes a refusal. Both write by compare-and-set, so the first verdict
stands, and all ranks read the same one.

A rank that loses the store after it has come cannot read the verdict. It stays at the boundary for a moment: the
weaver tells it if another rank has applied the command (`Gate.hear`), which is the verdict.

If a job goes on with other ranks, as torchft's quorums do, each new cohort begins with a round of its own: the
ranks agree on its id, and on the values that former commands have set (`settle`).

`confer` is a rank's side thread and `Gate.attend` its training thread. Both are generators that yield what they
wait for, so a test can interleave them in any order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, TypeVar

from loom.control.commands import Command, CommandKind
from loom.control.handshake import CohortPlace

POLL = 0.25
"""Seconds between two looks for a verdict, in a rank whose training thread has no word to say yet."""


class StoreFailed(Exception):
    """The job's store does not answer."""


@dataclass(frozen=True)
class Word:
    """The word of a rank in a round, or the verdict of all."""

    refused: str | None = None
    """Why the command is not to be applied; None agrees."""
    count: int | None = None
    """In round 1 the boundaries that the rank has passed; in its verdict the boundary where the command applies."""
    step: int | None = None
    """The step after which the rank has come to the boundary; None if it has published none."""
    epoch: int | None = None
    """The epoch of that step, if the rank has published it."""
    moved: bool | None = None
    """True if it is refused because ranks are gone, or will be others at the next step; else None."""

    def to_text(self) -> str:
        return json.dumps({name: value for name, value in asdict(self).items() if value is not None})

    @classmethod
    def from_text(cls, text: str) -> Word:
        known = cls.__dataclass_fields__  # a rank with a newer version may say more
        return cls(**{name: value for name, value in json.loads(text).items() if name in known})


AGREED = Word()


@dataclass(frozen=True)
class Standing:
    """What the commands of former cohorts have set in a rank, or, as a verdict, in all ranks of a new one."""

    version: int
    """The number of commands that have set something: ranks of one history with equal numbers have equal values."""
    values: Mapping[str, Any]
    """In the order in which they were set last: one may take another's place."""
    behind: bool = False
    """True if the rank gets its state from another one, so that its own values do not count."""
    cohort: str | None = None
    """Id of the cohort; of a rank's word, one that it proposes."""

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Standing:
        return cls(**json.loads(text))


class Letter(str, Enum):
    """A round, as the keys of the store name it."""

    NAME = "n"
    COME = "c"
    CONFIRM = "w"


# The operations on the store that `confer` yields. Each takes effect at once or raises `StoreFailed`.


@dataclass(frozen=True, slots=True)
class Put:
    """Set a key. The result is None."""

    key: str
    value: str


@dataclass(frozen=True, slots=True)
class Count:
    """Add 1 to a counter; the result is the sum."""

    key: str


@dataclass(frozen=True, slots=True)
class Decide:
    """Set a key that is not there; the result is the value that the key has then."""

    key: str
    value: str


@dataclass(frozen=True, slots=True)
class Look:
    """Wait for a key, for so many seconds at most; the result is its value, or None."""

    key: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Read:
    """Read several keys; the result is a list of their values, None for one that is not there."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Forget:
    """Delete keys, also those that are not there. The result is None."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Hear:
    """Wait for this rank's training thread to say its word in a round, for so many seconds at most.

    The result is the word, or None.
    """

    letter: Letter
    seconds: float


@dataclass(frozen=True, slots=True)
class Await:
    """Wait for anything to happen in this rank, for so many seconds at most. The result is None."""

    seconds: float


StoreOperation = Put | Count | Decide | Look | Read | Forget
Operation = StoreOperation | Hear | Await

T = TypeVar("T")
Steps = Generator[Operation, Any, T]


class Way(Enum):
    """The ways in which a loop comes to a step boundary. One of them counts in each program, so a step has one."""

    STEP = "the end of `with t.step(…)`"
    CHECK = "check_and_apply_updates"
    WAIT = "wait_while_paused"
    TAKE = "get_config_update"


@dataclass
class Meeting:
    """A command under way in one rank: what its two threads tell each other."""

    command: Command
    own: int = -1
    """The boundaries that the rank had passed when it answered."""
    words: dict[Letter, Word] = field(default_factory=dict)
    """What the training thread has said."""
    verdicts: dict[Letter, Word] = field(default_factory=dict)
    """What the store has decided."""
    left: bool = False
    """True if the training thread went on from the boundary, because no verdict came."""
    lost: bool = False
    """True if the store failed, so that the last verdicts are this rank's own."""
    unconfirmed: bool = False
    """True if it took its change back, because it did not hear whether all ranks have applied theirs."""

    @property
    def confirms(self) -> bool:
        """True if the ranks confirm that they have applied it: their handlers may refuse, and old values return."""
        return self.command.kind is CommandKind.UPDATE_CONFIG

    @property
    def applies(self) -> bool:
        """True if all ranks came to the boundary: the training thread applies the command, and acknowledges it."""
        come = self.verdicts.get(Letter.COME)
        return come is not None and come.refused is None and not self.left

    @property
    def nobody(self) -> Word | None:
        """The refusal by which no rank applies the command; None if there is none, or it is not known of all."""
        refusals = [word for word in self.verdicts.values() if word.refused is not None]
        own = self.words.get(Letter.COME)
        # Without this rank's word no verdict lets the others apply it.
        away = self.lost and (own is None or own.refused is not None)
        return refusals[0] if refusals and (away or not self.lost) else None

    @property
    def open(self) -> bool:
        """True if this rank has come, and has refused nothing: all may apply the command, or have done so."""
        last = Letter.CONFIRM if self.confirms else Letter.COME
        if last in self.verdicts or self.left or self.unconfirmed or Letter.COME not in self.words:
            return False
        return all(word.refused is None for word in (*self.words.values(), *self.verdicts.values()))


class Gate:
    """Where a rank's training thread passes its step boundaries, and stops if a command is under way.

    Both threads use it. The one that calls a method, or resumes a generator, holds the same lock; only ``passed``
    and ``meeting`` are written and read without it.
    """

    def __init__(self) -> None:
        self.passed = 0
        """The step boundaries that the training thread has passed, or is about to pass. Only that thread writes it,
        and reads ``meeting`` afterwards."""
        self.meeting: Meeting | None = None
        """The command under way. Only the side thread writes it, and reads ``passed`` afterwards: at least one of
        the threads sees the other's write."""
        self.waits = False
        """True while the training thread waits at a boundary, in a pause: it has not passed that one."""
        self.way: Way | None = None
        """The call that is the step boundary; None while the training waits, and before its first step."""
        self._way_before: Way | None = None
        self._other: tuple[Way, int] | None = None  # another call, and the boundaries passed then
        self.number: Callable[[], int] | None = None
        """Returns the number of the boundary that the training comes to, where the ranks count from other numbers.

        None: each rank counts its own."""

    def come(self) -> None:
        """Count a boundary, to which the training thread comes."""
        self.passed = self.passed + 1 if self.number is None else self.number()

    def counts(self, way: Way) -> bool:
        """Return whether a call that was no boundary before is one: the first is, and later one without others.

        All ranks run the same program, so all count the same calls.
        """
        if self.waits or self.way is Way.STEP:
            return False
        if self.way is None or self._other == (way, self.passed):
            self.way, self._other = way, None
            return True
        self._other = way, self.passed
        return False

    def is_way(self, way: Way) -> bool:
        """Return whether the program comes to its boundaries in this way, in a pause too."""
        return (self._way_before if self.waits else self.way) is way

    def wait(self, waits: bool) -> None:
        """Note that the training begins or ends a pause: calls in it are no further boundaries."""
        if waits != self.waits:
            self.waits = waits
            self.way, self._way_before = self._way_before, self.way

    def hold(self, command: Command) -> Meeting:
        """Begin a command: the training thread stops at its next boundary."""
        self.meeting = meeting = Meeting(command)
        meeting.own = self.passed - self.waits
        return meeting

    def hear(self, command: str) -> None:
        """Take the weaver's word that another rank has applied a command for good: that was the verdict."""
        meeting = self.meeting
        if meeting is not None and meeting.command.id == command and meeting.open:
            for letter in Letter:
                meeting.verdicts.setdefault(letter, AGREED)

    def attend(self, step: int | None, epoch: int | None, seconds: float) -> Generator[float, bool, Meeting | None]:
        """Come to the boundary ``passed`` after a step; return the command that applies here, or None.

        Yield the seconds to wait for the side thread, and be sent whether it did something meanwhile.
        """
        meeting, count = self.meeting, self.passed
        if meeting is None or count <= meeting.own or Letter.COME in meeting.words:
            return None
        named = yield from _await_verdict(meeting, Letter.NAME, seconds)
        if named is None:
            named = Word(count=-1)  # it may be this boundary, which is passed now
        if named.refused is not None or named.count is None or count < named.count:
            return None
        if count > named.count:
            meeting.words[Letter.COME] = Word("its training had passed the boundary before it heard of it")
            return None
        meeting.words[Letter.COME] = Word(step=step, epoch=epoch)
        verdict = yield from _await_verdict(meeting, Letter.COME, seconds)
        if verdict is None:
            meeting.left = True
            meeting.words[Letter.CONFIRM] = Word("its training waited for the others in vain")
        return meeting if meeting.applies else None

    def confirm(self, meeting: Meeting, refused: str | None, seconds: float) -> Generator[float, bool, Word]:
        """Say whether this rank has applied the command; return the verdict of all ranks."""
        meeting.words[Letter.CONFIRM] = Word(refused)
        verdict = yield from _await_verdict(meeting, Letter.CONFIRM, seconds)
        meeting.unconfirmed = verdict is None
        return verdict or Word("it is not known whether all ranks applied it: the job's store does not answer")


def _await_verdict(meeting: Meeting, letter: Letter, seconds: float) -> Generator[float, bool, Word | None]:
    while letter not in meeting.verdicts:
        if not (yield seconds):
            break
    return meeting.verdicts.get(letter)


def confer(gate: Gate, meeting: Meeting, place: CohortPlace, refused: str | None, bound: float) -> Steps[Word]:
    """Bring a command that this rank holds for to its end; return the last verdict.

    Args:
        refused: why this rank cannot apply the command, if that is known already.
        bound: seconds that a rank which has said its word waits for the others, in each round.
    """

    def round_of(letter: Letter, word: Word, judge: Callable[[Sequence[Word]], Word]) -> Steps[Word]:
        return _round(f"{meeting.command.id}/{letter.value}", place, word, judge, bound, _MISSING[letter])

    def ended(letter: Letter, verdict: Word) -> bool:
        meeting.verdicts[letter] = verdict
        return verdict.refused is not None

    try:
        verdict = yield from round_of(Letter.NAME, Word(refused, meeting.own), _named)
        if ended(Letter.NAME, verdict):
            return verdict
        for letter in (Letter.COME, Letter.CONFIRM) if meeting.confirms else (Letter.COME,):
            key = f"{meeting.command.id}/{letter.value}"
            while (said := (yield Hear(letter, POLL))) is None:
                if (text := (yield Look(key, 0.0))) is not None:
                    verdict = Word.from_text(text)
                    break
            else:
                verdict = yield from round_of(letter, said, _judged)
            if ended(letter, verdict):
                break
        return verdict
    except StoreFailed as error:
        while meeting.open:
            yield Await(POLL)
        meeting.lost = True
        verdict = Word(f"the store of the job's process group failed: {error}", moved=True)
        for letter in Letter:
            meeting.verdicts.setdefault(letter, verdict)
        return verdict
    finally:
        gate.meeting = None


def _round(
    key: str, place: CohortPlace, word: Word, judge: Callable[[Sequence[Word]], Word], bound: float, missing: str
) -> Steps[Word]:
    """Say this rank's word and return the verdict of all."""
    keys = tuple(f"{key}{rank}" for rank in range(place.world))
    yield Put(keys[place.rank], word.to_text())
    if (yield Count(f"{key}#")) == place.world:
        words = yield Read(keys)
        return Word.from_text((yield Decide(key, judge([Word.from_text(one) for one in words]).to_text())))
    if word.refused is not None:
        refusal = Word(_said(place.rank, word.refused), moved=word.moved)
        return Word.from_text((yield Decide(key, refusal.to_text())))
    if (text := (yield Look(key, bound))) is None:
        words = yield Read(keys)
        absent = ", ".join(rank_name(rank) for rank, one in enumerate(words) if one is None)
        refusal = Word(f"{absent or 'a rank'} {missing} within {bound:g} s", moved=True)
        text = yield Decide(key, refusal.to_text())
    return Word.from_text(text)


_MISSING = {
    Letter.NAME: "did not answer",
    Letter.COME: "did not come to the step boundary",
    Letter.CONFIRM: "did not say whether it has applied it",
}


def rank_name(rank: int) -> str:
    """Return a rank as the texts of verdicts name it."""
    return f"rank {rank}"


def _said(rank: int, refused: str) -> str:
    return f"{rank_name(rank)}: {refused}"


def _refusals(words: Sequence[Word]) -> Word | None:
    """Return the verdict if a rank refuses, with each reason once."""
    reasons: dict[str, list[int]] = {}
    for rank, word in enumerate(words):
        if word.refused is not None:
            reasons.setdefault(word.refused, []).append(rank)
    if not reasons:
        return None
    everyone = [len(words)] == [len(ranks) for ranks in reasons.values()]
    text = "; ".join(reason if everyone else _said(ranks[0], reason) for reason, ranks in reasons.items())
    return Word(text, moved=all(word.moved for word in words if word.refused is not None) or None)


def _named(words: Sequence[Word]) -> Word:
    """Name the boundary after the last one that any rank has passed."""
    return _refusals(words) or Word(count=max(word.count or 0 for word in words) + 1)


def _judged(words: Sequence[Word]) -> Word:
    """Agree if no rank refuses and all are at the same step of the same epoch."""
    if (refusal := _refusals(words)) is not None:
        return refusal
    for what, numbers in (
        ("step", [word.step for word in words]),
        ("epoch", [word.epoch for word in words]),
    ):
        found = {number: rank for rank, number in reversed(list(enumerate(numbers))) if number is not None}
        if len(found) > 1:
            where = ", ".join(f"{rank_name(rank)} at {number}" for number, rank in sorted(found.items()))
            return Word(
                f"the ranks are at different {what}s at this boundary ({where}): let all of them publish each "
                "step, and make their threadlets at the same place of the program"
            )
    return Word(step=next((word.step for word in words if word.step is not None), None))


def settle(key: str, place: CohortPlace, own: Standing, bound: float) -> Steps[Standing | None]:
    """Agree with the ranks of a new cohort on what former commands have set; return that, with the cohort's id.

    A rank that does not come within ``bound`` seconds takes what the others have agreed on. Ranks that are behind
    agree on nothing by themselves: they wait for twice as long, and get None.
    """
    keys = standing_keys(key, place)
    yield Put(f"{key}{place.rank}", own.to_text())
    text = None
    if (yield Count(f"{key}#")) < place.world:
        text = yield Look(key, 2 * bound if own.behind else bound)
    if text is None:
        there = [Standing.from_text(one) for one in (yield Read(keys)) if one is not None]
        if len(there) < place.world and all(one.behind for one in there):
            return None
        text = yield Decide(key, max(there, key=lambda one: (not one.behind, one.version)).to_text())
    return Standing.from_text(text)


def standing_keys(key: str, place: CohortPlace) -> tuple[str, ...]:
    """Return the keys of the ranks' words in the round of `settle`."""
    return tuple(f"{key}{rank}" for rank in range(place.world))


def keys_of(command: str, place: CohortPlace) -> tuple[str, ...]:
    """Return the keys of a command that this rank deletes when no rank needs them any more."""
    bases = [f"{command}/{letter.value}" for letter in Letter]
    own = [f"{base}{place.rank}" for base in bases]
    return tuple(own if place.rank else [*own, *bases, *(f"{base}#" for base in bases)])
