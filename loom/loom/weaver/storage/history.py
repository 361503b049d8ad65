"""The history of every metric of every replica.

Points are kept as they come for a while, then as means over longer and longer times; the oldest go when there are
too many. They lie in the store in chunks of up to 128, so that a read of a metric's history touches few rows. The
points of a chunk that is not full are in memory and in the store's journal.

A metric of a replica has a series for each run that the replica was in, so that no mean mixes two runs.
"""

from __future__ import annotations

import itertools
import math
import sqlite3
import struct
from array import array
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from loom.errors import ProtocolMismatch, WrongArguments
from loom.weaver.storage.samples import POINT, CurveSamples, average, outline
from loom.weaver.storage.store import Commit, Store
from loom.weaver.storage.wide_outlines import WIDE, outlines_in, widen

CHUNK = 128

MAX_METRICS = 1000

LEAST_WRITTEN = 64
"""Series that one commit writes if they are due, at least."""

READ_CLOSELY = 1 << 16
"""Points of a curve that are read one by one; of more the outlines of their chunks are."""

COMMITS = 200
"""Commits over which the series are spread if all are due at once, so that none takes long."""

_MAX_NAME = 200
_POINT_BYTES = 8 * POINT

_pack_point = struct.Struct(f"{POINT}d").pack

_Row = tuple[int, int, int, float, float, bytes]


AGAIN = "\x1f"
"""What separates a run's id from the number in the label of a segment."""


class HistoryLevel(NamedTuple):
    """A level of detail: points older than ``age`` seconds become means over ``bucket`` seconds."""

    age: float
    bucket: float


LEVELS = (HistoryLevel(3600.0, 10.0), HistoryLevel(86_400.0, 60.0), HistoryLevel(7 * 86_400.0, 600.0))
"""Every point for an hour, one each 10 s for a day, each minute for a week, and each 10 minutes after that."""


class _Series:
    """One metric of one replica."""

    __slots__ = ("before", "chunk", "id", "open", "stored", "unwritten", "upto")

    def __init__(self, id: int, upto: int, before: int = 0) -> None:
        self.id = id
        self.open = array("d")
        """The points of the chunk that is not full."""
        self.before = before
        """The number of points, ever, before those."""
        self.upto = upto
        """The journal row up to which the points were in chunks when the weaver started."""
        self.unwritten = False
        """True while it is in `MetricHistory._unwritten`, where to look it up takes longer for thousands."""
        self.begin_chunk()

    @property
    def total(self) -> int:
        """The number of points, ever."""
        return self.before + len(self.open) // POINT

    def begin_chunk(self) -> None:
        self.before = self.total
        self.open = array("d")
        self.chunk = 0
        """The id of the row that holds a part of that chunk; 0 while none does."""
        self.stored = 0
        """Bytes of that chunk in that row."""


class _Segment(NamedTuple):
    """The series of a replica while it was in one run."""

    label: str
    """The run's id, empty for none; with a number behind it if the replica had been in other runs meanwhile."""
    metrics: dict[str, _Series]

    @property
    def run(self) -> str:
        return self.label.partition(AGAIN)[0]


