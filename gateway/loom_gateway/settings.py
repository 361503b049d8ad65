"""`GatewaySettings`, the options of a gateway, declared once for ``loom serve gateway`` and for a pod's gateway.

They are dataclasses from which Typer makes a command, and not pydantic models: a laptop has no pydantic, and the
command has its help there too.
"""

# ruff: noqa: RUF009 - `_option` makes a field, as `dataclasses.field` does

from __future__ import annotations

import inspect
import logging
import math
import sys
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from loom.errors import LoomError, WrongArguments
from loom.process.error_exit import report
from loom.terminal_text import limit_log

_EXIT_WITH_PARENT = "End when standard input, a pipe of the parent's, is closed."

ExitWithParent = Annotated[bool, typer.Option("--exit-with-parent", help=_EXIT_WITH_PARENT)]


class LogLevel(str, Enum):
    """The levels of the log."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


def _option(default: Any, text: str | None = None, **options: Any) -> Any:
    """Return a setting: its default, and the description of its option for Typer."""
    metadata = {"option": {"help": text, **options}}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class SessionSettings:
    """The settings of whoever starts drivers: a session host, or a gateway with sessions of its own."""

    worker: list[str] = _option([], "Address of a worker; once for each.", metavar="[MESH=]tcp://HOST:PORT")
    workers: list[str] = _option(
        [],
        "Where workers are found: dns://SERVICE:PORT?count=N, a headless service, or file:PATH, with an address a "
        "line.",
        metavar="[MESH=]SOURCE",
    )
    workers_timeout: float = _option(
        60.0, "How long a new session waits for workers to be found.", metavar="SECONDS", min=0
    )
    worker_patience: float = _option(
        60.0,
        "How long training processes and their session survive without network between them.",
        metavar="SECONDS",
        min=1,
    )
    workers_per_user: int = _option(
        0, "Workers that each user with sessions has alone; 0: all users share all workers.", min=0
    )
    session_linger: float = _option(
        3600.0,
        "How long a session lives on when no client is connected, no run and no call goes on in it, and none of "
        "its replicas makes steps.",
        metavar="SECONDS",
        min=0,
    )
    session_max: float = _option(
        0.0,
        "How long a session lives at most, whatever goes on in it. 0 means any time.",
        metavar="SECONDS",
        min=0,
    )
    session_idle: float = _option(
        0.0,
        "How long a session lives in which nothing happens: no operation of a client, no run and no call goes on, "
        "and no replica makes steps. Also with clients and with persist; they are warned before. 0 means any time.",
        metavar="SECONDS",
        min=0,
    )
    state_dir: str | None = _option(
        None,
        "Folder in which the next gateway finds the sessions of this one. Default: "
        "~/.local/state/loom/gateway-PORT, with --driver-uids /var/lib/loom/gateway-PORT.",
        show_default=False,
    )
    driver_uids: str | None = _option(
        None,
        "User ids for drivers, one for each session, which then cannot reach each other's files and processes. "
        "Needs the right to change ids.",
        metavar="LOW-HIGH",
    )
    end_sessions: bool = _option(False, "End the sessions on SIGTERM, too, as Ctrl-C does.")
    drain: float = _option(
        0.0, "On SIGTERM, go on serving the sessions for so long, but open no new ones.", metavar="SECONDS", min=0
    )
    weaver: str | None = _option(
        None,
        "Address of a weaver that `loom serve weaver` runs elsewhere. Default: the gateway starts one of its own.",
        metavar="HOST:PORT",
        envvar="LOOM_GATEWAY_WEAVER",
        show_default=False,
    )
    weaver_secret: Path | None = _option(
        None, "File with the secret of --weaver.", metavar="FILE", envvar="LOOM_GATEWAY_WEAVER_SECRET"
    )
    weaver_listen: str | None = _option(
        None,
        "Address of the weaver for training processes. Default: this host's address, any port.",
        metavar="HOST:PORT",
        show_default=False,
    )
    weaver_advertise: str | None = _option(
        None, "The weaver's host as training processes see it, if it is another.", metavar="HOST"
    )
    log_level: LogLevel = _option(
        LogLevel.warning, "debug, info, warning or error; the log goes to stderr.", metavar="LOG_LEVEL"
    )
    exit_with_parent: bool = _option(False, _EXIT_WITH_PARENT)
    max_message: int | None = _option(
        None, "Bytes of one message; 0: 16 GiB. Default: a quarter of the container's memory.", min=0
    )
    max_in_flight: int = _option(100_000, "Unanswered operations of one user, in all sessions; 0: no limit.", min=0)
    keep_results: int = _option(
        4 << 30, "Bytes of one user's results on the disk for clients that are away; 0: no limit.", min=0
    )

    def arguments(self) -> list[str]:
        """Return the command line for these settings, without a token: every user could read it there."""
        arguments = []
        for setting in fields(self):
            value = getattr(self, setting.name)
            if setting.name == "token" or value == _default(setting):
                continue
            if value is True:
                arguments.append(_word(setting))
                continue
            for one in value if isinstance(value, list) else [value]:
                arguments += [_word(setting), str(getattr(one, "value", one))]
        return arguments

    def __post_init__(self) -> None:
        _check_limits(self)


@dataclass(frozen=True)
class SessionHostSettings(SessionSettings):
    """The settings of a session host."""

    listen: str = _option("127.0.0.1:8472", "Where gateways connect; port 0 picks a free one.", metavar="HOST:PORT")
    host_key: Path | None = _option(
        None, "File with the key that session hosts and their gateways share, a line.", metavar="FILE"
    )
    peer: list[str] = _option(
        [],
        "Another session host, with the same key and --weaver: functions with restarts go on there if this one is "
        "gone; for each, or dns://SERVICE:PORT?count=N or file:PATH, with an address a line.",
        metavar="tcp://HOST:PORT",
    )


@dataclass(frozen=True)
class Limits:
    """The limits of a gateway; 0 means no limit."""

    max_sessions: int = _option(32, "Sessions of one user; 0: no limit.", min=0)
    max_connections: int = _option(0, "Connections; 0: as many as there are descriptors for.", min=0)
    max_connections_per_address: int = _option(
        512, "Connections of one address on which no good token has come; 0: no limit.", min=0
    )
    max_connections_per_user: int = _option(
        4096, "Connections of one user with a request under way, at most half of all; 0: half of all.", min=0
    )
    connection_rate: float = _option(
        100.0, "REST requests a second of a user, and requests without a good token, from one address.", min=0
    )
    login_failures: int = _option(20, "Wrong tokens from one address within --login-window.", min=0)
    login_window: float = _option(60.0, metavar="SECONDS", min=0)

    def __post_init__(self) -> None:
        _check_limits(self)
        if not self.login_window:
            raise WrongArguments("--login-window is larger than 0")


@dataclass(frozen=True)
class GatewaySettings(Limits, SessionSettings):
    """The settings of a gateway."""

    session_host: list[str] = _option(
        [],
        "Serve the sessions of this session host, and start none here; for each, or dns://SERVICE:PORT?count=N "
        "or file:PATH, with an address a line.",
        metavar="tcp://HOST:PORT",
    )
    host_key: Path | None = _option(
        None, "File with the key that session hosts and their gateways share, a line.", metavar="FILE"
    )
    gateways_listen: str | None = _option(
        None,
        "Where the other gateways of the session hosts connect, an address of this machine. Requests of one client "
        "over HTTP may then come to any of them. Port 0 picks a free one.",
        metavar="HOST:PORT",
    )
    host: str = _option("127.0.0.1", "Address to listen on.")
    port: int = _option(8470, "Port to listen on; 0 picks a free one.", min=0, max=65535)
    token: str | None = _option(
        None, "The token that clients must present. Generated and printed if none is given.", envvar="LOOM_TOKEN"
    )
    token_file: Path | None = _option(
        None, "File with the token in its place, which is read again when it changes.", metavar="FILE"
    )
    tunnel_idle: float = _option(
        60.0, "How long a client over HTTP may go without a poll.", metavar="SECONDS", min=1
    )
    injectable: bool = _option(
        False,
        "Allow `loom inject` to inject failures into the gateway, its weaver and its drivers.",
        envvar="LOOM_INJECTABLE",
    )
    tokens: Path | None = _option(
        None, "File of `loom token`. Default: LOOM_TOKENS, or the user's.", metavar="FILE"
    )
    oidc_issuer: str | None = _option(
        None, "Accept the tokens of this OpenID Connect issuer, too.", metavar="https://HOST"
    )
    oidc_audience: list[str] = _option(
        [], "Whom the issuer's tokens must be for, usually the client id.", metavar="AUDIENCE"
    )
    oidc_scope: str | None = _option(None, "Scope of everyone whom the issuer knows.", metavar="SCOPE")
    oidc_scope_claim: str | None = _option(
        None, "Claim that gives users a scope: loom:SCOPE, or what --oidc-grant names.", metavar="CLAIM"
    )
    oidc_grant: list[str] = _option([], "Scope of a value of that claim.", metavar="VALUE=SCOPE")
    oidc_user_claim: str = _option("sub", "Claim with the user's name.", metavar="CLAIM")
    oidc_ca: Path | None = _option(
        None, "Certificate of the authority that vouches for the issuer, PEM.", metavar="FILE"
    )
    tls_cert: Path | None = _option(None, "Certificate and its chain, PEM; serves wss://.", metavar="FILE")
    tls_key: Path | None = _option(None, "The certificate's key, if it is in another file.", metavar="FILE")
    allow_origin: list[str] = _option(
        [], "Origin of web pages that may connect, besides the gateway's own.", metavar="https://HOST"
    )
    page_path: str = _option(
        "/",
        "Path under which browsers reach the page, if its origin is this gateway's alone: then a cookie may keep "
        "their sign-in.",
        metavar="PATH",
    )
    allow_host: list[str] = _option(
        [], "Name by which a gateway on a loopback address may be asked, besides localhost.", metavar="HOST"
    )
    trusted_proxy: list[str] = _option([], "A proxy whose X-Forwarded-For is believed.", metavar="ADDRESS")
    export: list[str] = _option(
        [],
        "Write every user's metrics into this tracker: wandb, mlflow, trackio or tensorboard; once for each.",
        metavar="TRACKER",
        envvar="LOOM_GATEWAY_EXPORT",
    )
    export_project: str = _option(
        "loom",
        "The project, or experiment, of the runs in trackers.",
        metavar="NAME",
        envvar="LOOM_GATEWAY_EXPORT_PROJECT",
    )
    export_folder: Path | None = _option(
        None,
        "Where trackers keep files, and what is exported is noted. Default: in the state folder.",
        metavar="FOLDER",
        envvar="LOOM_GATEWAY_EXPORT_FOLDER",
    )
    alert_mail: str | None = _option(
        None,
        "Command that sends an alert's e-mail, such as 'sendmail -t -i', which gets the message on standard input. "
        "No shell runs it. Default: no e-mail.",
        metavar="COMMAND",
    )
    alert_network: list[str] = _option(
        [],
        "Network of addresses that are not public, and that the webhooks of alerts may reach; once for each.",
        metavar="CIDR",
    )
    alert_page: str | None = _option(
        None,
        "Address of the page, for the links of alerts. Default: the gateway's own, if it listens on one address.",
        metavar="URL",
        show_default=False,
    )
    audit: Path | None = _option(None, "Record the actions of clients, as JSON lines.", metavar="FILE")
    audit_size: int = _option(64 << 20, "Size of one audit file.", metavar="BYTES", min=1)
    audit_required: bool = _option(False, "Refuse what cannot be written into the audit.")


def _check_limits(settings: SessionSettings | Limits) -> None:
    """Raise `WrongArguments` for a limit that is no number from 0 on."""
    names = {*Limits.__dataclass_fields__, "max_message", "max_in_flight", "keep_results"}
    for limit in fields(settings):
        value = getattr(settings, limit.name)
        if limit.name in names and value is not None and not 0 <= value < math.inf:
            raise WrongArguments(f"{_word(limit)} is a number from 0 on")


S = TypeVar("S", bound=SessionSettings)


def command(run: Callable[[S], None], kind: type[S]) -> Callable[..., None]:
    """Return a function for Typer with an option for each setting of a kind. The docstring is that of ``run``."""
    types = get_type_hints(kind)
    # Typer shows the options in this order: those that every gateway needs come before the limits.
    settings = sorted(fields(kind), key=lambda setting: setting.name in Limits.__dataclass_fields__)

    def with_options(**options: Any) -> None:
        run(kind(**options))

    def parameter(setting: Field[Any]) -> inspect.Parameter:
        # An explicit word for a flag; otherwise Typer would add a --no-… option.
        words = [_word(setting)] if types[setting.name] is bool else []
        option = typer.Option(_default(setting), *words, **setting.metadata["option"])
        kind = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(setting.name, kind, default=option, annotation=types[setting.name])

    with_options.__doc__ = run.__doc__
    with_options.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter(setting) for setting in settings]
    )
    return with_options


def run_process(serve: Callable[[S], None], kind: type[S], name: str, *loggers: str) -> None:
    """Run the process of a ``loom serve`` with the settings on its command line. Exit if it raises a `LoomError`.

    The log has the settings' level; ``loggers`` are further ones that have handlers of their own.
    """

    def logged(settings: S) -> None:
        format = "%(levelname)s %(name)s: %(message)s"
        logging.basicConfig(level=settings.log_level.value.upper(), format=format)
        limit_log(*loggers)
        serve(settings)

    logged.__doc__ = serve.__doc__
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command(logged, kind))
    try:
        app(prog_name=f"loom serve {name}")
    except LoomError as error:
        sys.exit(report(error))


def _word(setting: Field[Any]) -> str:
    return f"--{setting.name.replace('_', '-')}"


def _default(setting: Field[Any]) -> Any:
    return setting.default if setting.default_factory is MISSING else setting.default_factory()
