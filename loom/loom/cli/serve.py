"""``loom serve worker`` and ``loom serve gateway``: the processes of a cluster.

These commands check their options and then replace themselves with the module of `loom_gateway` that does the work.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, NoReturn

import typer

from loom.extras import GATEWAY_MODULES, WORKER_MODULES, require
from loom_gateway.settings import ExitWithParent, GatewaySettings, command

app = typer.Typer(no_args_is_help=True, help="Run a process of a cluster: a worker or the gateway.")


@app.command()
def worker(
    address: Annotated[
        str, typer.Option(metavar="tcp://HOST:PORT", help="The address to listen on, as the gateway will name it.")
    ],
    exit_with_parent: ExitWithParent = False,
) -> None:
    """Offer this machine as a Monarch host. Prints one line of JSON when it listens."""
    require(WORKER_MODULES, "a worker")
    arguments = ["--address", address]
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
