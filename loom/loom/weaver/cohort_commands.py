"""The commands of cohorts that are under way: those that wait for a rank, and those whose ranks have changed.

A command waits a moment for ranks whose connection was lost just now. If ranks say that all have refused it because
others form the job now (`CohortVerdict.MOVED`), it goes to those, under another id, as soon as all of them are
connected. It can be applied once only: the former ranks have decided that none of them applies it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from loom.control.commands import Acknowledged, Acknowledgement, CohortVerdict
from loom.errors import LoomError
from loom.weaver.cohorts import Cohorts, cohort_of
from loom.weaver.commands import GivenCommand, select
from loom.weaver.persistent_state import Registry
from loom.weaver.replicas import Replica
from loom.weaver.states import LIVING

MOVED_WITHIN = 15.0
"""Seconds from giving a command in which it may go to other ranks."""

MOST_ATTEMPTS = 4
"""Times that a command may go to other ranks."""

SETTLES_WITHIN = 1.0
"""Seconds after which ranks that say that they have changed, and have not, are given the command again."""

_LEFT = "it is no rank of its job now: it takes over the others' values when it joins them again"


@dataclass
class Move:
    """A command that all ranks of a cohort have refused because their job has other ranks now."""

    since: float
    answers: dict[str, Acknowledgement] = field(default_factory=dict)
    """The refusals so far, by replica."""


class CommandSender(Protocol):
    """What the dispatcher does for cohorts."""

    def send_frames(self, given: GivenCommand, replicas: Iterable[Replica], cohort: str | None = None) -> None:
        """Send a command to replicas that are connected."""

    def take(self, replica: Replica, acknowledged: Acknowledged, now: float) -> None:
        """Record a replica's acknowledgement."""

    def end(self, given: GivenCommand, replica: Replica, reason: str, now: float) -> None:
        """Record that a replica will not acknowledge a command."""


