"""``loom serve worker`` and ``loom serve gateway``: the processes of a cluster.

The package `loom` does not import `loom_gateway`. These commands check their options and then become its modules.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
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
    _become("loom_gateway.workers.host", arguments)


@app.command()
def gateway(
    worker: Annotated[
        list[str],
        typer.Option(
            "--worker",
            metavar="[MESH=]tcp://HOST:PORT",
            help="Address of a worker; once for each.",
            default_factory=list,
        ),
    ],
    workers: Annotated[
        list[str],
        typer.Option(
            "--workers",
            metavar="[MESH=]SOURCE",
            help="Where workers are found: dns://SERVICE:PORT?count=N, a headless service, or file:PATH, with an "
            "address a line.",
            default_factory=list,
        ),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8470,
    workers_timeout: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long a new session waits for workers to be found.")
    ] = 60.0,
    token: Annotated[
        str | None, typer.Option(envvar="LOOM_TOKEN", help="What clients must show. Generated and printed if none.")
    ] = None,
    session_linger: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long a session lives on without a client.")
    ] = 3600.0,
    tunnel_idle: Annotated[
        float,
        typer.Option(
            "--tunnel-idle", min=1, metavar="SECONDS", help="How long a client over HTTP may go without a poll."
        ),
    ] = 60.0,
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
    drain: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="On SIGTERM, serve the sessions there are for so long, but no new ones.",
        ),
    ] = 0.0,
    weaver_listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where training processes find the weaver. Default: this host's address, any port.",
            show_default=False,
        ),
    ] = None,
    weaver_advertise: Annotated[
        str | None, typer.Option(metavar="HOST", help="The host that they are told, where it is another.")
    ] = None,
    injectable: Annotated[
        bool,
        typer.Option(
            "--injectable", help="Allow that failures are injected into it, its weaver and drivers: `loom inject`."
        ),
    ] = False,
    log_level: Annotated[
        str, typer.Option(help="debug, info, warning or error; the log goes to stderr.")
    ] = "warning",
    tokens: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File of `loom token`. Default: LOOM_TOKENS, or the user's."),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Certificate and its chain, PEM; serves wss://.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its key, if it is in another file.")] = None,
    allow_origin: Annotated[
        list[str], typer.Option(metavar="https://HOST", help="Pages that may connect, besides the gateway's own.")
    ] = [],  # noqa: B006
    trusted_proxy: Annotated[
        list[str], typer.Option(metavar="ADDRESS", help="A proxy whose X-Forwarded-For is believed.")
    ] = [],  # noqa: B006
    max_message: Annotated[int | None, typer.Option(min=0, help="Bytes of one message. Default 16 GiB.")] = None,
    max_sessions: Annotated[int | None, typer.Option(min=0, help="Sessions of one token; 0: no limit.")] = None,
    max_in_flight: Annotated[int | None, typer.Option(min=0, help="Unanswered operations of a session.")] = None,
    connection_rate: Annotated[
        float | None, typer.Option(min=0, help="Connections and requests a second from one address.")
    ] = None,
    login_failures: Annotated[
        int | None, typer.Option(min=0, help="Wrong tokens from one address within --login-window.")
    ] = None,
    login_window: Annotated[float | None, typer.Option(min=0, metavar="SECONDS")] = None,
    audit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write who did what, as JSON lines.")] = None,
    audit_size: Annotated[int | None, typer.Option(min=1, metavar="BYTES", help="Size of one audit file.")] = None,
    exit_with_parent: ExitWithParent = False,
) -> None:
    """Serve sessions on the workers: WebSocket, REST and health on one port. Prints one line of JSON when ready."""
    require(GATEWAY_MODULES, "a gateway")
    if token:
        os.environ["LOOM_TOKEN"] = token  # every user of the machine can read a command line
    arguments = ["--host", host, "--port", str(port)]
    arguments += ["--session-linger", str(session_linger), "--tunnel-idle", str(tunnel_idle)]
    arguments += ["--drain", str(drain), "--log-level", log_level]
    for address in worker:
        arguments += ["--worker", address]
    for source in workers:
        arguments += ["--workers", source]
    arguments += ["--workers-timeout", str(workers_timeout)]
    given = {
        "--weaver-listen": weaver_listen,
        "--weaver-advertise": weaver_advertise,
        "--tokens": tokens,
        "--tls-cert": tls_cert,
        "--tls-key": tls_key,
        "--max-message": max_message,
        "--max-sessions": max_sessions,
        "--max-in-flight": max_in_flight,
        "--connection-rate": connection_rate,
        "--login-failures": login_failures,
        "--login-window": login_window,
        "--audit": audit,
        "--audit-size": audit_size,
    }
    for option, value in given.items():
        if value is not None:
            arguments += [option, str(value)]
    for option, values in (("--allow-origin", allow_origin), ("--trusted-proxy", trusted_proxy)):
        for one in values:
            arguments += [option, one]
    if state_dir is not None:
        arguments += ["--state-dir", state_dir]
    if injectable:
        arguments.append("--injectable")
    if end_sessions:
        arguments.append("--end-sessions")
    if exit_with_parent:
        arguments.append("--exit-with-parent")
    _become("loom_gateway", arguments)


def _become(module: str, arguments: list[str]) -> NoReturn:
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