class MetricHistory:
    """The points of metrics, in the store's file.

    Args:
        store: the store.
        levels: the ages at which points become coarser, and how coarse, from fine to coarse.
        max_bytes: of points in chunks; beyond that, the coarsest and oldest are dropped.
        write_after: seconds after which points are written even if their chunk is not full.
    """

    def __init__(
        self,
        store: Store,
        levels: Sequence[HistoryLevel] = LEVELS,
        max_bytes: int = 1 << 30,
        write_after: float = 60.0,
    ) -> None:
        self._db = db = store.reader
        self._levels = tuple(levels)
        self._max_bytes = max_bytes
        self._write_after = write_after
        self._segments: dict[str, list[_Segment]] = {}
        """The segments of each replica; the last one gets its points."""
        self._news: dict[str, dict[str, _Series]] = {}
        """The series of each replica's last segment."""
        (next_chunk,) = db.execute("SELECT COALESCE(MAX(id), 0) + 1 FROM chunks").fetchone()
        self._chunk_ids = itertools.count(next_chunk)
        (self._next_series,) = db.execute("SELECT COALESCE(MAX(id), 0) + 1 FROM series").fetchone()
        (stored,) = db.execute("SELECT COALESCE(SUM(LENGTH(data)), 0) FROM chunks").fetchone()
        self._bytes: int = stored
        totals = Counter(dict(db.execute("SELECT series, points FROM aged")))
        whole = "SELECT series, SUM(LENGTH(data)) FROM chunks WHERE level = 0 GROUP BY series"
        totals.update({series: size // _POINT_BYTES for series, size in db.execute(whole)})
        rows = db.execute(
            "SELECT id, replica, metric, upto, COALESCE(run, '') FROM series LEFT JOIN runs_of_series "
            "ON series = id ORDER BY id"
        )
        for id, replica, metric, upto, label in rows:
            segments = self._segments.setdefault(replica, [])
            if not segments or segments[-1].label != label:
                segments.append(_Segment(label, {}))
            segments[-1].metrics[metric] = _Series(id, upto, totals[id])
        self._news.update((id, segments[-1].metrics) for id, segments in self._segments.items())
        self._new_series: list[tuple[int, str, str, int]] = []
        self._new_in_runs: list[tuple[int, str]] = []
        """The run of each new series that is of one."""
        self._full: dict[_Series, list[_Row]] = {}
        """The rows of full chunks that wait for a commit, the first one first."""
        self._written: dict[_Series, list[_Row]] = {}
        """The rows of full chunks in a commit that is not stored yet."""
        self._open_chunks: dict[int, _Series] = {}
        """The series of written chunks to which points are, or will be, added, by the id of the chunk's row."""
        self._unwritten: dict[_Series, int] = {}
        """Series with points that are only in the journal, and the first such row, in the order of the rows."""
        self._journal_times: deque[tuple[int, float]] = deque()
        """The last row of the journal at each commit, and the time."""
        self._due_row = 0
        """The last row of the journal whose points are old enough to be written."""

    @property
    def size(self) -> int:
        return self._bytes

    @property
    def settled(self) -> bool:
        """True if every point is in a chunk that is written."""
        return not (self._unwritten or self._full or self._new_series)

    def metrics(self, replica: str, run: str | None = None) -> list[str]:
        """Return the names of a replica's metrics, of one run if that is given."""
        there = (one for one in self._segments.get(replica, ()) if run in (None, one.run))
        return sorted({metric for one in there for metric in one.metrics})

    def replicas_in(self, run: str) -> list[str]:
        """Return the replicas that have points of a run."""
        return [id for id, segments in self._segments.items() if any(one.run == run for one in segments)]

    def enter(self, replica: str, run: str) -> None:
        """Let the next points of a replica be those of a run."""
        segments = self._segments.setdefault(replica, [])
        if segments and not segments[-1].metrics:
            segments.pop()
        if not segments or segments[-1].run != run:
            before = sum(one.run == run for one in segments)
            segments.append(_Segment(f"{run}{AGAIN}{before}" if before else run, {}))
        self._news[replica] = segments[-1].metrics

    def label(self, replica: str) -> str:
        """Return the label that a replica's points have now, for `record_again`."""
        segments = self._segments.get(replica)
        return segments[-1].label if segments else ""

    def record(
        self,
        replica: str,
        journal_id: int,
        time: float,
        step: int | None,
        metrics: Mapping[str, float],
        segment: _Segment | None = None,
    ) -> None:
        """Take the metrics of a status report that is, or will be, in a row of the journal."""
        known = self._news.get(replica) if segment is None else segment.metrics
        if known is None:
            self.enter(replica, "")
            known = self._news[replica]
        at = math.nan if step is None else step
        for name, value in metrics.items():
            series = known.get(name)
            if series is None:
                series = self._begin(replica, known, name, journal_id)
            points = series.open
            try:
                points.frombytes(_pack_point(time, at, value))  # in a third of the time of `extend`
            except (struct.error, OverflowError):
                raise ProtocolMismatch(f"the metric {name!r:.80} is {value!r:.80}, which is no number") from None
            if not series.unwritten:
                series.unwritten = True
                self._unwritten[series] = journal_id
            if len(points) >= CHUNK * POINT:
                self._full.setdefault(series, []).append(self._row(series))
                series.begin_chunk()

    def record_again(
        self, replica: str, label: str, journal_id: int, time: float, step: int | None, metrics: Mapping[str, float]
    ) -> None:
        """Take a status report from the journal, except the metrics that had been written when the weaver ended."""
        segments = self._segments.get(replica, ())
        segment = next((one for one in segments if one.label == label), None)
        if segment is None:  # its run was removed
            return
        known = segment.metrics
        left = {
            name: value for name, value in metrics.items() if name not in known or known[name].upto < journal_id
        }
        self.record(replica, journal_id, time, step, left, segment)

    def between(
        self,
        replica: str,
        metric: str,
        since: float = -math.inf,
        until: float = math.inf,
        points: int = 500,
        run: str | None = None,
    ) -> list[tuple[float, int | None, float]]:
        """Return a metric's history between two times, as means if it has more than ``points`` points.

        Args:
            run: the only run whose points are wanted.
        """
        found = self.samples(replica, metric, run, "time", since, until, max(READ_CLOSELY, points)).in_time()
        means = found.thinned(max(1, points))
        steps = (None if math.isnan(one) else int(one) for one in means.steps)
        return list(zip(means.times, steps, means.means, strict=True))

    def samples(
        self,
        replica: str,
        metric: str,
        run: str | None = None,
        by: str = "time",
        since: float = -math.inf,
        until: float = math.inf,
        closely: int = READ_CLOSELY,
    ) -> CurveSamples:
        """Return a metric's points in a range of times or of steps, in the order in which they came.

        Args:
            by: ``time`` or ``step``.
            closely: the most points that are read one by one; of more, a sample stands for a chunk.
        """
        found = CurveSamples()
        for segment in self._segments.get(replica, ()):
            if metric in segment.metrics and run in (None, segment.run):
                self._sample(found, segment.metrics[metric], by, since, until, closely)
        return found.within(by, since, until)

    def _sample(
        self, found: CurveSamples, series: _Series, by: str, since: float, until: float, closely: int
    ) -> None:
        """Add a series, as far as its chunks reach into the range."""
        full = [*self._written.get(series, ()), *self._full.get(series, ())]
        # Memory has all points of these chunks; their rows may have some of them already.
        in_memory = {series.chunk, *(row[0] for row in full)}
        outlines = outlines_in(self._db, series.id, by, since, until, closely)
        others = self._db.execute(
            "SELECT id, level, first, last, data FROM chunks WHERE id IN (SELECT id FROM chunks WHERE series = ? "
            "EXCEPT SELECT chunk FROM outlines WHERE series = ?) ORDER BY level DESC, first",
            (series.id, series.id),
        )
        fine: list[tuple[int, bytes | Sequence[Any]]] = []
        for id, level, begins, ends, data in others:
            if id not in in_memory and (by == "step" or (ends >= since and begins <= until)):
                if level:
                    found.add_points(array("d", data))
                else:
                    fine.append((id, data))
        of_chunks = sum(map(itemgetter(1), outlines)) > closely
        outlines = [one for one in outlines if one[0] not in in_memory]
        if of_chunks and not fine:
            found.add_outlines(outlines)
        else:
            fine += [(one[0], one if of_chunks else self._data(one[0])) for one in outlines]
            fine.sort(key=itemgetter(0))
            for kind, group in itertools.groupby(fine, key=lambda one: type(one[1])):
                if kind is bytes:
                    found.add_points(array("d", b"".join(data for _, data in group)))  # type: ignore[misc]
                else:
                    found.add_outlines([one for _, one in group])
        found.add_points(array("d", b"".join(row[-1] for row in full)) + series.open)

    def value_at(self, replica: str, metric: str, run: str, step: int) -> float | None:
        """Return the last value of a metric in a run at the highest step up to this one."""
        closely = self.samples(replica, metric, run, "step", -math.inf, step, CHUNK)
        reached = max(closely.steps, default=None)
        if reached is None:
            return None
        found = self.samples(replica, metric, run, "step", reached, step)
        at = max(found.steps, default=None)
        return next(
            (value for one, value in zip(found.steps[::-1], found.means[::-1], strict=True) if one == at), None
        )

    def after(
        self, replica: str, cursor: str, since: float = -math.inf, limit: int = 5000
    ) -> tuple[dict[str, list[tuple[float, int | None, float]]], str, bool]:
        """Return the points of a replica's metrics after a cursor, the cursor after these, and whether more follow.

        Each point is in one answer of a chain of cursors, in the order in which it was reported. Of those that were
        made coarser before they were asked for there are means, at times after ``since`` only.

        Args:
            cursor: that of the answer before; empty to begin with the oldest points. It has for each series
                ``SERIES:POINTS``, its id and how many of its points are passed, with commas between them.
                ``0:SERIES`` stands for the series of former runs up to an id that are not named: they are passed.
            limit: points in one answer, about.
        """
        passed = dict(_read_cursor(cursor))
        former = passed.get(0, 0)
        known = [(metric, one, ends) for metric, one, ends in self._all(replica) if _follows(one, ends, passed)]
        # The count of a series that was forgotten, or of another store, may be above what there is.
        counts = {one: passed.get(one.id, 0) for _, one, _ in known}
        counts = {one: count if count <= one.total else 0 for one, count in counts.items()}
        news = [(metric, one) for metric, one, _ in known if counts[one] < one.total]
        most = max(1, limit // max(1, len(news)))
        found: dict[str, list[tuple[float, int | None, float]]] = {}
        unfinished = set()
        for metric, series in news:
            if metric not in unfinished:  # the points of a later run follow all of the one before
                points, counts[series] = self._points_after(series, counts[series], since, most)
                found.setdefault(metric, []).extend(_mean(points, [place]) for place in range(len(points) // POINT))
                if counts[series] < series.total:
                    unfinished.add(metric)
        more = any(count < one.total for one, count in counts.items())
        done = {one.id for _, one, ends in known if ends and counts[one] >= one.total}
        former = max([former, *done])
        entries = [(0, former)] if former else []
        entries += [(one.id, count) for one, count in counts.items() if one.id not in done]
        return found, ",".join(f"{id}:{count}" for id, count in entries), more

    def _all(self, replica: str) -> list[tuple[str, _Series, bool]]:
        """Return (metric, series, whether its run is a former one) of a replica, the oldest run first."""
        segments = self._segments.get(replica, [])
        return [
            (metric, series, segment is not segments[-1])
            for segment in segments
            for metric, series in segment.metrics.items()
        ]

    def is_coarse_after(self, replica: str, cursor: str) -> bool:
        """Return whether some of the points after a cursor were made coarser."""
        passed = dict(_read_cursor(cursor))
        coarser = "SELECT 1 FROM aged WHERE series = ? AND points > ?"
        ids = (one.id for _, one, ends in self._all(replica) if _follows(one, ends, passed))
        return any(self._db.execute(coarser, (id, passed.get(id, 0))).fetchone() for id in ids)

    def _points_after(self, series: _Series, passed: int, since: float, most: int) -> tuple[array[float], int]:
        """Return at most so many points of a series after those that were passed, and how many are passed then."""
        held = [*self._written.get(series, ()), *self._full.get(series, ())]
        in_memory = {series.chunk, *(row[0] for row in held)}
        chunks: list[tuple[int, int, bytes | None]] = [(row[0], len(row[-1]), row[-1]) for row in held]
        chunks.append((0, len(series.open) * series.open.itemsize, series.open.tobytes()))
        if passed < series.total - sum(size for _, size, _ in chunks) // _POINT_BYTES:
            stored = self._db.execute(
                "SELECT id, LENGTH(data) FROM chunks WHERE series = ? AND level = 0 ORDER BY id", (series.id,)
            )
            chunks = [(id, size, None) for id, size in stored if id not in in_memory] + chunks
        found = array("d")
        at = series.total - sum(size for _, size, _ in chunks) // _POINT_BYTES
        if passed < at:  # those until there were made coarser
            found, passed = self._coarse(series, since, most), at
        for id, size, data in chunks:
            count = size // _POINT_BYTES
            if at + count > passed and len(found) < most * POINT:
                points = array("d", self._data(id) if data is None else data)
                first = passed - at
                taken = points[first * POINT : (first + most) * POINT - len(found)]
                found += taken
                passed += len(taken) // POINT
            at += count
        return found, passed

    def _data(self, chunk: int) -> bytes:
        (data,) = self._db.execute("SELECT data FROM chunks WHERE id = ?", (chunk,)).fetchone()
        return bytes(data)

    def _coarse(self, series: _Series, since: float, most: int) -> array[float]:
        """Return at most so many means of a series's points that were made coarser, after a time."""
        rows = self._db.execute(
            "SELECT data FROM chunks WHERE series = ? AND level > 0 AND last > ? ORDER BY first", (series.id, since)
        )
        points = array("d", b"".join(data for (data,) in rows))
        later = [place for place in range(len(points) // POINT) if points[place * POINT] > since]
        every = max(1, -(-len(later) // most))
        means = array("d")
        for start in range(0, len(later), every):
            time, step, value = _mean(points, later[start : start + every])
            means.extend((time, math.nan if step is None else step, value))
        return means

    def forget(self, commit: Commit, replica: str, kept: Callable[[str], bool] = lambda run: False) -> None:
        """Delete the history of a replica with a commit, except for the runs that are ``kept``."""
        segments = self._segments.pop(replica, [])
        self._news.pop(replica, None)
        if staying := [one for one in segments if kept(one.run)]:
            self._segments[replica] = staying
            self._news[replica] = staying[-1].metrics
        self._delete(
            commit, [one for segment in segments if segment not in staying for one in segment.metrics.values()]
        )

    def forget_run(self, commit: Commit, replica: str, run: str) -> None:
        """Delete what a replica has of an ended run with a commit."""
        self.forget(commit, replica, lambda one: one != run)

    def _delete(self, commit: Commit, forgotten: Sequence[_Series]) -> None:
        for series in forgotten:
            self._unwritten.pop(series, None)
            sizes = dict(self._db.execute("SELECT id, LENGTH(data) FROM chunks WHERE series = ?", (series.id,)))
            sizes |= {row[0]: len(row[-1]) for row in self._full.pop(series, ())}
            sizes |= {series.chunk: series.stored}
            self._bytes -= sum(sizes.values())
            for chunk in sizes:
                self._open_chunks.pop(chunk, None)
        ids = [series.id for series in forgotten]
        self._new_series = [entry for entry in self._new_series if entry[0] not in ids]
        self._new_in_runs = [entry for entry in self._new_in_runs if entry[0] not in ids]
        for table, column in (
            ("chunks", "series"),
            ("outlines", "series"),
            ("wide_outlines", "series"),
            ("series", "id"),
            ("aged", "series"),
            ("runs_of_series", "series"),
        ):
            commit.delete(table, column, ids)

    def write(self, commit: Commit, now: float) -> int:
        """Add what is due to a commit, and make old points coarser; return the first needed row of the journal.

        All points up to now are in the journal's row ``commit.journal_id`` or in those before. The commit before
        has to be stored.
        """
        commit.insert("series", self._new_series)
        commit.insert("runs_of_series", self._new_in_runs)
        self._new_series, self._new_in_runs = [], []
        if not self._journal_times or self._journal_times[-1][0] != commit.journal_id:
            self._journal_times.append((commit.journal_id, now))
        while self._journal_times and self._journal_times[0][1] <= now - self._write_after:
            self._due_row = self._journal_times.popleft()[0]
        most = max(LEAST_WRITTEN, len(self._unwritten) // COMMITS)
        # A journal row may hold points of a full chunk and of the next, so that both are written together.
        due = dict.fromkeys(itertools.islice(self._full, most))
        due |= dict.fromkeys(itertools.islice(_begun_by(self._unwritten, self._due_row), most))
        rows: list[_Row] = []
        self._written = {series: self._full.pop(series) for series in due if series in self._full}
        for series in due:
            self._unwritten.pop(series, None)
            series.unwritten = False
            for row in self._written.get(series, ()):
                rows.append(row)
                self._open_chunks.pop(row[0], None)
            if series.open:
                rows.append(self._row(series))
                self._open_chunks[series.chunk] = series
        commit.insert("chunks", rows, replace=True)
        full = (outline(series.id, row[0], row[-1]) for series, some in self._written.items() for row in some)
        commit.insert("outlines", [one for one in full if one is not None], replace=True)
        for series, some in self._written.items():
            chunks = series.before // CHUNK
            if chunks // WIDE > (chunks - len(some)) // WIDE:  # those of this commit are still told from memory
                commit.run(partial(widen, series=series.id, before=some[0][0]))
        ids = [series.id for series in due]
        commit.update("series", "upto", commit.journal_id, "id", ids)
        commit.when_stored(self._written.clear)
        self._age(commit, now, {row[0] for row in rows})
        return next(iter(self._unwritten.values()), commit.journal_id + 1)

    def _begin(self, replica: str, known: dict[str, _Series], name: str, journal_id: int) -> _Series:
        if type(name) is not str or not 0 < len(name) <= _MAX_NAME:
            raise ProtocolMismatch(f"the name of a metric has 1 to {_MAX_NAME} characters, not {name!r:.80}")
        if len(known) >= MAX_METRICS:
            raise ProtocolMismatch(f"replica {replica!r} reports more than {MAX_METRICS} metrics, such as {name!r}")
        series = known[name] = _Series(self._next_series, journal_id - 1)
        self._next_series += 1
        self._new_series.append((series.id, replica, name, journal_id - 1))
        if label := next(one.label for one in self._segments[replica] if one.metrics is known):
            self._new_in_runs.append((series.id, label))
        return series

    def _row(self, series: _Series) -> _Row:
        if not series.chunk:
            series.chunk = next(self._chunk_ids)
        data = series.open.tobytes()
        self._bytes += len(data) - series.stored
        series.stored = len(data)
        times = series.open[::POINT]
        return series.chunk, series.id, 0, min(times), max(times), data

    def _age(self, commit: Commit, now: float, written: Collection[int], at_most: int = 64) -> None:
        """Make a few old chunks coarser, and drop a few of the oldest if there are too many bytes.

        Args:
            written: chunks that the commit writes, which are not as old as they were.
        """
        deleted: dict[int, None] = {}
        aged: Counter[int] = Counter()
        newest: dict[int, int] = {}
        steps = []
        for level, (age, bucket) in enumerate(self._levels):
            for id, series, data in self._db.execute(
                "SELECT id, series, data FROM chunks WHERE level = ? AND last < ? ORDER BY last LIMIT ?",
                (level, now - age, at_most),
            ).fetchall():
                if id not in written and self._may_delete(id):
                    deleted[id] = None
                    self._bytes -= len(data)
                    if level == 0:
                        aged[series] += len(data) // _POINT_BYTES
                        newest[series] = max(newest.get(series, id), id)
                    steps.append(partial(self._add_coarse, commit, series, level + 1, data, bucket))
        for level in range(len(self._levels), -1, -1):
            if self._bytes <= self._max_bytes:
                break
            for id, series, size in self._db.execute(
                "SELECT id, series, LENGTH(data) FROM chunks WHERE level = ? ORDER BY last LIMIT ?",
                (level, at_most),
            ).fetchall():
                gone = id in written or id in deleted
                if self._bytes > self._max_bytes and not gone and self._may_delete(id):
                    deleted[id] = None
                    self._bytes -= size
                    if level == 0:
                        aged[series] += size // _POINT_BYTES
                        newest[series] = max(newest.get(series, id), id)
        add = "INSERT INTO aged VALUES (?, ?) ON CONFLICT (series) DO UPDATE SET points = points + excluded.points"
        for series, points in aged.items():
            commit.execute(add, series, points)
            # Those of its chunks that stay and are older have none then, and are read closely.
            for table in ("outlines", "wide_outlines"):
                commit.execute(f"DELETE FROM {table} WHERE series = ? AND chunk <= ?", series, newest[series])
        # First of all, because nothing may be added to a chunk that goes.
        commit.delete("chunks", "id", list(deleted))
        for step in steps:
            commit.run(step)

    def _may_delete(self, chunk: int) -> bool:
        """Return whether no points are about to be added to a chunk, and count on its deletion."""
        series = self._open_chunks.get(chunk)
        if series is not None:
            if series in self._unwritten:
                return False
            del self._open_chunks[chunk]
            series.begin_chunk()
        return True

    def _add_coarse(
        self, commit: Commit, series: int, level: int, data: bytes, bucket: float, db: sqlite3.Connection
    ) -> None:
        """Add the means of a chunk's points to the last chunk of its series on a coarser level."""
        points = array("d")
        last = db.execute(
            "SELECT id, data FROM chunks WHERE series = ? AND level = ? ORDER BY first DESC LIMIT 1",
            (series, level),
        ).fetchone()
        if last is not None and len(last[1]) < CHUNK * POINT * points.itemsize:
            id, before = last
        else:
            id, before = next(self._chunk_ids), b""
        points.frombytes(data)
        points = array("d", before) + _means(points, bucket)
        times = points[::POINT]
        row = (id, series, level, min(times), max(times), points.tobytes())
        db.execute("INSERT OR REPLACE INTO chunks VALUES (?, ?, ?, ?, ?, ?)", row)
        commit.when_stored(partial(self._grow, len(row[-1]) - len(before)))

    def _grow(self, size: int) -> None:
        self._bytes += size


def _follows(series: _Series, former: bool, passed: Mapping[int, int]) -> bool:
    """Return whether a cursor does not say that a series is of a former run and all of its points are passed."""
    return not former or series.id in passed or series.id > passed.get(0, 0)


def _read_cursor(cursor: str) -> Iterator[tuple[int, int]]:
    """Yield the number of each series and of its passed points. Raise `WrongArguments` if it is no cursor."""
    for part in cursor.split(",") if cursor else ():
        series, colon, points = part.partition(":")
        if not (colon and series.isdecimal() and points.isdecimal()):
            raise WrongArguments(f"{cursor!r:.80} is no cursor of points: it is empty, or that of an answer before")
        yield int(series), int(points)


def _begun_by(unwritten: dict[_Series, int], row: int) -> Iterator[_Series]:
    """Yield the series whose first unwritten point is in this row of the journal or in an earlier one."""
    return (series for series, _ in itertools.takewhile(lambda entry: entry[1] <= row, unwritten.items()))


def _mean(points: array[float], places: Sequence[int]) -> tuple[float, int | None, float]:
    """Return one point for several: the time and step of the last, and the mean of the values."""
    last = places[-1] * POINT
    value = average([points[place * POINT + 2] for place in places])
    return points[last], None if math.isnan(points[last + 1]) else int(points[last + 1]), value


def _means(points: array[float], bucket: float) -> array[float]:
    """Return one point for each ``bucket`` seconds that have points."""
    means = array("d")
    places = range(len(points) // POINT)
    for _, group in itertools.groupby(places, key=lambda place: points[place * POINT] // bucket):
        time, step, value = _mean(points, list(group))
        means.extend((time, math.nan if step is None else step, value))
    return means
