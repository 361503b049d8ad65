"""Options that several commands have, and functions that use them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loom.errors import WaitTimeout, WrongArguments

if TYPE_CHECKING:
    from loom.control.commands import Acknowledgement
    from loom_proxy.weaver.client import WeaverProxy
    from loom_proxy.weaver.command import CommandProxy


Url = Annotated[str, typer.Option(envvar="LOOM_URL", metavar="ws://HOST:PORT", help="Address of the gateway.")]
Token = Annotated[str | None, typer.Option(envvar="LOOM_TOKEN", help="The gateway's token.")]
Ca = Annotated[
    str | None,
    typer.Option("--ca", envvar="LOOM_CA", metavar="FILE", help="Certificate of your own authority, for wss://."),
]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", envvar="LOOM_INSECURE", help="Go without TLS to another machine, for ws://."),
]
User = Annotated[
    str | None,
    typer.Option("--user", metavar="NAME", help="Another user's replicas, or * for everyone's; for admins."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Timeout = Annotated[float, typer.Option(min=0, metavar="SECONDS", help="How long to wait for acknowledgements.")]


def weaver_of(url: str, token: str | None, ca: str | None, insecure: bool, user: str | None = None) -> WeaverProxy:
    """Return a proxy for the weaver behind a gateway. No request is sent yet."""
    from loom_proxy.weaver.client import WeaverProxy

    return WeaverProxy(url, token, ca, insecure=insecure, user=user)


def acknowledgements(command: CommandProxy, timeout: float) -> dict[str, Acknowledgement]:
    """Return the acknowledgements of a command, also for replicas that have not answered in time."""
    try:
        return command.get(timeout)
    except WaitTimeout:
        return command.outcomes()


def read_assignments(texts: Iterable[str], form: str) -> dict[str, Any]:
    """Return the values of ``NAME=VALUE`` arguments by name; a value is parsed as JSON, or else taken as text.

    A text of another form raises `WrongArguments` with ``form``, which has an example.
    """
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise WrongArguments(f"{text!r} is not {form}")
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    return values
