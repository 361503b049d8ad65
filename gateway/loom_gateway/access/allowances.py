"""How often an address may connect, guess tokens and have signatures checked."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from loom.errors import AuthenticationError, RateLimited, TokenRevoked
from loom_gateway.access.rate_limits import RateLimit
from loom_gateway.settings import Limits

BURST = 5.0  # the number of seconds whose allowance of connections an address may use at once
SIGNATURES = 20.0  # signatures a second to check for addresses that have shown too many wrong tokens


class Allowances:
    """Counts what addresses do, and refuses what is too often with `RateLimited`."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._connections = RateLimit(limits.connection_rate * BURST, limits.connection_rate)
        self._failures = RateLimit(limits.login_failures, limits.login_failures / limits.login_window)
        self._signatures = RateLimit(SIGNATURES, SIGNATURES)

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
