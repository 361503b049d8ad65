"""The worker's half of `Tensors.watch`: it summarizes weights and gradients, and keeps the newest by name."""

from __future__ import annotations

import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from loom.errors import describe_error
from loom.tensors.sending.encoding import Failure
from loom.tensors.watched import (
    MOST_HISTOGRAMS,
    MOST_NAMES,
    MOST_SUMMARIES,
    Distribution,
    History,
    Summary,
    Wanted,
)

_SUMS = 5
"""Numbers of the finite elements before a histogram: minimum, maximum, how many, their sum, and that of squares."""

_ON_CPU, _ON_GPU = 1 << 18, 1 << 24
"""Elements that are summarized at once: so many as a cache has; so many as a float32 counts without a gap."""

_ROUNDING = 1e-14
"""The share of a sum of squares below which a difference of two is an error of rounding."""


class _Piece(NamedTuple):
    """Some elements of a tensor, as real numbers."""

    values: torch.Tensor
    finite: torch.Tensor | None
    """The mask of the finite ones; None if there are no others."""
    sums: torch.Tensor


class _Taken(NamedTuple):
    """A summary whose numbers a device may still be computing."""

    step: int
    time: float
    sizes: tuple[int, int]
    """The elements of the weight and of the gradient."""
    numbers: torch.Tensor
    """On the host; of both tensors, one after the other."""
    event: Any
    """When the numbers are there; None if they are."""


class _Series:
    """The summaries of one name, the newest last."""

    def __init__(self) -> None:
        self.gradients = 0
        self.trouble = ""
        self._summaries: deque[Summary] = deque(maxlen=MOST_SUMMARIES)
        self._taken: deque[_Taken] = deque()

    def add(self, grad: Any, weight: Any, bins: int) -> None:
        now = time.time()
        numbers, event = _on_host(torch.cat([_numbers(weight, bins), _numbers(grad, bins)]))
        self._taken.append(_Taken(self.gradients, now, (weight.numel(), grad.numel()), numbers, event))
        self.trouble = ""
        self.settle(wait=False)

    def settle(self, wait: bool) -> None:
        """Make summaries of the numbers that are there; with ``wait``, of all."""
        taken, summaries = self._taken, self._summaries
        while taken and (wait or taken[0].event is None or taken[0].event.query()):
            if taken[0].event is not None:
                taken[0].event.synchronize()
            summaries.append(_summary(taken.popleft()))
            if len(summaries) > MOST_HISTOGRAMS:
                old = summaries[-MOST_HISTOGRAMS - 1]
                summaries[-MOST_HISTOGRAMS - 1] = _without_histograms(old)

    def history(self, wanted: Wanted) -> History:
        self.settle(wanted.wait)
        chosen = _spread(list(self._summaries), wanted.most)
        plain = len(chosen) - wanted.histograms
        found = [_without_histograms(each) if at < plain else each for at, each in enumerate(chosen)]
        return History(self.gradients, found, self.trouble)


class Watched:
    """The summaries of one worker, by name. Those of a program stay for the next one."""

    def __init__(self) -> None:
        self._series: dict[str, _Series] = {}
        """The one that was used last is the last."""

    def take(self, grad: Any, weight: Any, name: str, bins: int, every: int) -> Exception | None:
        """Count a gradient; summarize it and its weight if the number comes to a multiple of ``every``.

        An error is the ``trouble`` of the name, and returned: the gradient is as good as it was.
        """
        series = self._of(name)
        series.gradients += 1
        if series.gradients % every:
            return None
        if isinstance(grad, Failure):
            series.trouble = grad.text
            return None
        try:
            series.add(grad, weight, bins)
        except Exception as error:  # noqa: BLE001 - whoever asks for the history is told; the training goes on
            series.trouble = describe_error(error)
            return error
        return None

    def clear(self, name: str) -> None:
        """Forget a name's summaries."""
        self._series.pop(name, None)

    def newest(self, wanted: Wanted) -> tuple[dict[str, History], int]:
        """Return summaries by name, the newest last, and how many names are left out."""
        there = sorted(self._series) if wanted.names is None else wanted.names
        known = [name for name in there if name in self._series]
        found = {name: self._series[name].history(wanted) for name in known[: wanted.limit]}
        return found, len(known) - len(found)

    def _of(self, name: str) -> _Series:
        series = self._series.pop(name) if name in self._series else _Series()
        self._series[name] = series
        if len(self._series) > MOST_NAMES:
            del self._series[next(iter(self._series))]
        return series


def watch(values: Any, leaf: torch.Tensor, name: str, bins: int, every: int) -> None:
    """Summarize a weight and its gradient whenever one is added to it: see `Watched.take`."""
    unwatch(values, name)
    values.handles[name] = leaf.register_post_accumulate_grad_hook(lambda leaf: arrived(values, leaf, leaf.grad))
    leaf.loom_watch = name, bins, every


def arrived(values: Any, leaf: Any, grad: Any) -> None:
    """Take in a gradient of a weight, or why there is none."""
    error = values.watched.take(grad, leaf, *leaf.loom_watch)
    if error is not None and values.sharding is not None:
        values.sharding.failed(error)


def unwatch(values: Any, name: str) -> None:
    """Summarize no more under a name."""
    if (handle := values.handles.pop(name, None)) is not None:
        handle.remove()


def watch_clear(values: Any, name: str) -> None:
    """Forget a name's summaries."""
    values.watched.clear(name)


