"""Addresses of gateways that are no URLs: each scheme belongs to a wing, which makes a way to the gateway."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from loom.errors import ConnectionLost, GatewayUnreachable, NotAGateway
from loom.rest_client import ForwardedRoute
from loom.wings import Part

_SCHEMES = {"kube": Part.KUBERNETES_ADDRESS, "slurm": Part.SLURM_ADDRESS}


class WingAddress(Protocol):
    """The address of a gateway to which a wing makes a way."""

    def open(self) -> ForwardedRoute:
        """Return a way to the gateway, which has to be closed."""


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


def way_to(address: str) -> ForwardedRoute | None:
    """Return a way, which has to be closed, to the gateway at an address; None for a URL, which needs none.

    Raises:
        LoomError: the address is wrong, or no way leads there; the text says why.
    """
    read = read_address(address)
    return None if read is None else read.open()


@contextmanager
def explained_by(way: ForwardedRoute | None) -> Iterator[None]:
    """Raise what is known of why no gateway answers by a way, in place of the error that none does."""
    try:
        yield
    except (GatewayUnreachable, NotAGateway, ConnectionLost) as error:
        if way is not None and (why := way.why_not()) is not None:
            raise why from error
        raise
