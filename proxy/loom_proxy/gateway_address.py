"""Addresses of gateways that are no URLs: each scheme belongs to a wing, which makes a way to the gateway."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from loom.errors import ConnectionLost, GatewayUnreachable, NotAGateway
from loom.rest_client import ForwardedRoute
from loom.wings import Part

NO_ANSWER = (GatewayUnreachable, NotAGateway, ConnectionLost)
"""Errors that say that no gateway answered."""

_SCHEMES = {"kube": Part.KUBERNETES_ADDRESS, "slurm": Part.SLURM_ADDRESS}

_kept: dict[str, ForwardedRoute] = {}
_keeping = threading.Lock()
os.register_at_fork(after_in_child=_kept.clear)  # what keeps them runs in the parent


class WingAddress(Protocol):
    """The address of a gateway to which a wing makes a way."""

    def open(self, timeout: float) -> ForwardedRoute:
        """Return a way to the gateway, which has to be closed. Wait for a gateway that is to come, for a while."""


def read_address(address: str) -> WingAddress | None:
    """Return the address of a gateway as its wing reads it; None for a URL.

    Raises:
        InvalidAddress: it is none of the scheme's addresses.
    """
    part = _SCHEMES.get(address.partition("://")[0])
    if part is None:
        return None
    read: WingAddress = part.load()(address)
    return read


def way_to(address: str, timeout: float = 0.0) -> ForwardedRoute | None:
    """Return a way, which has to be closed, to the gateway at an address; None for a URL, which needs none.

    Args:
        timeout: seconds to wait for a gateway that is to come, as in a job that waits in a queue.

    Raises:
        LoomError: the address is wrong, or no way leads there; the text says why.
    """
    read = read_address(address)
    return None if read is None else read.open(timeout)


def kept_way_to(address: str) -> ForwardedRoute | None:
    """Return the way to an address that is kept until this process ends; None for a URL, which needs none."""
    with _keeping:
        if (way := _kept.get(address)) is None and (way := way_to(address)) is not None:
            _kept[address] = way
        return way


@contextmanager
def explained_by(way: ForwardedRoute | None) -> Iterator[None]:
    """Raise what is known of why no gateway answers by a way, in place of the error that none does."""
    try:
        yield
    except NO_ANSWER as error:
        if way is not None and (why := way.why_not()) is not None:
            raise why from error
        raise
