"""Outlines of up to `WIDE` chunks of a series together, from which a curve of very many points is drawn."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Sequence
from typing import Any

WIDE = 64
"""Chunks of a wide outline, unless their steps or times fall before."""

MANY = 1 << 20
"""Points that are told by wide outlines; of fewer, the outlines of the chunks are read."""

AT_ONCE = 4096
"""The most chunks that are looked at in one commit, if a store has none of their wide outlines."""

_Row = Sequence[Any]
_NEWEST = (1 << 63) - 1
_COLUMNS = "chunk, points, last_time, last_step, mean, low, high"


def widen(db: sqlite3.Connection, series: int, before: int) -> None:
    """Add the wide outlines of a series' chunks before one that is being written."""
    (after,) = db.execute(
        "SELECT COALESCE(MAX(last_chunk), 0) FROM wide_outlines WHERE series = ?", (series,)
    ).fetchone()
    rows = db.execute(
        "SELECT id, points, outlines.first, last_time, first_step, last_step, mean, low, high FROM chunks "
        "LEFT JOIN outlines ON outlines.series = chunks.series AND chunk = id "
        "WHERE chunks.series = ? AND level = 0 AND id > ? AND id < ? ORDER BY id LIMIT ?",
        (series, after, before, AT_ONCE),
    ).fetchall()
    groups: list[list[_Row]] = [[]]
    for row in rows:
        last = groups[-1]
        if row[1] is None:  # a chunk without an outline, which has its place between others
            groups.append([])
        elif len(last) == WIDE or (last and (row[4] < last[-1][5] or row[3] < last[-1][3])):
            groups.append([row])
        else:
            last.append(row)
    if len(groups[-1]) < WIDE:
        groups.pop()
    made = [_together(series, group) for group in groups if group]
    db.executemany(f"INSERT OR REPLACE INTO wide_outlines VALUES ({','.join('?' * 12)})", made)


def _together(series: int, rows: Sequence[_Row]) -> _Row:
    chunks, points, firsts, _, _, _, means, lows, highs = zip(*rows, strict=True)
    _, _, _, last_time, _, last_step, *_ = rows[-1]
    total = sum(points)
    mean = None
    if None not in means:
        mean = math.fsum(one * (count / total) for one, count in zip(means, points, strict=True))
    low = min((one for one in lows if one is not None), default=None)
    high = max((one for one in highs if one is not None), default=None)
    counted = series, chunks[0], chunks[-1], len(rows), total
    return *counted, min(firsts), last_time, rows[0][4], last_step, mean, low, high


def outlines_in(
    db: sqlite3.Connection, series: int, by: str, since: float, until: float, closely: int
) -> list[_Row]:
    """Return the outlines of a series in a range of times or of steps: wide ones where there are very many.

    Each has the first chunk, the points, the time and the step of the last of them, the mean, the least and the
    greatest value. They are in the order of the chunks, and none is wide if there are at most ``closely`` points.
    """
    first, last = ("first_step", "last_step") if by == "step" else ("first", "last_time")
    there, bounds = f"series = ? AND {last} >= ? AND {first} <= ?", (series, since, until)
    query = f"SELECT {_COLUMNS} FROM outlines WHERE {there} AND chunk BETWEEN ? AND ? ORDER BY chunk"
    # All of them, since what has none is before the first and after the last one.
    wide = db.execute(
        f"SELECT {_COLUMNS}, last_chunk, {last} >= ? AND {first} <= ?, {first} >= ? AND {last} <= ? "
        "FROM wide_outlines WHERE series = ? ORDER BY chunk",
        (since, until, since, until, series),
    ).fetchall()
    if sum(row[1] for row in wide if row[-2]) <= max(MANY, closely):
        return db.execute(query, (*bounds, 0, _NEWEST)).fetchall()
    found = db.execute(query, (*bounds, 0, wide[0][0] - 1)).fetchall()  # older chunks went, with their wide outline
    for *row, last_chunk, reaches_in, inside in wide:
        if inside:
            found.append(row)
        elif reaches_in:
            found += db.execute(query, (*bounds, row[0], last_chunk)).fetchall()
    return [*found, *db.execute(query, (*bounds, last_chunk + 1, _NEWEST)).fetchall()]
