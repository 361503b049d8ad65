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
from loom.weaver.keys import secret_in
from loom.wings import Part
from loom.wire.mux import MAX_MESSAGE
from loom_gateway.access.audit import Audit
from loom_gateway.access.connections import Acceptor, Connections, HttpProtocol, PortConnection
from loom_gateway.access.control import AccessControl
from loom_gateway.access.middleware import AccessMiddleware
from loom_gateway.access.origins import AllowedHosts
from loom_gateway.access.sign_ins import SignIns
from loom_gateway.access.token_authority import Issuer, OwnTokenFile, TokenAuthority, TokenMemory
from loom_gateway.app import create_app
from loom_gateway.exports import Exports
from loom_gateway.relay.endpoint import MAX_HELLO
from loom_gateway.relay.websocket import RelaySocket
from loom_gateway.sessions.driver_ids import DriverIds, give_up_other_rights, hold_folder_of_logs
from loom_gateway.sessions.manager import SessionManager
from loom_gateway.sessions.state_dir import StateFolder
from loom_gateway.sessions.state_dir import default_path as default_state_dir
from loom_gateway.settings import GatewaySettings, LogLevel
from loom_gateway.weaver_process import GatewayWeaver, RemoteWeaver, WeaverSupervisor
from loom_gateway.workers.sources import WorkerHosts, parse_source
from loom_gateway.workers.watcher import WorkerLeases

SHARE = 4
"""The largest message is this part of the memory: its bytes and what they are unpickled to are there at once."""

_UNLIMITED = 1 << 60  # version 1 writes a number near 2**63


