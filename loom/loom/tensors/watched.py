"""A worker's records of a watched weight and its gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

MOST_SUMMARIES = 1000
"""Summaries of a name that a worker keeps, the newest."""
MOST_HISTOGRAMS = 100
"""Those of them that keep their histograms, the newest."""
MOST_NAMES = 1000
"""Names that a worker keeps; beyond it, the one that was not used for longest goes."""


class Distribution(NamedTuple):
    """The elements of a tensor at one step. All but ``nonfinite`` is of the finite ones, and NaN if there are none.

    Of complex elements it is the distribution of their absolute values.
    """

    norm: float
    """The L2 norm."""
    mean: float
    std: float
    """The standard deviation as `torch.std` computes it; 0 for one element."""
    min: float
    max: float
    nonfinite: float
    """The share of elements that are infinite or NaN, from 0 to 1."""
    histogram: Sequence[int] | None
    """The number of elements in each of the bins, which have the same width, from ``min`` to ``max``.

    None in all summaries but the newest `MOST_HISTOGRAMS`."""


class Summary(NamedTuple):
    """A weight and its gradient when a gradient arrived."""

    step: int
    """The number of gradients under this name, with this one."""
    time: float
    """When the worker computed it, in seconds since the epoch, by the worker's clock."""
    weight: Distribution
    grad: Distribution


class Wanted(NamedTuple):
    """A question to a worker."""

    names: Sequence[str] | None = None
    """All if None."""
    most: int = MOST_SUMMARIES
    """Summaries of each name: of more, some that lie evenly, the newest among them."""
    histograms: int = MOST_HISTOGRAMS
    """Those of them that come with histograms, the newest."""
    limit: int = MOST_NAMES
    """Names: of more, the first ones."""
    wait: bool = True
    """True if the worker waits for what its device still computes."""


class History(NamedTuple):
    """A worker's records of a name."""

    gradients: int
    summaries: list[Summary]
    """The newest last."""
    trouble: str
    """Why the newest gradient could not be summarized; empty if it was."""


def coarser(counts: Sequence[int], most: int) -> list[int]:
    """Return a histogram with at most so many bins: neighbours are added up."""
    width = math.ceil(len(counts) / most) or 1
    return [sum(counts[at : at + width]) for at in range(0, len(counts), width)]
