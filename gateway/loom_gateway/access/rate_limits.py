"""Rate limits for events of many addresses."""

from __future__ import annotations

import ipaddress
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from loom.errors import AuthenticationError, RateLimited, TokenRevoked
from loom_gateway.settings import Limits

ADDRESSES = 10_000
"""The number of addresses to count at once. The one that was counted longest ago is forgotten first."""

MOST_SHARED = 200
"""The number of addresses of whose counts other gateways learn at once: those with the most."""


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
        self._fresh: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._buckets)

    def wait(self, address: str) -> float:
        """Return the seconds until the event may happen again at an address; 0 if it may now."""
        if not self._burst:
            return 0.0
        left = self._left(address)
        return 0.0 if left >= 1 else (1 - left) / self._rate

    def count(self, address: str) -> None:
        if len(self._fresh) < self._addresses:
            self._fresh[address] += 1
        self._spend(address, 1)

    def fresh(self) -> Mapping[str, int]:
        """Return what was counted here since the last call, for the other gateways to `learn`."""
        fresh, self._fresh = self._fresh, Counter()
        return dict(fresh.most_common(MOST_SHARED))

    def learn(self, counts: Mapping[str, int]) -> None:
        """Count what another gateway has counted."""
        for address, times in counts.items():
            self._spend(address, times)

    def _spend(self, address: str, times: int) -> None:
        if self._burst:
            self._buckets[address] = (max(self._left(address) - times, 0.0), self._clock())
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


BURST = 5.0  # the number of seconds whose allowance of connections an address may use at once
SIGNATURES = 20.0  # signatures a second to check for addresses that have shown too many wrong tokens


class Allowances:
    """Counts what addresses do, and refuses what is too often with `RateLimited`."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._connections = RateLimit(limits.connection_rate * BURST, limits.connection_rate)
        self._failures = RateLimit(limits.login_failures, limits.login_failures / limits.login_window)
        self._signatures = RateLimit(SIGNATURES, SIGNATURES)
        self.shared = {"connections": self._connections, "failures": self._failures}
        """The limits whose counts several gateways add up."""

    def count_connection(self, who: str) -> None:
        """Count a connection, or a request, of an address or of its user."""
        if wait := self._connections.wait(who):
            raise _too_often(f"--connection-rate {self._limits.connection_rate:g} a second from one address", wait)
        self._connections.count(who)

    def count_failure(self, address: str) -> None:
        """Count a wrong token."""
        if wait := self._failures.wait(address):
            raise self._too_many_failures(wait) from None
        self._failures.count(address)

    @contextmanager
    def counting_failures(self, address: str, counts: bool = True) -> Iterator[None]:
        """Count an `AuthenticationError` as a failure of an address.

        Args:
            address: the address.
            counts: whether it also counts as a connection.
        """
        try:
            yield
        except TokenRevoked:  # not a guess
            raise
        except AuthenticationError:
            if counts:
                self.count_connection(address)
            self.count_failure(address)
            raise

    def count_signature(self, address: str) -> None:
        """Count the check of a signature, which costs more than the refusal of a flood may."""
        if self._failures.wait(address):
            if wait := self._signatures.wait(""):
                raise self._too_many_failures(wait)
            self._signatures.count("")

    def _too_many_failures(self, wait: float) -> RateLimited:
        limits = self._limits
        what = f"--login-failures {limits.login_failures} within {limits.login_window:g} s from one address"
        return _too_often(what, wait)


def _too_often(limit: str, wait: float) -> RateLimited:
    return RateLimited(f"the gateway allows {limit}; try again in {math.ceil(wait)} s", wait)
