"""`TensorWatch`: norms and histograms of weights and gradients, which the workers keep while a program trains."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from loom.errors import LoomError, WrongArguments, operation_failed
from loom.tensors.nn.module import Module
from loom.tensors.tensor import Tensor
from loom.tensors.watched import MOST_SUMMARIES, Distribution, History, Summary, Wanted, coarser

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


LONGEST_NAME = 200
MOST_BINS = 1024
PLOTTED = 8
"""Tensors of a module that a notebook shows."""


class TensorWatch:
    """A tensor that is watched, by its name. Nothing waits for it but its reading, which is one round trip.

    Iterating gives the summaries, the oldest first.
    """

    def __init__(self, home: Any, name: str) -> None:
        self._home = home
        self.name = name
        self.every = 1
        """Of how many gradients one is summarized."""
        self.bins = 64
        self._leaf: weakref.ref[Tensor] | None = None

    def __repr__(self) -> str:
        leaf = None if self._leaf is None else self._leaf()
        what = "of no tensor now" if leaf is None else f"every={self.every}, bins={self.bins}, of {leaf.meta}"
        return f"<Watch {self.name!r}, {what}>"

    @property
    def history(self) -> list[Summary]:
        """The newest `MOST_SUMMARIES` summaries, the newest last.

        Raises:
            OperationFailed: the newest gradient could not be summarized.
        """
        return _read(self._home, [self.name])[self.name]

    @property
    def newest(self) -> Summary | None:
        """The newest summary; None if there is none. Raises what `history` raises."""
        found = _read(self._home, [self.name], most=1)[self.name]
        return found[-1] if found else None

    def __iter__(self) -> Iterator[Summary]:
        return iter(self.history)

    def stop(self) -> None:
        """Watch no more. The summaries stay."""
        self._home._watching.drop(self)

    def clear(self) -> None:
        """Forget the summaries, and count gradients from 0 again."""
        self._home._command(".watch_clear", (), self.name)

    def _repr_html_(self) -> str:
        return _html(self._home, [self.name])

    def begin(self, leaf: Tensor) -> None:
        """Let the workers summarize a leaf whenever a gradient is added to it."""
        self._leaf = weakref.ref(leaf)
        self._home._command(".watch", (leaf,), self.name, self.bins, self.every)


class Watches(Mapping[str, TensorWatch]):
    """Watched tensors by name: the parameters of a module, or all that a mesh has."""

    def __init__(self, home: Any, watches: Mapping[str, TensorWatch]) -> None:
        self._home = home
        self._watches = dict(watches)

    def __getitem__(self, name: str) -> TensorWatch:
        return self._watches[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._watches)

    def __len__(self) -> int:
        return len(self._watches)

    def __repr__(self) -> str:
        return f"<Watches {', '.join(self._watches) or 'of nothing'}>"

    @property
    def history(self) -> dict[str, list[Summary]]:
        """The summaries of all by name, in one round trip. Raises what `TensorWatch.history` raises."""
        return _read(self._home, list(self))

    def stop(self) -> None:
        """Watch none of them any more. The summaries stay."""
        for each in self.values():
            each.stop()

    def clear(self) -> None:
        """Forget the summaries of all."""
        for each in self.values():
            each.clear()

    def _repr_html_(self) -> str:
        return _html(self._home, list(self))


class Watching:
    """The watched leaves of one home."""

    def __init__(self, home: Any) -> None:
        self._home = home
        self._named: dict[str, TensorWatch] = {}

    def watch(self, target: Any, name: str, every: int, bins: int) -> TensorWatch | Watches:
        """Watch a leaf, or the parameters of a module: see `Tensors.watch`."""
        _check_count("every", every, None)
        _check_count("bins", bins, MOST_BINS)
        _check_name(name)
        leaves: dict[str, Tensor]
        if isinstance(target, Module):
            leaves = {f"{name}.{key}": each for key, each in target.named_parameters() if each.requires_grad}
            if not leaves:
                raise WrongArguments(f"no parameter of the {type(target).__name__} requires a gradient")
        elif isinstance(target, Tensor):
            leaves = {name: target}
        else:
            raise WrongArguments(f"watch takes a tensor or a module, not {type(target).__name__}")
        for key, leaf in leaves.items():
            self._check(leaf, key)
        watches = {key: self._begin(leaf, key, every, bins) for key, leaf in leaves.items()}
        return Watches(self._home, watches) if isinstance(target, Module) else watches[name]

    def all(self) -> Watches:
        """Return what is watched, or was, by this program or an earlier one: see `Tensors.watched`."""
        found = self._home._dispatcher.watched(Wanted(most=0))
        names = sorted({*found, *self._named})
        return Watches(self._home, {name: self._named.get(name) or TensorWatch(self._home, name) for name in names})

    def drop(self, watch: TensorWatch) -> None:
        """Watch a name's leaf no more."""
        self._named.pop(watch.name, None)
        self._part(watch)

    def again(self) -> None:
        """Watch the same in new workers."""
        for watch in self._named.values():
            if watch._leaf is not None and (leaf := watch._leaf()) is not None:
                watch.begin(leaf)

    def _begin(self, leaf: Tensor, name: str, every: int, bins: int) -> TensorWatch:
        watch = self._named.get(name)
        if watch is None:
            watch = self._named[name] = TensorWatch(self._home, name)
        if watch._leaf is not None and watch._leaf() is leaf and (watch.every, watch.bins) == (every, bins):
            return watch
        self._part(watch)
        for other in [each for each in self._named.values() if each._leaf is not None and each._leaf() is leaf]:
            self.drop(other)
        watch.every, watch.bins = every, bins
        self._named[name] = watch
        watch.begin(leaf)
        return watch

    def _part(self, watch: TensorWatch) -> None:
        """Take a watch from its leaf."""
        if watch._leaf is not None:
            watch._leaf = None
            self._home._command(".unwatch", (), watch.name)

    def _check(self, leaf: Tensor, name: str) -> None:
        _check_name(name)
        if leaf._home is not self._home:
            raise WrongArguments(f"{name!r} is a tensor of another mesh: watch it with its own lt.watch")
        if not leaf.requires_grad:
            raise WrongArguments(f"{name!r} does not require a gradient: watch it after x.requires_grad_()")
        if not leaf.is_leaf:
            raise WrongArguments(
                f"{name!r} was computed, and keeps no gradient: watch the leaves it is computed of"
            )


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= LONGEST_NAME:
        raise WrongArguments(f"a name has 1 to {LONGEST_NAME} printable characters, not {name!r:.80}")


def _check_count(what: str, count: Any, most: int | None) -> None:
    if type(count) is not int or count < 1 or (most is not None and count > most):
        limit = "1 or more" if most is None else f"from 1 to {most}"
        raise WrongArguments(f"{what} is a whole number, {limit}, not {count!r:.80}")


def _read(home: Any, names: list[str], most: int = MOST_SUMMARIES) -> dict[str, list[Summary]]:
    found = home._dispatcher.watched(Wanted(names, most))
    for name, history in found.items():
        if history.trouble:
            raise operation_failed(f"the newest gradient of {name!r} was not summarized: {history.trouble}")
    return {name: found[name].summaries if name in found else [] for name in names}


def _html(home: Any, names: list[str]) -> str:
    """Return the newest summaries as HTML; what they cannot be had for if they cannot."""
    shown = names[:PLOTTED]
    try:
        found = home._dispatcher.watched(Wanted(shown, POINTS, 1))
    except LoomError as error:
        return sentence(f"The summaries of {', '.join(shown)} cannot be read: {error}")
    parts = [watched(name, found.get(name) or History(0, [], "")) for name in shown]
    if len(names) > PLOTTED:
        parts.append(sentence(f"… and {len(names) - PLOTTED} more"))
    return "".join(parts)
