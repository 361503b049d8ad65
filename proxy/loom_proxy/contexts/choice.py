"""`choose_gateway`: which gateway a program or a command asks, and with which token."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from loom.errors import Denied, InvalidAddress, Unavailable, UnknownSession
from loom.rest import TokenSource
from loom_proxy.contexts.file import ContextFile

_ABOUT_THE_GATEWAY = (Unavailable, Denied, InvalidAddress, UnknownSession)
"""Errors that name the gateway that was chosen: it may be another than the user thinks."""


class Origin(Enum):
    """The origin of the gateway's address."""

    ARGUMENT = "argument"
    ENVIRONMENT = "environment"
    CONTEXT = "context"


@dataclass(frozen=True)
class GatewayChoice:
    """A gateway that was chosen, and how to connect to it."""

    url: str
    token: TokenSource = field(repr=False)
    ca: str | None
    insecure: bool
    origin: Origin
    context: str | None = None
    """The name of the context that it comes from."""

    def __str__(self) -> str:
        """Return the address with where it comes from, such as ``ws://a:1 (from the context prod)``."""
        if self.origin is Origin.ARGUMENT:
            return self.url
        if self.origin is Origin.ENVIRONMENT:
            return f"{self.url} (from LOOM_URL)"
        return f"{self.url} (from the context {self.context}{'' if self.token else ', which has no token'})"

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Add the gateway and where it comes from to errors about it, unless the caller has named it."""
        try:
            yield
        except _ABOUT_THE_GATEWAY as error:
            if self.origin is not Origin.ARGUMENT:
                error.args = (f"{error} [gateway: {self}]", *error.args[1:])
            raise


def choose_gateway(
    url: str | None = None, token: TokenSource = None, ca: str | None = None, insecure: bool = False
) -> GatewayChoice:
    """Return what `find_gateway` finds.

    Raises:
        InvalidAddress: it finds none.
    """
    found = find_gateway(url, token, ca, insecure)
    if found is None:
        raise InvalidAddress(
            "no gateway to connect to: pass url=… or --url, or set LOOM_URL (`loom up` prints it), or choose a "
            f"context with `loom context use NAME`; {ContextFile().read().listed}"
        )
    return found


def find_gateway(
    url: str | None = None, token: TokenSource = None, ca: str | None = None, insecure: bool = False
) -> GatewayChoice | None:
    """Return the gateway of the argument, else that of ``LOOM_URL``, else that of the current context; or None.

    The token is that of the argument, else ``LOOM_TOKEN``. The token of a context is taken only together with its
    URL, and only if there is no other.

    Raises:
        ContextFileError: the contexts are needed, and their file cannot be used.
        KeyringUnavailable: the context's token is needed, and the keyring does not return it.
    """
    token = token or os.environ.get("LOOM_TOKEN")
    if url:
        return GatewayChoice(url, token, ca, insecure, Origin.ARGUMENT)
    if url := os.environ.get("LOOM_URL"):
        return GatewayChoice(url, token, ca, insecure, Origin.ENVIRONMENT)
    contexts = ContextFile().read()
    if contexts.current is None:
        return None
    context = contexts.named(contexts.current)
    ca = ca or os.environ.get("LOOM_CA") or context.ca
    insecure = insecure or context.insecure
    return GatewayChoice(context.url, token or context.read_token(), ca, insecure, Origin.CONTEXT, context.name)
