"""The worker's half of `Tensors.watch`: it summarizes weights and gradients, and keeps the newest by name."""

from __future__ import annotations

import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from loom.tensors.dispatch import Failure
from loom.tensors.watching.summaries import (
    MOST_HISTOGRAMS,
    MOST_NAMES,
    MOST_SUMMARIES,
    Distribution,
    History,
    Summary,
    Wanted,
)

_NUMBERS = 6
"""The numbers of a tensor before its histogram: norm, mean, std, min, max, and how many elements are finite."""

_CHUNK = 1 << 24
"""Elements up to which a float32 counts without a gap."""


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

    def take(self, grad: Any, weight: Any, name: str, bins: int, more: int, every: int) -> Exception | None:
        """Count gradients; summarize a weight and its gradient if their number comes to a multiple of ``every``.

        What goes wrong is the ``trouble`` of the name, and returned: the gradient is as good as it was.
        """
        series = self._of(name)
        before = series.gradients
        series.gradients += more
        if series.gradients // every == before // every:
            return None
        failure = next((each for each in (weight, grad) if isinstance(each, Failure)), None)
        if failure is not None:
            series.trouble = failure.text
            return None
        try:
            series.add(grad, weight, bins)
        except Exception as error:  # noqa: BLE001 - whoever asks for the history is told; the training goes on
            series.trouble = f"{type(error).__name__}: {error}"
            return error
        return None

    def count(self, name: str, more: int) -> None:
        """Count gradients that are not looked at."""
        self._of(name).gradients += more

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


def watch(values: Any, grad: Any, weight: Any, name: str, bins: int, more: int, every: int) -> None:
    """Summarize a weight and its gradient: see `Watched.take`."""
    values.watched.take(grad, weight, name, bins, more, every)


def count(values: Any, name: str, more: int) -> None:
    """Count gradients that are not looked at."""
    values.watched.count(name, more)


def clear(values: Any, name: str) -> None:
    """Forget a name's summaries."""
    values.watched.clear(name)


def _numbers(tensor: Any, bins: int) -> torch.Tensor:
    """Return the numbers of a tensor and its histogram, on its device, without waiting for that."""
    part, together = _part(tensor)
    values = part.detach().flatten()
    if values.is_complex():
        values = values.abs()
    if values.dtype not in (torch.float32, torch.float64):
        values = values.float()
    if not values.numel():
        values = values.new_full((1,), math.nan)  # which counts nowhere
    finite = values.isfinite()
    low = together(values.where(finite, math.inf).amin(), "min")
    high = together(values.where(finite, -math.inf).amax(), "max")
    values = values.where(finite, 0.0)
    norm = torch.linalg.vector_norm(values, dtype=torch.float64)
    sums = torch.stack([finite.sum(dtype=torch.float64), values.sum(dtype=torch.float64), norm.square()])
    many, total, squares = together(sums, "sum").unbind()
    mean = total / many
    deviation = ((squares - total * mean) / (many - 1).clamp(min=1)).clamp(min=0).sqrt()
    # Halves, because the distance of two finite numbers may be infinite. What is not finite counts nowhere.
    span = high / 2 - low / 2
    places = ((values / 2 - low / 2) / span.where(span > 0, 1.0)).where(finite, -1.0)
    counts = sum(torch.histc(each, bins, 0, 1).double() for each in places.split(_CHUNK))
    few = [squares.sqrt(), mean, deviation, low.double(), high.double(), many]
    return torch.cat([torch.stack(few), together(counts, "sum")])


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
    norm, mean, std, low, high, many = numbers[:_NUMBERS]
    if not many:
        norm = mean = std = low = high = math.nan
    nonfinite = 1 - many / size if size else 0.0
    return Distribution(norm, mean, std, low, high, nonfinite, array("Q", map(int, numbers[_NUMBERS:])))


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
