"""`DataFeed`: the items of a data loader, step by step, so that a step that is made again gets the same ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from loom.errors import WrongArguments


class DataFeed:
    """The items of a loader with a state, such as torchdata's ``StatefulDataLoader``.

    When the loader ends, it begins again: the next epoch.

    Raises:
        WrongArguments: the loader has no state.
    """

    def __init__(self, loader: Any) -> None:
        if not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
            raise WrongArguments(
                f"a {type(loader).__name__} has no state_dict and load_state_dict, by which a training goes on "
                "with the next item: give one like torchdata's StatefulDataLoader"
            )
        self._loader = loader
        self._iterator: Iterator[Any] | None = None
        self._step = -1  # the newest step that has items
        self._items: list[Any] = []  # of that step
        self._before: Mapping[str, Any] = {}  # the loader's state before that step

    def item(self, step: int, part: int) -> Any:
        """Return an item of a step, the same one each time.

        Raises:
            WrongArguments: the loader has no items at all.
        """
        if step != self._step:
            self._before, self._step, self._items = self._state(), step, []
        while len(self._items) <= part:
            self._items.append(self._next())
        return self._items[part]

    def state(self, step: int) -> Mapping[str, Any]:
        """Return the state from which the loader goes on with the items of a step that is not applied."""
        return self._before if self._step == step else self._state()

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of another process, or an earlier one."""
        self._loader.load_state_dict(state)
        self._iterator, self._step = None, -1

    def _state(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = copy.deepcopy(self._loader.state_dict())  # a loader may go on with the same dict
        return found

    def _next(self) -> Any:
        for _ in range(2):
            if self._iterator is None:
                self._iterator = iter(self._loader)
            try:
                return next(self._iterator)
            except StopIteration:
                self._iterator = None
        raise WrongArguments(f"the data loader, a {type(self._loader).__name__}, has no items")
