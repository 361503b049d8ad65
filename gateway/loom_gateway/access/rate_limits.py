"""How much and how often: the gateway's limits, and counters of those that are rates."""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from loom.wire.mux import MAX_MESSAGE

__all__ = ["Limits", "RateLimit", "address_key"]

ADDRESSES = 10_000
"""Addresses that a rate is counted for at once. One that is over the limit long ago is forgotten first."""


@dataclass(frozen=True)
class Limits:
    """The limits of a gateway; 0 is none. Each can be set on its command line."""

    max_message: int = MAX_MESSAGE
    """Bytes of one message: an operation with its arguments."""
    max_sessions: int = 32
    """Sessions of one token at a time."""
    max_in_flight: int = 100_000
    """Operations of one session that have not been answered."""
    connection_rate: float = 100.0
    """WebSockets and REST requests a second from one address, after the first few seconds' worth at once."""
    login_failures: int = 20
    """Wrong tokens from one address within `login_window`."""
    login_window: float = 60.0
    """Seconds."""


class RateLimit:
    """How often something may happen at each of many addresses: a bucket of tokens for each.

    Args:
        burst: how often it may happen at once; 0: always.
        rate: how often a second it may happen from then on.
        addresses: how many are counted at once; the one that was counted longest ago makes room for a new one.
        clock: tells the time, in seconds.
    """

    def __init__(
        self,
        burst: float,
        rate: float,
        addresses: int = ADDRESSES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._burst = burst
        self._rate = rate
        self._addresses = addresses
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """What is left, and when that was."""

    def __len__(self) -> int:
        return len(self._buckets)

    def wait(self, address: str) -> float:
        """Seconds until it may happen again at an address; 0 if it may now."""
        if not self._burst:
            return 0.0
        left = self._left(address)
        return 0.0 if left >= 1 else (1 - left) / self._rate

    def count(self, address: str) -> None:
        """Note that it happened."""
        if self._burst:
            self._buckets[address] = (max(self._left(address) - 1, 0.0), self._clock())
            self._buckets.move_to_end(address)
            if len(self._buckets) > self._addresses:
                self._buckets.popitem(last=False)

    def _left(self, address: str) -> float:
        left, then = self._buckets.get(address, (self._burst, 0.0))
        return min(left + (self._clock() - then) * self._rate, self._burst)


def address_key(host: str) -> str:
    """What a peer's address is counted as: of IPv6 the network of 64 bits, all of which one machine may have."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
    return host
