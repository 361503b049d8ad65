"""``loom serve``, ``up`` and ``bridge``: programs that go on until Ctrl-C.

``loom serve`` checks the options and then replaces itself with the module of `loom_gateway` that does the work.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from loom.cli.options import Access, asking
from loom.cli.output import say, say_lines
from loom.errors import WrongArguments
from loom.extras import GATEWAY_MODULES, WORKER_MODULES, require
from loom.nats.envelopes import Format
from loom.process.listen import announce
from loom.process.parent_pipe import when_parent_ends
from loom_gateway.settings import ExitWithParent, GatewaySettings, LogLevel, command

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


app = typer.Typer(no_args_is_help=True, help="Run a process of a cluster: a worker or the gateway.")


def up(
    hosts: Annotated[int, typer.Option(min=1, help="How many workers to start.")] = 1,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the gateway; 0 picks a free one.")] = 8470,
    token: Annotated[
        str | None, typer.Option(envvar="LOOM_TOKEN", help="The token for clients. Generated by default.")
    ] = None,
) -> None:
    """Start workers and a gateway on this machine, print how to connect, and end them with Ctrl-C."""
    from loom.rest_client import Gateway
    from loom_proxy.local import LocalCluster

    try:
        with LocalCluster(hosts, port=port, token=token) as cluster:
            say_lines(
                f"Loom is up with {hosts} host{'' if hosts == 1 else 's'}. In another terminal:\n"
                f"\n"
                f"  export LOOM_URL={cluster.url}\n"
                f"  export LOOM_TOKEN={cluster.token}\n"
                f"  loom status\n"
                f"  loom dashboard\n"
                f"\n"
                f'and in Python: job = loom.connect("{cluster.url}", token="{cluster.token}")\n'
                f"The page, for a browser: {Gateway(cluster.url, None).page_url}\n"
                f"Ctrl-C here ends it, with all sessions."
            )
            cluster.wait()
    except KeyboardInterrupt:
        say("ended")


@app.command()
def worker(
    address: Annotated[
        str, typer.Option(metavar="tcp://HOST:PORT", help="The address to listen on, as the gateway will name it.")
    ],
    patience: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=1,
            help="How long the processes here survive without network, as the gateway's --worker-patience.",
        ),
    ] = 60.0,
    exit_with_parent: ExitWithParent = False,
    grace: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="How long processes that train may go on after SIGTERM, to save their state.",
        ),
    ] = 25.0,
) -> None:
    """Offer this machine as a Monarch host. Prints one line of JSON when it listens."""
    require(WORKER_MODULES, "a worker")
    arguments = ["--address", address, "--patience", f"{patience:g}", "--grace", f"{grace:g}"]
    if exit_with_parent:
        arguments.append("--exit-with-parent")
    _become("loom_gateway.workers.host", arguments)


def gateway(settings: GatewaySettings) -> None:
    """Serve sessions on the workers: WebSocket, REST and health on one port. Prints one line of JSON when ready."""
    require(GATEWAY_MODULES, "a gateway")
    if settings.token:
        os.environ["LOOM_TOKEN"] = settings.token  # every user of the machine can read a command line
    _become("loom_gateway", settings.arguments())


app.command("gateway")(command(gateway))


def _become(module: str, arguments: list[str]) -> NoReturn:
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
