"""A curve, drawn with text: braille patterns, of which each has two by four dots."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

__all__ = ["plot_lines"]

WIDTH, HEIGHT = 72, 16
"""Characters of the drawing itself."""

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each dot of a pattern, by row and column (Unicode, block Braille Patterns)."""

_EMPTY = 0x2800


def plot_lines(
    title: str,
    points: Sequence[tuple[int | None, float, float]],
    width: int = WIDTH,
    height: int = HEIGHT,
) -> Iterator[str]:
    """The lines of a drawing.

    Args:
        title: above it.
        points: step, time in seconds, value; the oldest first. Values that are no number are left out, and counted.
        width: of the drawing, in characters, without its axis.
        height: likewise.
    """
    good = [point for point in points if math.isfinite(point[2])]
    left_out = len(points) - len(good)
    yield title + (f"  ({left_out} values are no numbers)" if left_out else "")
    if not good:
        yield "nothing to draw"
        return
    by_step = all(step is not None for step, _, _ in good)
    across = [float(step or 0) if by_step else at - good[0][1] for step, at, _ in good]
    values = [value for _, _, value in good]
    low, high = min(values), max(values)
    if low == high:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    drawn = _draw(across, values, low, high, width, height)
    labels = [f"{high - (high - low) * row / (height - 1):.4g}" for row in range(height)]
    margin = max(map(len, labels))
    for row, line in enumerate(drawn):
        label = labels[row] if row % 5 == 0 or row == height - 1 else ""
        yield f"{label:>{margin}} ┤{line}".rstrip()
    yield f"{'':>{margin}} └{'─' * width}"
    begin, end = (f"{across[0]:g}", f"{across[-1]:g}") if by_step else ("0 s", f"{across[-1]:.1f} s")
    what = "step" if by_step else "time"
    gap = max(1, width - len(begin) - len(end) - len(what))
    yield f"{'':>{margin}}  {begin}{what:^{gap + len(what)}}{end}"


def _draw(
    across: Sequence[float], values: Sequence[float], low: float, high: float, width: int, height: int
) -> list[str]:
    columns, rows = 2 * width, 4 * height
    span = (max(across) - min(across)) or 1.0
    first = min(across)
    cells = [[0] * width for _ in range(height)]
    before: tuple[int, int] | None = None
    for place, value in zip(across, values, strict=True):
        column = round((place - first) / span * (columns - 1))
        row = round((high - value) / (high - low) * (rows - 1))
        for x, y in _line(before or (column, row), (column, row)):
            cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
        before = column, row
    return ["".join(chr(_EMPTY + bits) if bits else " " for bits in line) for line in cells]


def _line(begin: tuple[int, int], end: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """The dots from one to another."""
    (x0, y0), (x1, y1) = begin, end
    dots = max(abs(x1 - x0), abs(y1 - y0), 1)
    for dot in range(dots + 1):
        yield round(x0 + (x1 - x0) * dot / dots), round(y0 + (y1 - y0) * dot / dots)