def _numbers(tensor: Any, bins: int) -> torch.Tensor:
    """Return the sums of a tensor's finite elements, and its histogram, on its device, without waiting for that."""
    part, together = _part(tensor)
    pieces = [_piece(each) for each in part.detach().flatten().split(_ON_GPU if part.is_cuda else _ON_CPU)]
    return _of_pieces(pieces, bins, together)


def _of_pieces(pieces: Sequence[_Piece], bins: int, together: Callable[[Any, str], Any]) -> torch.Tensor:
    sums = torch.stack([each.sums for each in pieces])
    low, high = together(sums[:, :1].amin(0), "min"), together(sums[:, 1:2].amax(0), "max")
    counts = torch.stack([_counts(each, low, high, bins) for each in pieces]).sum(0)
    return torch.cat([low, high, together(sums[:, 2:].sum(0), "sum"), together(counts, "sum")])


def _piece(values: torch.Tensor) -> _Piece:
    if values.is_complex():
        values = values.abs()
    if values.dtype not in (torch.float32, torch.float64):
        values = values.float()
    return _masked(values) if values.is_cuda else _finite(values)


def _finite(values: torch.Tensor) -> _Piece:
    """Look at values on the CPU, which has computed what was asked of it."""
    if not values.numel():
        return _Piece(values, None, torch.tensor([math.inf, -math.inf, 0, 0, 0], dtype=torch.float64))
    low, high = (each.item() for each in values.aminmax())
    if not (math.isfinite(low) and math.isfinite(high)):
        return _finite(values[values.isfinite()])
    total, norm = values.sum(dtype=torch.float64), torch.linalg.vector_norm(values, dtype=torch.float64)
    sums = [low, high, values.numel(), total.item(), norm.item() * norm.item()]
    return _Piece(values, None, torch.tensor(sums, dtype=torch.float64))


def _masked(values: torch.Tensor) -> _Piece:
    """Look at values on a GPU, which is asked for nothing that would wait for it."""
    if not values.numel():
        return _finite(values)._replace(sums=_finite(values).sums.to(values.device))
    finite = values.isfinite()
    low, high = values.where(finite, math.inf).amin(), values.where(finite, -math.inf).amax()
    plain = values.where(finite, 0.0)
    total, norm = plain.sum(dtype=torch.float64), torch.linalg.vector_norm(plain, dtype=torch.float64)
    return _Piece(plain, finite, torch.stack([low.double(), high.double(), finite.sum(), total, norm.square()]))


def _counts(piece: _Piece, low: torch.Tensor, high: torch.Tensor, bins: int) -> torch.Tensor:
    """Return how many finite values are in each bin."""
    values, finite, _ = piece
    # Halves, because the distance of two finite numbers may be infinite.
    if finite is None:
        begin = low.item() / 2
        places = values.mul(0.5).sub_(begin).div_(high.item() / 2 - begin or 1.0).mul_(bins)
        return torch.bincount(places.int().clamp_(0, bins - 1), minlength=bins)
    low = low.to(values.dtype) / 2
    span = high.to(values.dtype) / 2 - low
    places = values.mul(0.5).sub_(low).div_(span.where(span > 0, 1.0)).where(finite, -1.0)
    return torch.histc(places, bins, 0, 1)


def _part(tensor: Any) -> tuple[Any, Callable[[Any, str], Any]]:
    """Return this process's part of a tensor, and what makes one value of those that all processes have."""
    if not hasattr(tensor, "to_local"):
        return tensor, lambda value, how: value
    from torch.distributed.tensor import DTensor, Partial, Replicate

    cut = [Replicate() if each.is_partial() else each for each in tensor.placements]
    tensor = tensor.redistribute(placements=cut)
    spread = [Partial if each.is_shard() else None for each in cut]

    def together(value: Any, how: str) -> Any:
        placements = [Replicate() if each is None else each(how) for each in spread]
        return DTensor.from_local(value, tensor.device_mesh, placements, run_check=False).full_tensor()

    return tensor.to_local(), together


def _on_host(numbers: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Return numbers that are copied to the host, and the event when they are there; None if they are."""
    if not numbers.is_cuda:
        return numbers, None
    copied = numbers.to("cpu", non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(numbers.device))
    return copied, event


def _summary(taken: _Taken) -> Summary:
    half = len(taken.numbers) // 2
    numbers = taken.numbers.tolist()
    weight, grad = _distribution(numbers[:half], taken.sizes[0]), _distribution(numbers[half:], taken.sizes[1])
    return Summary(taken.step, taken.time, weight, grad)


def _distribution(numbers: Sequence[float], size: int) -> Distribution:
    low, high, many, total, squares = numbers[:_SUMS]
    histogram = array("Q", map(int, numbers[_SUMS:]))
    if not many:
        none = math.nan
        return Distribution(none, none, none, none, none, 1.0 if size else 0.0, histogram)
    around = squares - total * total / many
    std = math.sqrt(around / max(many - 1, 1)) if around > squares * _ROUNDING else 0.0
    return Distribution(math.sqrt(squares), total / many, std, low, high, 1 - many / size, histogram)


def _without_histograms(summary: Summary) -> Summary:
    if summary.weight.histogram is None:
        return summary
    weight, grad = summary.weight._replace(histogram=None), summary.grad._replace(histogram=None)
    return summary._replace(weight=weight, grad=grad)


def _spread(summaries: list[Summary], most: int) -> list[Summary]:
    """Return at most so many that lie evenly, the last one among them."""
    last = len(summaries) - 1
    if last < most:
        return summaries
    return [summaries[last - (last * back) // max(most - 1, 1)] for back in range(most - 1, -1, -1)]
