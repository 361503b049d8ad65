"""Rate limits for events of many addresses."""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable

ADDRESSES = 10_000
"""The number of addresses to count at once. The one that was counted longest ago is forgotten first."""


class RateLimit:
    """A limit for the rate of an event, with a token bucket for each address.

    Args:
        burst: how often it may happen at once; 0: no limit.
        rate: how often a second it may happen after that.
        addresses: the number of addresses to count.
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
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # remaining tokens, and their time

    def __len__(self) -> int:
        return len(self._buckets)

    def wait(self, address: str) -> float:
        """Return the seconds until the event may happen again at an address; 0 if it may now."""
        if not self._burst:
            return 0.0
        left = self._left(address)
        return 0.0 if left >= 1 else (1 - left) / self._rate

    def count(self, address: str) -> None:
        if self._burst:
            self._buckets[address] = (max(self._left(address) - 1, 0.0), self._clock())
            self._buckets.move_to_end(address)
            if len(self._buckets) > self._addresses:
                self._buckets.popitem(last=False)

    def _left(self, address: str) -> float:
        left, then = self._buckets.get(address, (self._burst, 0.0))
        return min(left + (self._clock() - then) * self._rate, self._burst)


def address_key(host: str) -> str:
    """Return the key under which an address is counted: for IPv6 its /64 network, which one machine may have."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
    return host
