"""The gateway's server: uvicorn with Loom's relay, and the sessions' end when the server stops."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import ssl
import sys
from concurrent.futures import Future
from pathlib import Path
from types import FrameType

import uvicorn

from loom.errors import WrongArguments
from loom.extras import require
from loom.process.error_exit import FAILURE
from loom.process.listen import announce, bracketed, host_and_port, listen, reachable
from loom.process.parent_pipe import when_parent_ends
from loom.token_file import TokenFile, default_path, generate_token
from loom.tracing import FirstByte
from loom.wings import Part
from loom_gateway.access.audit import Audit
from loom_gateway.access.connections import Acceptor, Connections, HttpProtocol, PortConnection
from loom_gateway.access.control import AccessControl
from loom_gateway.access.middleware import AccessMiddleware
from loom_gateway.access.origins import AllowedHosts
from loom_gateway.access.sign_ins import SignIns
from loom_gateway.access.token_authority import Issuer, OwnTokenFile, TokenAuthority, TokenMemory
from loom_gateway.app import create_app
from loom_gateway.exports import Exports
from loom_gateway.relay.driver_lines import DriverLines
from loom_gateway.relay.endpoint import MAX_HELLO
from loom_gateway.relay.websocket import RelaySocket
from loom_gateway.session_hosts.hosts import HostedLines, SessionHosts
from loom_gateway.session_hosts.line import read_key
from loom_gateway.session_hosts.other_gateways import OtherGateways
from loom_gateway.session_hosts.shared_notes import SharedNotes
from loom_gateway.sessions.directory import SessionDirectory
from loom_gateway.sessions.driver_ids import DriverIds, give_up_other_rights, hold_folder_of_logs
from loom_gateway.sessions.state_dir import default_path as default_state_dir
from loom_gateway.settings import GatewaySettings, LogLevel, SessionSettings
from loom_gateway.starting import manager_of, own_weaver, remote_weaver, state_folder, workers_of
from loom_gateway.weaver_process import GatewayWeaver
from loom_gateway.workers.sources import WorkerHosts, parse_source

SWITCH = 0.0005
"""Seconds for which a thread that computes, as one that reads a log does, holds up the event loop each time."""


def serve(settings: GatewaySettings) -> None:
    """Run a gateway until a signal ends it. Raise a `LoomError` if a setting or a file cannot be used."""
    hosted = _hosted(settings)
    workers = None if hosted is not None else workers_of(settings, "a gateway")
    elsewhere = remote_weaver(settings)
    if hosted is not None and elsewhere is None:
        raise WrongArguments("--session-host needs --weaver, the one that the session hosts have, too")
    ids = DriverIds.of(settings.driver_uids) if settings.driver_uids else None
    listener = listen(settings.host, settings.port, "choose another with --port (0 picks one)")
    if ids is not None:
        give_up_other_rights()  # before any file is read, so that what cannot be read later fails now
        hold_folder_of_logs()
    _check_tls(settings.tls_cert, settings.tls_key)
    generated = "" if settings.token or settings.token_file else generate_token()
    own = _own_token(settings) or generated
    file = TokenFile(settings.tokens or default_path())
    audit = Audit(settings.audit, settings.audit_size, required=settings.audit_required)
    folder = state_folder(settings, listener.getsockname()[1])
    known = TokenMemory(None if folder is None else os.path.join(folder.path, "tokens.json"))
    if not known.any:
        file.read()  # that a new gateway cannot read it is a mistake in its options
    authority = TokenAuthority(own, file, _issuer(settings), known)
    page = None if folder is None else os.path.join(folder.path, "page.json")
    sign_ins = SignIns(page, secret=None if hosted is None else hosted.secret_of("page"))
    access = AccessControl(authority, settings, audit, settings.allow_origin, sign_ins)
    if hosted is not None:
        hosted.shared = sign_ins.codes = SharedNotes(access, hosted.answering)
    sessions: SessionDirectory
    lines: DriverLines
    if workers is not None:
        operator = Part.ALERT_OPERATOR.load().made(
            settings.alert_mail, settings.alert_network, _page(settings, listener.getsockname()[1])
        )
        sessions = manager = manager_of(settings, workers, folder, ids)
        lines, weaver = DriverLines(manager), elsewhere or own_weaver(settings, manager, operator.write)
        manager.use(weaver.place, weaver.keys)
    else:
        assert hosted is not None
        assert elsewhere is not None
        sessions, lines, weaver = hosted, HostedLines(hosted), elsewhere
    if settings.exit_with_parent:
        when_parent_ends(lambda: _abandon(sessions, weaver))
    exports = Exports.checked(
        settings.export,
        settings.export_project,
        settings.export_folder or _export_folder(settings, listener.getsockname()[1]),
        weaver.place,
        lambda: weaver.keys().gateway(),
    )
    others = _others(settings, hosted)
    allowed = AllowedHosts(listener.getsockname()[0], settings.allow_host, bool(settings.trusted_proxy))
    _Server(settings, generated, sessions, lines, access, weaver, exports, allowed, others).run(sockets=[listener])


_OF_HOSTS = {
    *SessionSettings.__dataclass_fields__,
} - {"state_dir", "drain", "log_level", "exit_with_parent", "weaver", "weaver_secret"}
"""The settings that a gateway leaves to its session hosts."""


def _hosted(settings: GatewaySettings) -> SessionHosts | None:
    """Return the session hosts that the settings name; None if they name none."""
    if not settings.session_host:
        if settings.host_key is not None:
            raise WrongArguments("--host-key needs --session-host, the address of a session host that has it, too")
        return None
    given = [name for name in sorted(_OF_HOSTS) if getattr(settings, name) != getattr(GatewaySettings(), name)]
    if given:
        word = given[0].replace("_", "-")
        raise WrongArguments(f"--{word} is of the session hosts: give it to `loom serve sessions`")
    if settings.host_key is None:
        raise WrongArguments("--session-host needs --host-key, the file that `loom serve sessions` has, too")
    hosts = WorkerHosts([parse_source(one) for one in settings.session_host])
    return SessionHosts(hosts, read_key(settings.host_key))


def _others(settings: GatewaySettings, hosted: SessionHosts | None) -> OtherGateways | None:
    """Return the other gateways of the session hosts; None if they do not connect to this one."""
    if settings.gateways_listen is None:
        return None
    host, port = host_and_port(
        settings.gateways_listen, "where gateways connect: write --gateways-listen HOST:PORT"
    )
    if hosted is None:
        raise WrongArguments("--gateways-listen needs --session-host: a gateway with its own sessions is alone")
    if host in ("0.0.0.0", "::"):
        raise WrongArguments(f"--gateways-listen {host} leads other gateways nowhere: give this machine's address")
    listener = listen(host, port, "choose another with --gateways-listen (port 0 picks one)")
    return OtherGateways(listener, hosted.secret_of("gateways").hex())


def _page(settings: GatewaySettings, port: int) -> str:
    """Return the address of the page, for alerts; empty if this gateway cannot know it."""
    if settings.alert_page is not None:
        return settings.alert_page.partition("#")[0]
    if settings.host in ("0.0.0.0", "::", ""):
        return ""
    scheme = "http" if settings.tls_cert is None else "https"
    return f"{scheme}://{bracketed(settings.host)}:{port}/"


def _own_token(settings: GatewaySettings) -> str | OwnTokenFile | None:
    if settings.token_file is None:
        return settings.token
    if settings.token:
        raise WrongArguments(
            "the gateway's own token comes from --token-file, or from --token or LOOM_TOKEN: give one"
        )
    return OwnTokenFile(settings.token_file, secret=settings.driver_uids is not None)


def _issuer(settings: GatewaySettings) -> Issuer | None:
    if settings.oidc_issuer is None:
        for name in ("audience", "scope", "scope_claim", "grant", "ca"):
            if getattr(settings, f"oidc_{name}"):
                raise WrongArguments(f"--oidc-{name.replace('_', '-')} needs --oidc-issuer")
        return None
    require({"joserfc": "joserfc"}, "--oidc-issuer")
    from loom_gateway.access.openid import OpenIdIssuer  # it takes 0.1 s

    return OpenIdIssuer.of(settings)


def _check_tls(certificate: Path | None, key: Path | None) -> None:
    if certificate is None:
        if key is not None:
            raise WrongArguments("--tls-key needs --tls-cert, the certificate that it belongs to")
        return
    for option, path in (("--tls-cert", certificate), ("--tls-key", key)):
        try:
            if path is not None:
                path.open("rb").close()
        except OSError as error:
            raise WrongArguments(f"cannot read {option} {path}: {error.strerror or error}") from error
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        both = f"the certificate {certificate} and " + ("its key" if key is None else f"the key {key}")
        raise WrongArguments(
            f"cannot serve TLS with {both}: {error.reason or error}. Both are PEM, and the key is the certificate's"
        ) from error


def _export_folder(settings: GatewaySettings, port: int) -> Path:
    """Return the folder of files that trackers keep, which stays when a gateway has no state folder."""
    return Path(settings.state_dir or default_state_dir(port, settings.driver_uids is not None)) / "export"


def _abandon(manager: SessionDirectory, weaver: GatewayWeaver) -> None:
    """End at once. The drivers end with this process, and the sessions' processes with them."""
    weaver.abandon()
    manager.abandon()
    os._exit(FAILURE)


