"""Classes and functions that are no actors; they travel by value, and Kubetorch's pod server imports them."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Generator, Iterator
from typing import Any

from tests.support.actors import NeedsCluster


class OutOfStock(Exception):
    """Raised by `Shop.sell`."""


class Shop:
    """Has a stock; its methods are ``def``."""

    opening = "9:00"

    def __init__(self, stock: int = 0) -> None:
        if stock < 0:
            raise ValueError(f"a stock of {stock}")
        self.stock = stock
        self._closed = 0

    def buy(self, amount: int) -> int:
        self.stock += amount
        return self.stock

    def sell(self, amount: int, *, price: float = 1.0) -> float:
        if amount > self.stock:
            raise OutOfStock(f"{amount} wanted, {self.stock} there")
        self.stock -= amount
        return amount * price

    def divide(self, by: int) -> float:
        return self.stock / by

    def pid(self) -> int:
        return os.getpid()

    def echo(self, value: Any) -> Any:
        return value

    def wait(self, timeout: float) -> float:
        """Has a parameter that the caller's own keyword is called, too."""
        return timeout

    def block(self) -> None:
        threading.Event().wait()

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def fail_strangely(self, laptop: int) -> None:
        raise NeedsCluster(laptop)

    def items(self) -> Iterator[int]:
        yield from range(self.stock)

    def hidden_generator(self) -> Any:
        return (number for number in range(self.stock))

    def count(self, to: int, then: Exception | None = None) -> Generator[int, None, str]:
        """Yields numbers, and then raises, if it is given something to raise."""
        try:
            yield from range(to)
        except GeneratorExit:
            self._closed += 1
            raise
        if then is not None:
            raise then
        return "all"

    def count_after(self, path: str, to: int) -> Iterator[int]:
        """Yields nothing before there is a file."""
        while not os.path.exists(path):
            time.sleep(0.01)
        yield from range(to)

    def closed(self) -> int:
        """The number of `count` that were closed before they were over."""
        return self._closed

    def visit(self, other: Any) -> Any:
        """Calls another remote object from inside the cluster."""
        return other.buy(100)

    @staticmethod
    def double(number: int) -> int:
        return 2 * number

    @classmethod
    def called(cls) -> str:
        return cls.__name__

    @property
    def size(self) -> int:
        return self.stock

    def _secret(self) -> int:
        return 42


class AsyncShop(Shop):
    """Has methods of both kinds."""

    async def count_slowly(self, to: int) -> AsyncIterator[int]:
        for number in range(to):
            await asyncio.sleep(0)
            yield number

    async def order(self, amount: int) -> int:
        await asyncio.sleep(0)
        return self.buy(amount)

    async def refuse(self) -> None:
        raise OutOfStock("closed")


class Takes:
    """Has a method of a name that every remote object has."""

    def teardown(self) -> None: ...


def power(base: float, exponent: float = 2) -> float:
    return base**exponent


async def later(value: int) -> int:
    await asyncio.sleep(0)
    return value + 1