class CohortCommands:
    """The commands under way in cohorts."""

    def __init__(self, known: Registry, cohorts: Cohorts, sender: CommandSender) -> None:
        self._known = known
        self._cohorts = cohorts
        self._sender = sender
        self._held: dict[tuple[str, str], float] = {}  # by command and cohort, until when ranks may return
        self._moves: dict[tuple[str, str], Move] = {}
        self._advancing = False  # whether the commands of a cohort are being ended that cannot go to it any more

    @property
    def settled(self) -> bool:
        """True if nothing waits for a time."""
        return not self._held and not self._moves

    def begin(self, given: GivenCommand, cohort: str, now: float) -> None:
        """Send a command to a cohort that has no earlier one under way, if all ranks are there; else it waits."""
        ranks = given.ranks(cohort)
        if self._cohorts.next_of(cohort, ranks) is given:
            self.advance(cohort, ranks, now)

    def is_held(self, given: GivenCommand, cohort: str) -> bool:
        """Return whether a command has not been sent to its cohort yet, or waits for other ranks."""
        key = given.id, cohort
        return key in self._held or key in self._moves

    def advance(self, cohort: str, ranks: list[str], now: float) -> None:
        """Send the ranks of a cohort their next command, which none has got yet, or refuse it if ranks are gone."""
        if self._advancing:
            return
        self._advancing = True
        while (given := self._cohorts.next_of(cohort, ranks)) is not None:
            there = self._cohorts.ranks(cohort)
            reason = self._cohorts.missing(there, now)
            self._held.pop((given.id, cohort), None)
            if reason is None:
                self._sender.send_frames(given, self._waiting(given, cohort), cohort)
                break
            if (until := self._cohorts.may_return(there, now)) is not None:
                self._held[given.id, cohort] = until
                break
            for one in self._waiting(given, cohort):
                self._sender.end(given, one, reason, now)
        self._advancing = False

    def take(self, given: GivenCommand, replica: Replica, acknowledged: Acknowledged, now: float) -> bool:
        """Take a refusal of a rank; return whether it is kept back, because other ranks may apply the command."""
        cohort, verdict = given.cohorts.get(replica.id), acknowledged.verdict
        if cohort is None or acknowledged.acknowledgement.ok:
            return False
        key = given.id, cohort
        move = self._moves.get(key)
        if move is None and verdict is CohortVerdict.MOVED and self._may_move(given, now):
            move = self._moves[key] = Move(now)
        if move is not None:
            move.answers[replica.id] = acknowledged.acknowledgement
            self._look(given, cohort, move, now)
            return True
        if verdict is not None:
            given.decided[cohort] = acknowledged.acknowledgement.reason or "the ranks have refused it"
        return False

    def end_absent(self, given: GivenCommand, cohort: str, now: float) -> None:
        """End a command that no rank applies, by their decision, for those that are not connected."""
        if (reason := given.decided.get(cohort)) is not None:
            for one in self._waiting(given, cohort):
                if not one.connected:
                    self._sender.end(given, one, reason, now)

    def unlinked(self, replica: Replica, now: float) -> None:
        """Note that a replica is not connected any more."""
        for given in self._known.commands.unacknowledged(replica.id):
            if (cohort := given.cohorts.get(replica.id)) is not None:
                self.end_absent(given, cohort, now)

    def joined(self, replica: Replica, now: float) -> None:
        """Note that a replica has connected, or has another place in its job."""
        for given in self._known.commands.unacknowledged(replica.id):
            if (cohort := given.cohorts.get(replica.id)) is not None and (given.id, cohort) in self._held:
                self.advance(cohort, given.ranks(cohort), now)
        self._look_at_moves(now)

    def tick(self, now: float) -> None:
        """Refuse what has waited for too long."""
        for (id, cohort), deadline in list(self._held.items()):
            given = self._known.commands.get(id)
            if given is None or not self._waiting(given, cohort):
                self._held.pop((id, cohort), None)
            elif now >= deadline:
                self.advance(cohort, given.ranks(cohort), now)
        self._look_at_moves(now)

    def _look_at_moves(self, now: float) -> None:
        for (id, cohort), move in list(self._moves.items()):
            given = self._known.commands.get(id)
            if given is None or not self._waiting(given, cohort):
                del self._moves[id, cohort]
            else:
                self._look(given, cohort, move, now)

    def _waiting(self, given: GivenCommand, cohort: str) -> list[Replica]:
        return [self._known.replicas[id] for id in given.ranks(cohort) if id in given.waiting]

    @staticmethod
    def _may_move(given: GivenCommand, now: float) -> bool:
        restores = given.by == "weaver"  # which are restored again
        return not restores and given.attempts < MOST_ATTEMPTS and now < given.time + MOVED_WITHIN

    def _look(self, given: GivenCommand, cohort: str, move: Move, now: float) -> None:
        """Give a command to the ranks that form the job now, if all are there, or refuse it in the end."""
        there = [one for one in self._waiting(given, cohort) if one.connected and one.state in LIVING]
        places = {cohort_of(one) for one in there}
        if there and len(places) == 1 and all(one.id in move.answers for one in there):
            (place,) = places
            changed = place != cohort or now >= move.since + SETTLES_WITHIN
            if changed and (ranks := self._now(given, place, there)) is not None:
                del self._moves[given.id, cohort]
                return self._go(given, cohort, place, ranks, now)
        if not there or now >= given.time + MOVED_WITHIN:
            del self._moves[given.id, cohort]
            reason = next((made.reason for made in move.answers.values() if made.reason), "its ranks have changed")
            for one in self._waiting(given, cohort):
                if (made := move.answers.get(one.id)) is not None:
                    self._sender.take(one, Acknowledged(given.sent_id, made), now)
                else:
                    self._sender.end(given, one, reason, now)

    def _now(self, given: GivenCommand, place: str | None, there: list[Replica]) -> list[Replica] | None:
        """Return the ranks that a command goes to now; None if they are not all there, or are not all meant."""
        if place is None:
            return there if len(there) == 1 else None
        ranks = self._cohorts.ranks(place)
        if self._cohorts.missing(ranks) is not None:
            return None
        try:
            meant = {one.id for one in select(given.target, self._known.replicas)[0]} | set(given.replicas)
        except LoomError:
            return None
        return list(ranks.values()) if meant.issuperset(one.id for one in ranks.values()) else None

    def _go(self, given: GivenCommand, cohort: str, place: str | None, ranks: list[Replica], now: float) -> None:
        ids = [one.id for one in ranks]
        left = [one for one in self._waiting(given, cohort) if one.id not in ids]
        before = given.ranks(cohort)
        given.attempts += 1
        self._known.commands.give_to(given, ids, cohort, place)
        for one in left:
            self._sender.end(given, one, _LEFT, now)
        if place is None:
            self._sender.send_frames(given, ranks)
        else:
            self.begin(given, place, now)
        self.advance(cohort, before, now)  # the next one, whose ranks will say the same of it
