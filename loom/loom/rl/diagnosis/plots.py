"""Plots of an analysis, as PNG files. They need matplotlib (extra ``plot``).

A module of its own, because it needs matplotlib, and the other files of an analysis do not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from loom.rl.diagnosis.result import Analysis

OVER_TIME = {
    "updates.png": ("Updates of weights", ("queue_ms", "rpc_ms")),
    "checkpoints.png": ("Checkpoints", ("wait_ms", "write_ms")),
    "generation.png": ("Generation", ("dur_ms",)),
    "rollouts.png": ("Rollouts", ("trunc_pct", "staleness")),
    "training.png": ("Training", ("train_ms", "batch_wait_ms")),
}
"""The title and the metrics of each plot over the events of a run."""
COLOURS = ("#3b7dd8", "#e67e22", "#c0392b", "#2e9e5b", "#c8ccd0")


def draw(analysis: Analysis, folder: Path) -> list[str]:
    """Write the plots that have something to show; return their names."""
    names = []
    for name, (title, metrics) in OVER_TIME.items():
        known = [metric for metric in metrics if metric in analysis.metrics]
        if not known:
            continue
        figure, axes = _figure(title)
        for metric, colour in zip(known, COLOURS, strict=False):
            points = analysis.measured.metrics[metric].series.points
            places = [index * points.stride for index in range(len(points.values))]
            axes.plot(places, points.values, ".-", linewidth=0.9, markersize=3, color=colour, label=metric)
        axes.set(xlabel="event", ylabel=", ".join(known))
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper right", fontsize="small")
        figure.savefig(folder / name, dpi=110)
        names.append(name)
    if analysis.attribution.loop.wall_ms:
        _draw_step(analysis, folder / "step.png")
        names.insert(0, "step.png")
    return names


def _draw_step(analysis: Analysis, path: Path) -> None:
    loop = analysis.attribution.loop
    parts = {
        "generation": loop.batch_ms,
        "waiting for a checkpoint": loop.wait_ms,
        "delay of the update": loop.queue_ms,
        "loading of weights": loop.rpc_ms,
        "not accounted for": loop.other_ms,
    }
    figure, axes = _figure(f"A step of the orchestrator: {loop.wall_ms:,.0f} ms", height=2.2)
    left = 0.0
    for colour, (name, value) in zip(COLOURS, parts.items(), strict=True):
        axes.barh(0, value, left=left, color=colour, label=f"{name} ({value / loop.wall_ms:.0%})")
        left += value
    axes.set(yticks=[], xlabel="ms")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.35), ncols=3, fontsize="small")
    figure.savefig(path, dpi=110)


def _figure(title: str, height: float = 3.5) -> tuple[Any, Any]:
    figure = Figure(figsize=(9, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_title(title, loc="left")
    return figure, axes
