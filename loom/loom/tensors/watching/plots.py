"""Watched tensors as HTML for notebooks: small drawings without scripts, readable in light and dark themes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from loom.tensors.watching.summaries import Distribution, History, Summary, coarser

POINTS = 120
"""Points of a line."""
BARS = 64
"""Bars of a histogram at most."""
WIDTH, HEIGHT = 240, 48

_SMALL = "opacity:.75;font-size:90%"
_ROW = "display:flex;flex-wrap:wrap;align-items:end;gap:4px 16px;margin:2px 0"
_CELL = f"width:{WIDTH}px"


def watched(name: str, history: History) -> str:
    """Return the norms over the steps, and the newest histograms, of a weight and of its gradient."""
    head = f"<b>{escape(name)}</b>"
    trouble = "" if not history.trouble else sentence(f"The newest gradient was not summarized: {history.trouble}")
    if not history.summaries:
        return f'<div style="margin:6px 0">{head}{sentence("No gradient was summarized yet.")}{trouble}</div>'
    newest = history.summaries[-1]
    weight = _tensor("weight", newest.weight, [(each.step, each.weight.norm) for each in history.summaries])
    grad = _tensor("gradient", newest.grad, [(each.step, each.grad.norm) for each in history.summaries])
    return f'<div style="margin:6px 0">{head} {_steps(newest, history)}{trouble}{weight}{grad}</div>'


def sentence(text: str) -> str:
    """Return a line of text."""
    return f'<div style="{_SMALL}">{escape(text)}</div>'


def line(points: Sequence[tuple[float, float]], label: str) -> str:
    """Return a drawing of a line. Points that are not finite are left out."""
    points = [each for each in points if math.isfinite(each[1])]
    if not points:
        return ""
    (left, _), (right, _) = points[0], points[-1]
    low, high = min(y for _, y in points), max(y for _, y in points)
    across, up = WIDTH / ((right - left) or 1), (HEIGHT - 4) / ((high - low) or 1)
    path = " ".join(f"{(x - left) * across:.1f},{HEIGHT - 2 - (y - low) * up:.1f}" for x, y in points)
    return _svg(f'<polyline points="{path}" fill="none" stroke="currentColor" stroke-width="1.5"/>', label)


def bars(counts: Sequence[int], label: str) -> str:
    """Return a drawing of a histogram."""
    counts = coarser(counts, BARS)
    wide, most = WIDTH / len(counts), max(counts) or 1
    path = "".join(
        f"M{at * wide:.1f} {HEIGHT}v{-HEIGHT * count / most:.1f}h{wide * 0.9:.1f}V{HEIGHT}z"
        for at, count in enumerate(counts)
        if count
    )
    return _svg(f'<path d="{path}" fill="currentColor"/>', label)


def _steps(newest: Summary, history: History) -> str:
    behind = history.gradients - newest.step
    more = f"; {behind} since" if behind else ""
    return f'<span style="{_SMALL}">after {newest.step} gradients{more}</span>'


def _tensor(what: str, newest: Distribution, norms: Sequence[tuple[float, float]]) -> str:
    numbers = f"mean {newest.mean:.4g}, std {newest.std:.4g}, from {newest.min:.4g} to {newest.max:.4g}"
    if newest.nonfinite:
        numbers += f", {newest.nonfinite:.3%} not finite"
    histogram = "" if newest.histogram is None else bars(newest.histogram, f"histogram of the {what}")
    norm = f"{what}: norm {newest.norm:.4g}"
    return (
        f'<div style="{_ROW}">'
        f'<div style="{_CELL}">{sentence(norm)}{line(norms, f"norm of the {what} over the steps")}</div>'
        f'<div style="{_CELL}">{sentence(numbers)}{histogram}</div></div>'
    )


def _svg(inside: str, label: str) -> str:
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(label)}">{inside}</svg>'
    )
