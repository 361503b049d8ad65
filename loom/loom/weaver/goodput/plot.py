"""A plot of a job's goodput: the use of its time over its life, and the deaths of its processes.

The plot needs matplotlib (extra ``plot``), which is imported only when a plot is made.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loom.control.reports import REASONS
from loom.extras import require
from loom.weaver.views import CoursePoint, GoodputRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes


COLOURS = {
    "compute": "#2e9e5b",
    "lost": "#c0392b",
    "checkpoint": "#3b7dd8",
    "waiting": "#e5c043",
    "detection": "#8e44ad",
    "respawn": "#e67e22",
    "idle": "#c8ccd0",
}
MORE_COLOURS = ("#16a3b8", "#7f6b4f", "#d977b0", "#5b6770")
"""For the reasons that a training names in addition."""

BARS = 120  # bars in a plot at most; a bar is the mean over its time


def save_plot(record: GoodputRecord, path: str | Path) -> Path:
    """Write a PNG: the share of each reason over time as stacked bars, deaths as lines, and the total as one bar.

    Raises:
        MissingDependency: matplotlib is not installed.
    """
    require({"matplotlib": "matplotlib"}, "a plot of goodput", "plot")
    from matplotlib.figure import Figure  # pyplot could open a window, and disturb a program's own plots

    figure = Figure(figsize=(11, 5), layout="constrained")
    over_time, in_all = figure.subplots(1, 2, width_ratios=[12, 1], sharey=True)
    named = sorted(set(record.seconds) - set(REASONS))
    reasons = [*REASONS[:-1], *named, REASONS[-1]]
    colours = {**COLOURS, **dict(zip(named, itertools.cycle(MORE_COLOURS), strict=False))}
    _draw_timeline(over_time, record, reasons, colours)
    _draw_faults(over_time, record)
    below = 0.0
    for reason in reasons:
        in_all.bar(0, 100 * record.share(reason), bottom=below, color=colours[reason])
        below += 100 * record.share(reason)
    in_all.set(xticks=[], xlabel="in all")
    good = "no time yet" if record.ratio is None else f"{100 * record.ratio:.1f} %"
    deaths = f"{len(record.faults)} death" + ("" if len(record.faults) == 1 else "s")
    figure.suptitle(f"Goodput of {record.job}: {good}; {deaths}", parse_math=False)
    used = [reason for reason in reasons if record.seconds.get(reason, 0.0) > 0]
    labels = [f"{reason} ({100 * record.share(reason):.1f} %)" for reason in used]
    marks = [over_time.bar(0, 0, color=colours[reason]) for reason in used]
    figure.legend(marks, labels, loc="outside lower center", ncols=4)
    path = Path(path)
    figure.savefig(path, format="png", dpi=120)
    return path


def _draw_timeline(axes: Axes, record: GoodputRecord, reasons: Sequence[str], colours: dict[str, str]) -> None:
    points = _at_most(record.course, BARS + 1)
    for before, after in itertools.pairwise(points):
        spent = {reason: _grown(reason, before, after) for reason in reasons}
        whole = sum(spent.values())
        begin, end = before.time - record.since, after.time - record.since
        below = 0.0
        for reason in reasons if whole > 0 else ():
            share = 100 * spent[reason] / whole
            axes.bar(begin, share, end - begin, bottom=below, color=colours[reason], align="edge")
            below += share
    axes.set(xlabel="seconds since the beginning", ylabel="share of the replicas' time (%)", ylim=(0, 100))
    axes.set_xlim(0, max(record.until - record.since, 1e-3))


def _draw_faults(axes: Any, record: GoodputRecord) -> None:
    for fault in record.faults:
        axes.axvline(fault.time - record.since, color="black", linewidth=1, linestyle=":")
        if fault.stepped is not None:
            axes.axvspan(fault.time - record.since, fault.stepped - record.since, color="black", alpha=0.12, lw=0)


def _grown(reason: str, before: CoursePoint, after: CoursePoint) -> float:
    # The sum falls when a process that was taken for dead reconnects and gets its time back.
    return max(0.0, after.seconds.get(reason, 0.0) - before.seconds.get(reason, 0.0))


def _at_most(points: Sequence[CoursePoint], count: int) -> Sequence[CoursePoint]:
    if len(points) <= count:
        return points
    return [points[round(slot * (len(points) - 1) / (count - 1))] for slot in range(count)]
