"""A plot of a run: the loss and the steps of each replica over time, with the faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loom.chaos.runs.run import Run

METRIC = "loss"


def draw(run: Run, path: Path) -> None:
    """Draw a run into a PNG file. This needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    loss, steps = figure.subplots(2, 1, sharex=True)
    for replica in run.watched():
        points = run.observer.history(replica.id, METRIC, run.began)
        times = [point.time - run.began for point in points]
        loss.plot(times, [point.value for point in points], linewidth=0.9, label=replica.id)
        steps.plot(times, [point.step for point in points], linewidth=0.9, label=replica.id)
    for axes in (loss, steps):
        _draw_faults(run, axes)
    loss.set_ylabel(METRIC)
    loss.set_title(f"{run.plan.name}, seed {run.plan.seed}", loc="left")
    loss.legend(loc="upper right", fontsize="small")
    steps.set_ylabel("step")
    steps.set_xlabel("seconds")
    figure.savefig(path, dpi=110)


def _draw_faults(run: Run, axes: Any) -> None:
    for struck in run.struck:
        at = struck.at - run.began
        until = (struck.over or struck.at) + (struck.recovered or 0.0) - run.began
        axes.axvspan(at, max(until, at), color="tab:red", alpha=0.12, linewidth=0)
        axes.axvline(at, color="tab:red", linewidth=0.8)
        axes.annotate(
            struck.planned.fault, (at, 1.0), xycoords=("data", "axes fraction"), rotation=90, fontsize=7, va="top"
        )
