"""Options that several commands have, and functions that use them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

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
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Timeout = Annotated[float, typer.Option(min=0, metavar="SECONDS", help="How long to wait for acknowledgements.")]


def weaver_of(url: str, token: str | None, ca: str | None) -> WeaverProxy:
    """Return a proxy for the weaver behind a gateway. No request is sent yet."""
    from loom_proxy.weaver.client import WeaverProxy

    return WeaverProxy(url, token, ca)


def acknowledgements(command: CommandProxy, timeout: float) -> dict[str, Acknowledgement]:
    """Return the acknowledgements of a command, also for replicas that have not answered in time."""
    from loom.errors import WaitTimeout

    try:
        return command.get(timeout)
    except WaitTimeout:
        return command.outcomes()
