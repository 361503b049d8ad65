"""`GatewaySettings`: the options of a gateway, declared once, for ``loom serve gateway`` and for a pod's gateway.

A dataclass with Typer's annotations and not a model of pydantic, which a laptop does not have: the command has its
help there too.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from loom.errors import WrongArguments
from loom.wire.mux import MAX_MESSAGE

__all__ = ["ExitWithParent", "GatewaySettings", "Limits", "LogLevel", "command"]

ExitWithParent = Annotated[
    bool, typer.Option("--exit-with-parent", help="End when standard input, a pipe of the parent's, is closed.")
]


class LogLevel(str, Enum):
    """How much is logged."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


@dataclass(frozen=True)
class Limits:
    """The limits of a gateway; 0 is none.

    Raises:
        WrongArguments: one is not a number that makes sense.
    """

    max_message: Annotated[
        int, typer.Option(min=0, help="Bytes of one message. Default 16 GiB.", show_default=False)
    ] = MAX_MESSAGE
    """Bytes of one message: an operation with its arguments."""
    max_sessions: Annotated[int, typer.Option(min=0, help="Sessions of one token; 0: no limit.")] = 32
    max_in_flight: Annotated[int, typer.Option(min=0, help="Unanswered operations of a session.")] = 100_000
    connection_rate: Annotated[
        float, typer.Option(min=0, help="Connections and requests a second from one address.")
    ] = 100.0
    """WebSockets and REST requests a second from one address, after the first few seconds' worth at once."""
    login_failures: Annotated[
        int, typer.Option(min=0, help="Wrong tokens from one address within --login-window.")
    ] = 20
    login_window: Annotated[float, typer.Option(min=0, metavar="SECONDS")] = 60.0

    def __post_init__(self) -> None:
        for limit in fields(Limits):
            if not 0 <= getattr(self, limit.name) < math.inf:
                raise WrongArguments(f"{_option(limit)} is a number from 0 on")
        if not self.login_window:
            raise WrongArguments("--login-window is larger than 0")


@dataclass(frozen=True)
class GatewaySettings(Limits):
    """What a gateway is told."""

    worker: Annotated[
        list[str], typer.Option(metavar="[MESH=]tcp://HOST:PORT", help="Address of a worker; once for each.")
    ] = field(default_factory=list)
    workers: Annotated[
        list[str],
        typer.Option(
            metavar="[MESH=]SOURCE",
            help="Where workers are found: dns://SERVICE:PORT?count=N, a headless service, or file:PATH, with an "
            "address a line.",
        ),
    ] = field(default_factory=list)
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8470
    workers_timeout: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long a new session waits for workers to be found.")
    ] = 60.0
    token: Annotated[
        str | None, typer.Option(envvar="LOOM_TOKEN", help="What clients must show. Generated and printed if none.")
    ] = None
    session_linger: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long a session lives on without a client.")
    ] = 3600.0
    tunnel_idle: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="How long a client over HTTP may go without a poll.")
    ] = 60.0
    state_dir: Annotated[
        str | None,
        typer.Option(
            help="Folder in which the next gateway finds the sessions of this one. "
            "Default: $XDG_RUNTIME_DIR/loom/gateway-PORT, or /tmp/loom-UID/gateway-PORT.",
            show_default=False,
        ),
    ] = None
    end_sessions: Annotated[
        bool, typer.Option("--end-sessions", help="End the sessions on SIGTERM, too, as Ctrl-C does.")
    ] = False
    drain: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="On SIGTERM, serve the sessions there are for so long, but no new ones.",
        ),
    ] = 0.0
    weaver_listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where training processes find the weaver. Default: this host's address, any port.",
            show_default=False,
        ),
    ] = None
    weaver_advertise: Annotated[
        str | None, typer.Option(metavar="HOST", help="The host that they are told, where it is another.")
    ] = None
    injectable: Annotated[
        bool,
        typer.Option(
            "--injectable",
            envvar="LOOM_INJECTABLE",
            help="Allow that failures are injected into it, its weaver and drivers: `loom inject`.",
        ),
    ] = False
    log_level: Annotated[LogLevel, typer.Option(help="debug, info, warning or error; the log goes to stderr.")] = (
        LogLevel.warning
    )
    tokens: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File of `loom token`. Default: LOOM_TOKENS, or the user's.")
    ] = None
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Certificate and its chain, PEM; serves wss://.")
    ] = None
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its key, if it is in another file.")] = None
    allow_origin: Annotated[
        list[str], typer.Option(metavar="https://HOST", help="Pages that may connect, besides the gateway's own.")
    ] = field(default_factory=list)
    trusted_proxy: Annotated[
        list[str], typer.Option(metavar="ADDRESS", help="A proxy whose X-Forwarded-For is believed.")
    ] = field(default_factory=list)
    audit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write who did what, as JSON lines.")] = None
    audit_size: Annotated[
        int, typer.Option(min=1, metavar="BYTES", help="Size of one audit file.", show_default="64 MiB")
    ] = 64 << 20
    exit_with_parent: ExitWithParent = False

    def arguments(self) -> list[str]:
        """Return the command line that makes these settings, without the token: everybody could read it there."""
        arguments = []
        for setting in fields(self):
            value = getattr(self, setting.name)
            if setting.name == "token" or value == _default(setting):
                continue
            if value is True:
                arguments.append(_option(setting))
                continue
            for one in value if isinstance(value, list) else [value]:
                arguments += [_option(setting), str(getattr(one, "value", one))]
        return arguments


def command(run: Callable[[GatewaySettings], None]) -> Callable[..., None]:
    """Make of a function that takes settings one with an option for each, for Typer. It keeps the docstring."""
    types = get_type_hints(GatewaySettings, include_extras=True)
    # Typer shows the options in this order: those that every gateway needs come before the limits.
    settings = sorted(fields(GatewaySettings), key=lambda setting: setting.name in Limits.__dataclass_fields__)

    def with_options(**options: Any) -> None:
        run(GatewaySettings(**options))

    with_options.__doc__ = run.__doc__
    with_options.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                setting.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=_default(setting),
                annotation=types[setting.name],
            )
            for setting in settings
        ]
    )
    return with_options


def _option(setting: Field[Any]) -> str:
    return f"--{setting.name.replace('_', '-')}"


def _default(setting: Field[Any]) -> Any:
    return setting.default if setting.default_factory is MISSING else setting.default_factory()