def largest_message() -> int:
    """Return the largest message that this container's memory allows, `MAX_MESSAGE` at most."""
    limit = memory_limit()
    return MAX_MESSAGE if limit is None else min(MAX_MESSAGE, limit // SHARE)


def memory_limit(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the smallest limit of this process's control groups (version 1 or 2); None if there is none.

    Within a container, the paths in ``groups`` may be those outside of it, where its own group is at ``root``.
    """
    limits = []
    for hierarchy, names, path in _groups(groups):
        if hierarchy == "0":
            limits += _limits(root, path, "memory.max")
        elif "memory" in names.split(","):
            limits += _limits(root / "memory", path, "memory.limit_in_bytes")
    return min(limits, default=None)


def _groups(groups: Path) -> list[list[str]]:
    try:
        return [line.split(":", 2) for line in groups.read_text().splitlines() if line.count(":") >= 2]
    except OSError:  # another system than Linux
        return []


def _limits(mount: Path, path: str, name: str) -> list[int]:
    group = mount / path.strip("/")
    found = []
    for folder in (group, *group.parents):
        if folder == mount or mount in folder.parents:
            try:
                limit = int((folder / name).read_text())
            except (OSError, ValueError):  # another namespace's path, the root, or "max"
                continue
            if limit < _UNLIMITED:
                found.append(limit)
    return found


SWITCH = 0.0005
"""Seconds for which a thread that computes, as one that reads a log does, holds up the event loop each time."""


def serve(settings: GatewaySettings) -> None:
    """Run a gateway until a signal ends it. Raise a `LoomError` if a setting or a file cannot be used."""
    if not settings.worker and not settings.workers:
        raise WrongArguments("a gateway needs workers: give --worker tcp://HOST:PORT, or --workers; see --help")
    remote = _remote_weaver(settings)
    hosts = WorkerHosts([parse_source(given) for given in settings.worker + settings.workers])
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
    folder = _state_folder(settings, listener.getsockname()[1])
    known = TokenMemory(None if folder is None else os.path.join(folder.path, "tokens.json"))
    if not known.any:
        file.read()  # that a new gateway cannot read it is a mistake in its options
    authority = TokenAuthority(own, file, _issuer(settings), known)
    sign_ins = SignIns(None if folder is None else os.path.join(folder.path, "page.json"))
    access = AccessControl(authority, settings, audit, settings.allow_origin, sign_ins)
    max_message = largest_message() if settings.max_message is None else settings.max_message
    manager = SessionManager(
        hosts,
        settings.session_linger,
        folder,
        settings.exit_with_parent,
        [
            *("--max-message", str(max_message or MAX_MESSAGE)),
            *("--max-in-flight", str(settings.max_in_flight)),
            *("--worker-patience", str(settings.worker_patience)),
            *("--most", str(settings.session_max)),
            *("--idle", str(settings.session_idle)),
            *("--keep-results", str(settings.keep_results)),
        ],
        settings.workers_timeout,
        ids,
        WorkerLeases(settings.workers_per_user) if settings.workers_per_user else None,
    )
    manager.end_sessions |= settings.end_sessions
    weaver = remote or WeaverSupervisor(
        manager.folder.weaver,
        manager.worker_watch.there,
        settings.weaver_listen,
        settings.weaver_advertise,
        manager.exit_with_gateway,
        settings.session_linger,
        ids is not None,
        Part.ALERT_OPERATOR.load()
        .made(settings.alert_mail, settings.alert_network, _page(settings, listener.getsockname()[1]))
        .write,
    )
    if settings.exit_with_parent:
        when_parent_ends(lambda: _abandon(manager, weaver))
    exports = Exports.checked(
        settings.export,
        settings.export_project,
        settings.export_folder or _export_folder(settings, listener.getsockname()[1]),
        weaver.place,
        lambda: weaver.keys().gateway(),
    )
    allowed = AllowedHosts(listener.getsockname()[0], settings.allow_host, bool(settings.trusted_proxy))
    _Server(settings, generated, manager, access, weaver, exports, allowed).run(sockets=[listener])


def _remote_weaver(settings: GatewaySettings) -> RemoteWeaver | None:
    """Return the weaver elsewhere that the settings name; None if there is none."""
    if settings.weaver is None:
        if settings.weaver_secret is not None:
            raise WrongArguments("--weaver-secret needs --weaver, the address of the weaver that it belongs to")
        return None
    for name in ("weaver_listen", "weaver_advertise", "alert_mail", "alert_network", "alert_page"):
        if getattr(settings, name):
            word, theirs = name.replace("_", "-"), name.removeprefix("weaver_").replace("_", "-")
            raise WrongArguments(f"--{word} is of the gateway's own weaver: give --{theirs} to `loom serve weaver`")
    if settings.weaver_secret is None:
        raise WrongArguments("--weaver needs --weaver-secret, the file that `loom serve weaver` has, too")
    host_and_port(settings.weaver, "the address of a weaver for --weaver: write HOST:PORT")
    return RemoteWeaver(settings.weaver, secret_in(settings.weaver_secret))


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


def _state_folder(settings: GatewaySettings, port: int) -> StateFolder | None:
    """Return the state folder for drivers that outlive this process; None if none should."""
    # Only Linux can tell reliably whether a process is the one that was started.
    separate = settings.driver_uids is not None
    if sys.platform != "linux" or (settings.exit_with_parent and settings.state_dir is None and not separate):
        return None
    return StateFolder.open(settings.state_dir or default_state_dir(port, separate), separate)


def _export_folder(settings: GatewaySettings, port: int) -> Path:
    """Return the folder of files that trackers keep, which stays when a gateway has no state folder."""
    return Path(settings.state_dir or default_state_dir(port, settings.driver_uids is not None)) / "export"


def _abandon(manager: SessionManager, weaver: GatewayWeaver) -> None:
    """End at once. The drivers end with this process, and the sessions' processes with them."""
    weaver.abandon()
    manager.abandon()
    os._exit(FAILURE)


class _Server(uvicorn.Server):
    def __init__(
        self,
        settings: GatewaySettings,
        generated: str,
        manager: SessionManager,
        access: AccessControl,
        supervisor: GatewayWeaver,
        exports: Exports,
        hosts: AllowedHosts,
    ) -> None:
        self._settings = settings
        self._generated = generated  # the token that users learn from the announcement; empty if they know it
        self._manager = manager
        self._supervisor = supervisor
        page_path = f"/{settings.page_path.strip('/')}/" if settings.page_path.strip("/") else "/"
        self._app = create_app(
            manager, access, supervisor, exports, settings.tunnel_idle, settings.injectable, page_path
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