class _Server(uvicorn.Server):
    def __init__(
        self,
        settings: GatewaySettings,
        generated: str,
        manager: SessionDirectory,
        lines: DriverLines,
        access: AccessControl,
        supervisor: GatewayWeaver,
        exports: Exports,
        hosts: AllowedHosts,
        others: OtherGateways | None,
    ) -> None:
        self._settings = settings
        self._generated = generated  # the token that users learn from the announcement; empty if they know it
        self._manager = manager
        self._supervisor = supervisor
        page_path = f"/{settings.page_path.strip('/')}/" if settings.page_path.strip("/") else "/"
        self._app = create_app(
            manager,
            lines,
            access,
            supervisor,
            exports,
            settings.tunnel_idle,
            settings.injectable,
            page_path,
            others,
        )
        self._draining: Future[None] | None = None  # set by the first SIGTERM
        level = settings.log_level
        super().__init__(
            uvicorn.Config(
                AccessMiddleware(FirstByte(self._app), access, hosts),
                loop="uvloop",
                ws=RelaySocket,  # uvicorn's websockets-sansio with a short path for frames
                ws_max_size=MAX_HELLO,  # until the hello was taken
                ws_ping_interval=20.0,
                ws_ping_timeout=60.0,  # a laptop may be busy for some time
                ws_per_message_deflate=False,  # arrays do not compress, and small calls would pay for it
                http=HttpProtocol,
                ssl_certfile=settings.tls_cert,
                ssl_keyfile=settings.tls_key,
                proxy_headers=bool(settings.trusted_proxy),
                forwarded_allow_ips=settings.trusted_proxy,
                # uvicorn warns of each malformed request, and an attack would fill the log.
                log_level="error" if level is LogLevel.warning else level.value,
                access_log=False,
                lifespan="on",
                timeout_graceful_shutdown=5,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        sys.setswitchinterval(SWITCH)
        await super().startup([])
        assert sockets
        settings = self._settings
        connections = Connections(
            settings.max_connections,
            settings.max_connections_per_address,
            settings.trusted_proxy,
            refusals=self._app.state.access.audit.refusals,
            budget=self._app.state.access.budgets.connections,
        )
        self.servers.append(Acceptor(sockets[0], connections, self._protocol, self.config.ssl))  # type: ignore[arg-type]
        host, port = sockets[0].getsockname()[:2]
        scheme = "wss" if self._settings.tls_cert else "ws"
        url = f"{scheme}://{bracketed(reachable(host, '127.0.0.1'))}:{port}"
        # Imported modules stay. Each full collection would look at all of it, and nothing is relayed meanwhile.
        gc.collect()
        gc.freeze()
        # The line ends up in a log, so it has no token that was given.
        announce(url=url, **({"token": self._generated} if self._generated else {}))

    def _protocol(self, connection: PortConnection) -> HttpProtocol:
        return HttpProtocol(
            connection,
            self._app.state.access.shows_nothing,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Ctrl-C comes from a user who is done. SIGTERM may be an upgrade, and the next gateway finds the sessions.
        self._manager.end_sessions |= sig == signal.SIGINT
        if sig == signal.SIGTERM and self._settings.drain > 0 and self.started and self._draining is None:
            self._draining = asyncio.run_coroutine_threadsafe(self._drain(), self._loop)
        else:  # the second signal ends the gateway at once
            super().handle_exit(sig, frame)

    async def _drain(self) -> None:
        self._app.state.draining.begin(self._settings.drain)
        await self._app.state.draining.over()
        super().handle_exit(signal.SIGTERM, None)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.state.draining.begin(0.0)
        await self._app.state.plans.close()  # while the weaver can still be asked to remove faults
        await self._manager.end_all()  # while their clients can still be notified
        self._manager.logs.stop_following()  # uvicorn waits for answers that are under way
        self._app.state.tunnels.close()
        self._supervisor.client.close()
        await super().shutdown(sockets)
