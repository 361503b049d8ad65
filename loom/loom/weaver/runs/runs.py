"""`UserRuns`: the runs of a user: which process is of which run, and what becomes of a run.

The next commit writes every change. Those made from the same store have it.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from loom.control.handshake import ThreadletHello
from loom.control.run_start import RunParent, StartFacts
from loom.errors import LimitReached, NotFound, RunLives, WrongArguments
from loom.weaver.commands import Commands
from loom.weaver.replicas import Replica
from loom.weaver.run_views import RunsPlace
from loom.weaver.runs.run import MAX_GROUPS, RankEnd, Run, deciding_end
from loom.weaver.runs.timeline import BETWEEN, Timeline, about_rank
from loom.weaver.states import LIVING, ReplicaEnding
from loom.weaver.storage.events import EventStore
from loom.weaver.storage.history import MetricHistory
from loom.weaver.storage.store import Commit, Store
from loom.weaver.views import WeaverEvent, few

MAX_ENDED = 1000
"""Ended runs of one user; further ones take the place of those that ended first."""

MAX_AGE = 365 * 86_400.0
"""Seconds for which an ended run is kept."""

MAX_RANKS = 200_000
"""Ranks of all stored runs of one user."""

ASK_EVERY = 30.0
"""Seconds between two processes of a run that are asked for the facts of its start."""

REMOVED_AT_ONCE = 32
"""Replicas of removed runs whose points one commit deletes."""

MAX_NOTE = 32 << 10
"""Bytes of a note."""

MAX_TAGS = 32
MAX_TAG = 64
"""Characters of a tag."""

_OVER = (ReplicaEnding.COMPLETED.value, ReplicaEnding.STOPPED.value, ReplicaEnding.CANCELLED.value)
"""The states of runs that no restart continues without their id."""


class UserRuns:
    """The runs of a user.

    Args:
        replicas: the user's replicas, by id.
    """

    def __init__(
        self,
        store: Store,
        events: EventStore,
        history: MetricHistory,
        commands: Commands,
        replicas: Mapping[str, Replica],
    ) -> None:
        self._store = store
        self._events = events
        self._history = history
        self._replicas = replicas
        self._timeline = Timeline(store, commands)
        self._runs: dict[str, Run] = {}
        self._of_start: dict[str, str] = {}
        """The run of each start's id."""
        self._newest: dict[tuple[str | None, str], str] = {}
        """The newest run of each group in a session."""
        self._ended: dict[str, None] = {}
        """The ids of the ended runs, in the order of their ends."""
        self.leads: set[str] = set()
        """The ids of the replicas that have the lowest rank of their group in their run."""
        self._ranks = 0
        """Ranks of all runs."""
        self._left: dict[str, Mapping[str, Any]] = {}
        """What is kept of replicas that have left their runs and is not stored yet, by its key in the store."""
        self._changed: dict[Run, None] = {}
        self._unsettled: dict[Run, None] = {}
        """Runs of which a process has ended."""
        self._news: dict[Run, None] = {}
        """Runs that have ended, or had values that are not finite, since `take_news`."""
        self._removed: dict[str, int] = {}
        """The ids of removed runs, which no run may have, and the last row of the journal that may name each."""
        self._removing: deque[tuple[str, str]] = deque()
        """(run, replica) whose points are deleted next; at its end the run's own rows."""
        self.needed = 0
        """The first row of the journal that the last commit kept."""

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs.values())

    def load(self) -> None:
        """Read the runs from the store. The replicas are there."""
        for id, stored in self._store.rows("runs"):
            if (row := stored.get("removed")) is not None:
                self._removed[id] = row
            else:
                self._enter(Run.from_dict(stored))
        for run in sorted(self._runs.values(), key=lambda one: one.ended or 0.0):
            if run.ended is not None:
                self._ended[run.id] = None
        for replica in self._replicas.values():
            known = self._runs.get(replica.run or "")
            if known is not None:
                known.there[replica.id] = replica
                if any(lead[1] == replica.id for lead in known.leads.values()):
                    self.leads.add(replica.id)
                if replica.state in LIVING:
                    known.living[replica.id] = None
                self._history.enter(replica.id, known.id)
        self._unsettled |= {run: None for run in self if run.ended is None and not run.living}

    @property
    def pending(self) -> bool:
        return bool(self._changed or self._unsettled or self._removed or self._removing)

    def get(self, id: str) -> Run | None:
        return self._runs.get(id)

    def find(self, name: str, session: str | None = None) -> Run:
        """Return a run by its id, by a name of which it is the newest run, or by the beginning of its id.

        Args:
            session: the only session whose runs are meant; None: those of all.

        Raises:
            NotFound: there is none, or several ids begin so.
        """
        meant = [one for one in self._runs.values() if session in (None, one.session)]
        if (run := self._runs.get(name)) in meant and run is not None:
            return run
        if named := [one for one in meant if one.name == name]:
            return max(named, key=lambda one: one.began)
        found = [one for one in meant if len(name) >= 4 and one.id.startswith(name)]
        if len(found) == 1:
            return found[0]
        if found:
            raise NotFound(
                f"several runs begin with {name!r:.80}: {few([one.id for one in found])}", code="unknown_run"
            )
        newest = sorted(meant, key=lambda one: -one.began)
        raise NotFound(f"no run {name!r:.80}; there are {few([one.id for one in newest])}", code="unknown_run")

    def assign(
        self, replica: Replica, hello: ThreadletHello, again: bool, now: float, is_there: Callable[[Replica], bool]
    ) -> None:
        """Assign the process that becomes a replica to a run, or begin one; see the design page about runs.

        Args:
            again: whether the replica's process is the one that it was.
            is_there: whether a replica's process is known to live, of which something was heard lately.
        """
        before = self._runs.get(replica.run or "")
        run = before if again else None
        run = run or self._continued(replica, hello, is_there) or self._begin(hello, now)
        if before is not None and before is not run:
            self._leave(before, replica)
        if hello.start is not None and hello.start not in self._of_start and len(run.starts) < MAX_GROUPS:
            run.starts.append(hello.start)
            self._of_start[hello.start] = run.id
        if hello.group not in run.groups and len(run.groups) < MAX_GROUPS:
            run.groups.append(hello.group)
            if hello.group and run.name.startswith(hello.group):  # as train_jobs, a controller's, with train
                run.name = hello.group
        self._newest[run.session, hello.group] = run.id
        known = replica.id in run.there or self._was_in(run, replica.id)
        if not known:
            run.ranks += 1
            self._ranks += 1
        replica.run, replica.began_again = run.id, known and not again
        place = hello.procs or hello.place
        if place and run.session is not None and not again:
            run.begin_in(place, now)
        run.there[replica.id] = replica
        run.living[replica.id] = None
        self._history.enter(replica.id, run.id)
        former = run.leads.get(hello.group, (0, ""))[1]
        if run.take_lead(replica.id, hello.group, hello.rank):
            if former in run.there:
                self.leads.discard(former)
            self.leads.add(replica.id)
            run.configure(hello.config)
        self._goes_on(run, now)
        self._changed[run] = None

    def _goes_on(self, run: Run, now: float) -> None:
        if run.ended is not None:
            self._ended.pop(run.id, None)
            run.go_on()
            self._change(run, now, went_on=True)

    def _change(self, run: Run, now: float, **about: Any) -> None:
        """Let a change be stored, and tell those who show runs."""
        self._changed[run] = None
        self._log(now, "run_changed", run, **about)

    def _log(self, now: float, kind: str, run: Run, **about: Any) -> None:
        self._events.append(now, kind, run=run.id, name=run.name, state=run.state, **about)

    def _continued(
        self, replica: Replica, hello: ThreadletHello, is_there: Callable[[Replica], bool]
    ) -> Run | None:
        """Return the run that a new process goes on in; None if it begins one."""
        if hello.start is not None:
            known = self._runs.get(self._of_start.get(hello.start, ""))
            if known is not None and known.session == hello.session:
                return known
        newest = self._runs.get(self._newest.get((hello.session, hello.group), ""))
        if newest is None:
            return None
        others = (newest.there[id] for id in newest.living if id != replica.id)
        if any(one.group == hello.group and is_there(one) for one in others):
            return newest
        started_again = bool(hello.restarted) or (hello.respawns and hello.start is None)
        return newest if started_again and newest.state not in _OVER else None

    def _begin(self, hello: ThreadletHello, now: float) -> Run:
        id = hello.start or ""
        if not id or id in self._runs or id in self._removed or id in self._of_start:
            id = uuid.uuid4().hex[:12]
        run = Run(id, hello.group, hello.session, now)
        parent = hello.parent
        before = self._runs.get(self._newest.get((hello.session, hello.group), ""))
        if (
            parent is None and hello.restarted and hello.group and before is not None
        ):  # it was over, and is started again all the same
            step = before.step if hello.step is None else hello.step
            parent = RunParent(before.id, step or 0, "restart")
        if parent is not None and parent.run != id:
            run.parent = parent._asdict()
        self._enter(run)
        self._log(now, "run_began", run)
        return run

    def _enter(self, run: Run) -> None:
        self._runs[run.id] = run
        self._ranks += run.ranks
        for start in run.starts:
            self._of_start[start] = run.id
        for group in run.groups:
            before = self._runs.get(self._newest.get((run.session, group), ""))
            if before is None or before.began <= run.began:
                self._newest[run.session, group] = run.id

    def _was_in(self, run: Run, id: str) -> bool:
        wanted = _key(run, id)
        return wanted in self._left or any(
            key == wanted for key, _ in self._store.rows_after("run_ranks", wanted, 1)
        )

    def _leave(self, run: Run, replica: Replica) -> None:
        """Keep what is known of a replica whose name goes to another run, or is forgotten."""
        about = dict(about_rank(run, replica.id))
        if replica.state in LIVING:
            reason = "another process took its place, of another run"
            about |= {"state": "failed", "ending": ReplicaEnding.LOST.value, "end_reason": reason}
        self._left[_key(run, replica.id)] = about
        self._store.put("run_ranks", _key(run, replica.id), about)
        del run.there[replica.id]
        self.leads.discard(replica.id)
        if replica.id in run.living:
            del run.living[replica.id]
            self._unsettled[run] = None

    def forgotten(self, replica: Replica) -> None:
        """Note that a replica is forgotten; what it was in its run is kept."""
        run = self._runs.get(replica.run or "")
        if run is not None:
            self._leave(run, replica)

    def moved(self, replica: Replica, now: float) -> None:
        """Note the new state of a replica, or that more is known of its end."""
        run = self._runs.get(replica.run or "")
        if run is None:
            return
        if replica.state in LIVING:
            run.living[replica.id] = None
            self._goes_on(run, now)
        else:
            run.living.pop(replica.id, None)
            self._unsettled[run] = None

    def take(self, event: WeaverEvent) -> None:
        """Take an event into the timeline of the run that it is about."""
        replica = self._replicas.get(event.replica or "")
        run = None if replica is None else self._runs.get(replica.run or "")
        if replica is None or run is None:
            return
        if event.kind == "config" and replica.id in self.leads:
            news = {key: change["new"] for key, change in event.data["changes"].items()}
            if run.configure(news):
                self._changed[run] = None
            return
        marks = run.marks
        self._timeline.take(run, event, replica.began_again)
        if run.marks != marks:
            self._changed[run] = None

    def summarize(self, replica: Replica, step: int | None, metrics: Mapping[str, float]) -> None:
        """Take a status report, as for `Run.summarize`; it is stored with the replica's newest status."""
        run = self._runs.get(replica.run or "")
        if run is not None and replica.id in self.leads:
            run.summarize(replica.id, step, metrics)
            if run.odd:
                self._news[run] = None

    def take_news(self) -> list[Run]:
        """Return the runs that have ended, or had values that are not finite, since the last call."""
        if not self._news:
            return []
        news, self._news = list(self._news), {}
        return [run for run in news if self._runs.get(run.id) is run]

    def save_summary(self, replica: Replica) -> None:
        """Write the summary with the next commit, if a replica's metrics are in it."""
        run = self._runs.get(replica.run or "")
        if run is not None and replica.id in self.leads:
            self._changed[run] = None

    def wants_facts(self, replica: Replica, now: float) -> bool:
        """Return whether a replica's process shall tell the facts of its run's start."""
        run = self._runs[replica.run or ""]
        teller = "" if run.start is None else run.start["replica"]
        leads = replica.id in self.leads
        if run.start is not None and (not leads or any(lead[1] == teller for lead in run.leads.values())):
            return False
        if not leads and now < run.asked + ASK_EVERY:
            return False
        run.asked = now
        return True

    def take_facts(self, replica: Replica, told: StartFacts, now: float) -> None:
        """Take the facts of a start, unless better ones are known."""
        run = self._runs.get(replica.run or "")
        if run is not None and (run.start is None or replica.id in self.leads):
            run.start = {**told.facts, "replica": replica.id}
            self._changed[run] = None

    def of_start(self, start: str) -> Run | None:
        """Return the run of a start; None if none of its processes has registered."""
        return self._runs.get(self._of_start.get(start, ""))

    def children(self, run: Run) -> list[Run]:
        """Return the runs that continue a run, the first first."""
        found = (one for one in self if one.parent is not None and one.parent["run"] == run.id)
        return sorted(found, key=lambda one: one.began)

    def begun_in(self, session: str, places: Collection[str]) -> list[RunsPlace]:
        """Return where and when processes of a session's runs began, as far as in one of the places."""
        own = sorted((run for run in self if run.session == session), key=lambda one: one.began)
        return [
            RunsPlace(place, run.places[place], run.id, run.name)
            for run in own
            for place in places
            if place in run.places
        ]

    def timeline(self, run: Run) -> list[dict[str, Any]]:
        return self._timeline.of(run)

    def restarts(self, run: Run) -> list[float]:
        """Return the times when processes of a run began again."""
        return [mark["time"] for mark in self._timeline.of(run) if mark["kind"] == "restarted"]

    def ranks_before(self, run: Run, limit: int) -> dict[str, Mapping[str, Any]]:
        """Return what is kept of replicas of a run whose names have gone to other runs, by id."""
        prefix = _key(run, "")
        stored = dict(self._store.rows_after("run_ranks", prefix, limit))
        stored |= {key: about for key, about in self._left.items() if key.startswith(prefix)}
        return {key.removeprefix(prefix): about for key, about in stored.items()}

    def note(self, run: Run, now: float, text: str) -> None:
        if len(text.encode(errors="replace")) > MAX_NOTE:
            raise LimitReached(
                f"a note has at most {MAX_NOTE >> 10} KiB, not {len(text):,} characters: link to more"
            )
        run.note = text
        self._change(run, now)

    def tag(self, run: Run, now: float, add: list[str], remove: list[str]) -> None:
        for one in add:
            if not 0 < len(one) <= MAX_TAG or not one.isprintable():
                raise WrongArguments(f"a tag has 1 to {MAX_TAG} printable characters, not {one!r:.80}")
        tags = [one for one in dict.fromkeys([*run.tags, *add]) if one not in remove]
        if len(tags) > MAX_TAGS:
            raise LimitReached(f"run {run.id!r} would have {len(tags)} tags; {MAX_TAGS} are the most")
        run.tags = tags
        self._change(run, now)

    def archive(self, run: Run, now: float, archived: bool) -> None:
        run.archived = archived
        self._change(run, now)

    def remove(self, run: Run, now: float) -> None:
        """Remove a run that has ended. Its points are deleted over the next commits.

        Raises:
            RunLives: it lives.
        """
        if run.living:
            raise RunLives(f"run {run.id!r} lives ({few(run.living)}): stop it first, or archive it")
        del self._runs[run.id]
        self._change(run, now, removed=True)
        self._ended.pop(run.id, None)
        self._changed.pop(run, None)
        self._unsettled.pop(run, None)
        self._ranks -= run.ranks
        for start in run.starts:
            self._of_start.pop(start, None)
        for group in run.groups:
            if self._newest.get((run.session, group)) == run.id:
                del self._newest[run.session, group]
        self._timeline.forget(run.id)
        self._removed[run.id] = self._store.last_row
        self._store.put("runs", run.id, {"removed": self._store.last_row})

    def settle(self, now: float) -> None:
        """Give the runs whose processes have ended a state, remove surplus ones, and put what has changed."""
        for run in [*self._unsettled]:
            if not run.living:
                self._end(run, now)
        self._unsettled.clear()
        self._remove_surplus(now)
        self._timeline.save()
        for run in self._changed:
            self._store.put("runs", run.id, run.to_dict())
        self._changed.clear()

    def _end(self, run: Run, now: float) -> None:
        known = self.ranks_before(run, MAX_RANKS) if run.ranks > len(run.there) else {}
        known |= {id: about_rank(run, id) for id in run.there}
        ends = [
            RankEnd(
                id, ReplicaEnding(one["ending"]), one["end_reason"], one["ended_by"], one["changed"], one["step"]
            )
            for id, one in known.items()
            if one["ending"] is not None
        ]
        run.step = max((one.step for one in ends if one.step is not None), default=run.step)
        run.max_step = max((one.max_step for one in run.there.values() if one.max_step is not None), default=None)
        if run.end(deciding_end(ends), max((one.time for one in ends), default=now)):
            self._timeline.ended(run, now, self._events.last)
            about = {name: getattr(run, name) for name in ("reason", "by", "first", "step")}
            self._log(now, "run_ended", run, **about)
            self._news[run] = None
        self._ended[run.id] = None
        self._changed[run] = None

    def _remove_surplus(self, now: float) -> None:
        while self._ended:
            first = self._runs[next(iter(self._ended))]
            old = first.ended is not None and first.ended < now - MAX_AGE
            if not old and len(self._ended) <= MAX_ENDED and self._ranks <= MAX_RANKS:
                break
            self.remove(first, now)

    def write(self, commit: Commit) -> None:
        """Add to a commit the deletion of some of what removed runs have left. All changes were put before."""
        written = dict(self._left)
        commit.when_stored(lambda: self._note_stored(written))
        if not self._removing:
            # A weaver that is started again reads the journal, whose rows must find no other run of the id.
            run = next((one for one, row in self._removed.items() if row < self.needed), None)
            if run is not None:
                self._removing.extend((run, id) for id in [*self._history.replicas_in(run), ""])
        for _ in range(min(REMOVED_AT_ONCE, len(self._removing))):
            run, replica = self._removing.popleft()
            if replica:
                self._history.forget_run(commit, replica, run)
                continue
            for table in ("run_ranks", "run_marks"):
                commit.execute(
                    f"DELETE FROM {table} WHERE key >= ? AND key < ?", run + BETWEEN, run + chr(ord(BETWEEN) + 1)
                )
            commit.delete("runs", "key", [run])
            del self._removed[run]

    def _note_stored(self, written: Mapping[str, Mapping[str, Any]]) -> None:
        for key, about in written.items():
            if self._left.get(key) is about:
                del self._left[key]


def _key(run: Run, replica: str) -> str:
    return f"{run.id}{BETWEEN}{replica}"
