"""``loom serve worker`` and ``loom serve gateway``: the processes of a cluster.

The package `loom` does not import `loom_gateway`. These commands check their options and then become its modules.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, NoReturn

import typer

from loom.extras import GATEWAY_MODULES, WORKER_MODULES, require

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Run a process of a cluster: a worker or the gateway.")

ExitWithParent = Annotated[
    bool, typer.Option("--exit-with-parent", help="End when standard input, a pipe of the parent's, is closed.")
]


@app.command()
def worker(
    address: Annotated[
        str, typer.Option(metavar="tcp://HOST:PORT", help="Where to listen, as the gateway will name it.")
    ],
    exit_with_parent: ExitWithParent = False,
) -> None:
    """Offer this machine as a Monarch host. Prints one line of JSON when it listens."""
    require(WORKER_MODULES, "a worker")
    arguments = ["--address", address]
    if exit_with_parent:
        arguments.append("--exit-with-parent")
    _become("loom_gateway.worker", arguments)


@app.command()
def gateway(
    worker: Annotated[
        list[str],
        typer.Option(
            "--worker", metavar="tcp://HOST:PORT", help="Address of a worker; once for each.", default_factory=list
        ),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8470,
    token: Annotated[
        str | None, typer.Option(envvar="LOOM_TOKEN", help="What clients must show. Generated and printed if none.")
    ] = None,
    session_linger: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long a session lives on without a client.")
    ] = 3600.0,
    state_dir: Annotated[
        str | None,
        typer.Option(
            help="Folder in which the next gateway finds the sessions of this one. "
            "Default: $XDG_RUNTIME_DIR/loom/gateway-PORT, or /tmp/loom-UID/gateway-PORT.",
            show_default=False,
        ),
    ] = None,
    end_sessions: Annotated[
        bool, typer.Option("--end-sessions", help="End the sessions on SIGTERM, too, as Ctrl-C does.")
    ] = False,
    log_level: Annotated[
        str, typer.Option(help="debug, info, warning or error; the log goes to stderr.")
    ] = "warning",
    exit_with_parent: ExitWithParent = False,
) -> None:
    """Serve sessions on the workers: WebSocket, REST and health on one port. Prints one line of JSON when ready."""
    require(GATEWAY_MODULES, "a gateway")
    if token:
        os.environ["LOOM_TOKEN"] = token  # every user of the machine can read a command line
    arguments = ["--host", host, "--port", str(port)]
    arguments += ["--session-linger", str(session_linger), "--log-level", log_level]
    for address in worker:
        arguments += ["--worker", address]
    if state_dir is not None:
        arguments += ["--state-dir", state_dir]
    if end_sessions:
        arguments.append("--end-sessions")
    if exit_with_parent:
        arguments.append("--exit-with-parent")
    _become("loom_gateway", arguments)


def _become(module: str, arguments: list[str]) -> NoReturn:
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
