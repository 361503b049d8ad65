"""The commands of cohorts that are under way: those that wait for ranks, and those whose ranks have changed.

A command waits a moment for ranks that are missing (`Cohorts.waits`). If ranks say that all have refused it because
others form the job now (`CohortVerdict.MOVED`), it goes to those, under another id, as soon as all of them are
connected. It can be applied once only: the former ranks have decided that none of them applies it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from loom.control.commands import Acknowledged, Acknowledgement, CohortVerdict
from loom.errors import LoomError
from loom.weaver.cohorts import MOVED_WITHIN, Cohorts, cohort_of
from loom.weaver.commands import GivenCommand, select
from loom.weaver.persistent_state import Registry
from loom.weaver.replicas import Replica
from loom.weaver.states import LIVING

MOST_ATTEMPTS = 4
"""Times that a command may go to other ranks."""

SETTLES_WITHIN = 1.0
"""Seconds after which ranks that say that they have changed, and have not, are given the command again."""

_BEFORE = "the other ranks had decided on it before this one was theirs"
_LEFT = "it is no rank of its job now: it takes over the others' values when it joins them again"


@dataclass
class OnHold:
    """The wait of a command for the ranks of a job."""

    since: float
    answers: dict[str, Acknowledgement] | None = None
    """The refusals so far, by replica, of ranks that have changed; None if the command has not been sent."""

    def is_from(self, replica: str) -> bool:
        """Return whether a replica has said that it does not apply the command, or has not got it."""
        return self.answers is None or replica in self.answers


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
        self._holds: dict[tuple[str, str], OnHold] = {}  # by command and cohort
        self._advancing: set[str] = set()  # the cohorts whose commands are being ended that cannot go to them

    @property
    def settled(self) -> bool:
        """True if nothing waits for a time."""
        return not self._holds

    def begin(self, given: GivenCommand, cohort: str, now: float) -> None:
        """Send a command to a cohort that has no earlier one under way, if all ranks are there; else it waits."""
        ranks = given.ranks(cohort)
        if self._cohorts.next_of(cohort, ranks) is given:
            self.advance(cohort, ranks, now)

    def is_held(self, given: GivenCommand, cohort: str) -> bool:
        """Return whether a command has not been sent to its cohort yet, or waits for other ranks."""
        return (given.id, cohort) in self._holds

    def advance(self, cohort: str, ranks: list[str], now: float) -> None:
        """Send the ranks of a cohort their next command, which none has got yet; it waits if ranks are missing."""
        if cohort in self._advancing:
            return
        self._advancing.add(cohort)
        while (given := self._cohorts.next_of(cohort, ranks)) is not None and not self.is_held(given, cohort):
            there = self._cohorts.ranks(cohort)
            if there and self._cohorts.missing(there) is None:
                self._sender.send_frames(given, self._waiting(given, cohort), cohort)
                break
            hold = self._holds[given.id, cohort] = OnHold(now)
            self._look(given, cohort, hold, now)
        self._advancing.remove(cohort)

    def take(self, given: GivenCommand, replica: Replica, acknowledged: Acknowledged, now: float) -> bool:
        """Take a refusal of a rank; return whether it is kept back, because other ranks may apply the command."""
        cohort, verdict = given.cohorts.get(replica.id), acknowledged.verdict
        if cohort is None or acknowledged.acknowledgement.ok:
            return False
        key = given.id, cohort
        hold = self._holds.get(key)
        if hold is None and verdict is CohortVerdict.MOVED and self._may_move(given, replica, now):
            hold = self._holds[key] = OnHold(now, {})
        if hold is not None and hold.answers is not None:
            hold.answers[replica.id] = acknowledged.acknowledgement
            self._look(given, cohort, hold, now)
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

    def tick(self, now: float) -> None:
        """Let commands that wait go on, or refuse them in the end."""
        for (id, cohort), hold in list(self._holds.items()):
            given = self._known.commands.get(id)
            if given is None or not self._waiting(given, cohort):
                self._holds.pop((id, cohort), None)
            elif self._holds.get((id, cohort)) is hold:
                self._look(given, cohort, hold, now)

    def _waiting(self, given: GivenCommand, cohort: str) -> list[Replica]:
        return [self._known.replicas[id] for id in given.ranks(cohort) if id in given.waiting]

    @staticmethod
    def _may_move(given: GivenCommand, replica: Replica, now: float) -> bool:
        restores = given.by == "weaver"  # which are restored again
        attempts = given.attempts.get(replica.id, 0)
        return not restores and attempts < MOST_ATTEMPTS and now < given.time + MOVED_WITHIN

    def _look(self, given: GivenCommand, cohort: str, hold: OnHold, now: float) -> None:
        """Give a command to the ranks that form the job now, if all are there, or refuse it in the end."""
        there = [one for one in self._waiting(given, cohort) if one.connected and one.state in LIVING]
        for place in self._places(cohort, hold, there, now):
            if (ranks := self._now(given, place, there)) is not None:
                return self._go(given, cohort, hold, place, ranks, now)
        if there and self._may_wait(given, cohort, hold, there, now):
            return
        del self._holds[given.id, cohort]
        reason = self._why_not(cohort, hold, now)
        for one in self._waiting(given, cohort):
            if hold.answers is not None and (made := hold.answers.get(one.id)) is not None:
                self._sender.take(one, Acknowledged(given.sent_id(one.id), made), now)
            else:
                self._sender.end(given, one, reason, now)

    def _may_wait(self, given: GivenCommand, cohort: str, hold: OnHold, there: list[Replica], now: float) -> bool:
        if hold.answers is not None:
            return now < given.time + MOVED_WITHIN
        places = dict.fromkeys([cohort, *filter(None, map(cohort_of, there))])
        return self._cohorts.waits(places, hold.since, now)

    def _why_not(self, cohort: str, hold: OnHold, now: float) -> str:
        if hold.answers is not None:
            return next((made.reason for made in hold.answers.values() if made.reason), "its ranks have changed")
        return self._cohorts.missing(self._cohorts.ranks(cohort), now) or _BEFORE

    @staticmethod
    def _places(cohort: str, hold: OnHold, there: list[Replica], now: float) -> list[str | None]:
        """Return the cohorts that a command may go to from ranks of a former one; None for one rank alone."""
        places = list(dict.fromkeys(cohort_of(one) for one in there))
        if hold.answers is None:
            return [place for place in places if place is not None] or places
        heard = len(places) == 1 and all(hold.is_from(one.id) for one in there)
        return places if heard and (places != [cohort] or now >= hold.since + SETTLES_WITHIN) else []

    def _now(self, given: GivenCommand, place: str | None, there: list[Replica]) -> list[Replica] | None:
        """Return the ranks that a command goes to now; None if they are not all there, or are not all meant."""
        if place is None:
            return there if len(there) == 1 else None
        ranks = self._cohorts.ranks(place)
        if self._cohorts.missing(ranks) is not None or not all(self._is_free(given, one) for one in ranks.values()):
            return None
        try:
            meant = {one.id for one in select(given.target, self._known.replicas)[0]} | set(given.replicas)
        except LoomError:
            return None
        return list(ranks.values()) if meant.issuperset(one.id for one in ranks.values()) else None

    def _is_free(self, given: GivenCommand, rank: Replica) -> bool:
        """Return whether a rank has not applied a command, and does not with the ranks of a cohort before."""
        made, cohort = given.acknowledgements.get(rank.id), given.cohorts.get(rank.id)
        if made is not None:
            return not made.ok
        hold = None if cohort is None else self._holds.get((given.id, cohort))
        return rank.id not in given.waiting or (hold is not None and hold.is_from(rank.id))

    def _go(
        self, given: GivenCommand, cohort: str, hold: OnHold, place: str | None, ranks: list[Replica], now: float
    ) -> None:
        ids, before = [one.id for one in ranks], given.ranks(cohort)
        left = [one for one in self._waiting(given, cohort) if one.id not in ids]
        got = [id for id in ids if given.cohorts.get(id, cohort) != cohort or id in given.acknowledgements]
        if got or hold.answers is not None:  # it is another decision than before
            given.attempts |= dict.fromkeys(ids, 1 + max(given.attempts.get(id, 0) for id in ids))
        del self._holds[given.id, cohort]
        self._leave(given, cohort, hold, place, left, now)
        self._known.commands.give_to(given, ids, place)
        if place is None:
            self._sender.send_frames(given, ranks)
        else:
            self._holds.pop((given.id, place), None)
            self.begin(given, place, now)
        if place != cohort:
            self.advance(cohort, before, now)

    def _leave(
        self, given: GivenCommand, cohort: str, hold: OnHold, place: str | None, left: list[Replica], now: float
    ) -> None:
        """Refuse a command for ranks that have not gone on with the others, or let them take it by themselves."""
        for one in left:
            if hold.answers is None and one.connected and one.cohort is None:
                self._known.commands.give_to(given, [one.id], None)
                self._sender.send_frames(given, [one])
            elif hold.answers is not None or place == cohort:
                self._sender.end(given, one, _LEFT, now)
            else:
                self._holds[given.id, cohort] = hold
