"""A curve drawn with text: each braille pattern has two by four dots."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

WIDTH, HEIGHT = 72, 16
"""Characters of the drawing, without its axes."""

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each dot in a pattern, by row and column (Unicode, block Braille Patterns)."""

_EMPTY = 0x2800


def plot_lines(
    title: str, points: Sequence[tuple[int | None, float, float]], width: int = WIDTH, height: int = HEIGHT
) -> Iterator[str]:
    """Yield the lines of a drawing of ``width`` by ``height`` characters plus its axes.

    Each point is a step, a time in seconds and a value; the oldest comes first.
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
    columns = _scaled(across, min(across), max(across), 2 * width - 1)
    rows = _scaled(values, high, low, 4 * height - 1)
    labels = [f"{high - (high - low) * row / (height - 1):.4g}" for row in range(height)]
    margin = max(map(len, labels))
    for row, line in enumerate(_draw(list(zip(columns, rows, strict=True)), width, height)):
        label = labels[row] if row % 5 == 0 or row == height - 1 else ""
        yield f"{label:>{margin}} ┤{line}".rstrip()
    yield f"{'':>{margin}} └{'─' * width}"
    begin, end = (f"{across[0]:g}", f"{across[-1]:g}") if by_step else ("0 s", f"{across[-1]:.1f} s")
    gap = max(1, width - len(begin) - len(end))
    yield f"{'':>{margin}}  {begin}{'step' if by_step else 'time':^{gap}}{end}"


def _scaled(values: Sequence[float], first: float, last: float, most: int) -> list[int]:
    """Return the places of values between two ends, from 0 to ``most``."""
    return [round((value - first) / ((last - first) or 1.0) * most) for value in values]


def _draw(places: list[tuple[int, int]], width: int, height: int) -> list[str]:
    """Return lines of characters with a line of dots from each place to the next."""
    cells = [[0] * width for _ in range(height)]
    for (x0, y0), (x1, y1) in itertools.pairwise([places[0], *places]):
        dots = max(abs(x1 - x0), abs(y1 - y0), 1)
        for dot in range(dots + 1):
            x, y = round(x0 + (x1 - x0) * dot / dots), round(y0 + (y1 - y0) * dot / dots)
            cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
    return ["".join(chr(_EMPTY + bits) if bits else " " for bits in line) for line in cells]
