"""A module that imports another one, which imports it."""

from __future__ import annotations

import threading

from tests.support.by_value import baskets

GUARD = threading.RLock()


class Tree:
    """Bears the apples of a basket of the other module."""

    def __init__(self, apples: int) -> None:
        self.apples = apples

    def basket(self) -> baskets.Basket:
        return baskets.Basket(self.apples)


def picked(count: int) -> int:
    return count if baskets.fits(count) else -1


def picked_alone(count: int) -> int:
    return count if baskets.fits_alone(count) else -1
