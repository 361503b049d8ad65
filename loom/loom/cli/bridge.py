"""``loom bridge``: the weaver's events, and requests to it, over NATS."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loom.cli.options import Access, asking
from loom.errors import WrongArguments
from loom.extras import require
from loom.nats.subjects import Format
from loom.process.listen import announce
from loom.process.parent_pipe import when_parent_ends
from loom_gateway.settings import ExitWithParent, LogLevel

if TYPE_CHECKING:
    from loom.nats.bridge import Bridge

NATS_MODULES = {"nats": "nats-py", "google": "protobuf"}
"""Modules that a bridge imports, and the distributions that bring them."""


@asking
def bridge(
    access: Access,
    nats: Annotated[
        str,
        typer.Argument(
            metavar="nats://HOST:4222", envvar="torchLoom_ADDR", help="Address of NATS; tls://… with TLS."
        ),
    ] = "nats://localhost:4222",
    prefix: Annotated[str, typer.Option(help="The beginning of the subjects.")] = "torchLoom",
    format: Annotated[
        Format, typer.Option(help="Format of the bridge's messages; it takes both, and replies in the sender's.")
    ] = Format.JSON,
    nats_user: Annotated[str | None, typer.Option(envvar="LOOM_NATS_USER")] = None,
    nats_password: Annotated[str | None, typer.Option(envvar="LOOM_NATS_PASSWORD")] = None,
    nats_token: Annotated[str | None, typer.Option(envvar="LOOM_NATS_TOKEN")] = None,
    nats_creds: Annotated[
        Path | None, typer.Option(metavar="FILE", envvar="LOOM_NATS_CREDS", help="File with a JWT and its seed.")
    ] = None,
    nats_ca: Annotated[
        str | None, typer.Option(metavar="FILE", help="Certificate of your own authority, for tls://.")
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep what a restart needs: replicas, and what is done."),
    ] = None,
    jetstream: Annotated[
        bool, typer.Option("--jetstream", help="NATS keeps requests until they are done; needs --state.")
    ] = False,
    log_level: Annotated[LogLevel, typer.Option(help="The log goes to stderr.")] = LogLevel.info,
    exit_with_parent: ExitWithParent = False,
) -> None:
    """Publish the events of replicas and devices on NATS, and carry out requests from NATS. Runs until Ctrl-C.

    Prints one line of JSON when it is connected to both sides. A token of scope view makes a bridge that only
    publishes; commands and reports of failures need operate.
    """
    require(NATS_MODULES | ({"nkeys": "nkeys"} if nats_creds else {}), "the NATS bridge", extra="nats")
    if nats_creds is not None and not nats_creds.is_file():
        raise WrongArguments(f"--nats-creds: there is no file {nats_creds}")
    if jetstream and state is None:
        raise WrongArguments("--jetstream needs --state FILE, where the bridge writes down what is done")
    logging.basicConfig(level=log_level.value.upper(), format="%(asctime)s %(levelname)s %(message)s")
    for noisy in ("nats", "websockets", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.ERROR)

    from loom.nats.bridge import Bridge
    from loom.nats.nats_link import NatsLogin
    from loom.nats.state import BridgeState

    async def run() -> None:
        messages = access.weaver_watch().messages_async()
        login = NatsLogin(nats_user, nats_password, nats_token, str(nats_creds) if nats_creds else None, nats_ca)
        kept = BridgeState(state)
        await _until_ended(Bridge(access.gateway(), messages, nats, login, prefix, format, kept, jetstream))

    if exit_with_parent:
        # End the same way as on SIGTERM, so that there is one way to stop.
        when_parent_ends(lambda: os.kill(os.getpid(), signal.SIGTERM))
    asyncio.run(run())


async def _until_ended(bridge: Bridge) -> None:
    """Run a bridge until SIGTERM or SIGINT."""
    work = asyncio.current_task()
    assert work is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, work.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        try:
            await bridge.open()
            announce(bridge=bridge.id)
            await bridge.run()
        finally:
            await bridge.close()
