"""`Gateway`: a client of the gateway's REST interface. Like sessions, it connects without an HTTP proxy."""

from __future__ import annotations

import http.client
import json
import os
import selectors
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol, cast
from urllib.parse import quote, urlencode, urlsplit

from loom.control.operations import OPERATIONS, takes
from loom.errors import (
    GatewayUnreachable,
    InvalidAddress,
    LoomError,
    NotAGateway,
    TooLarge,
    WrongArguments,
)
from loom.mutual_auth.over_http import check_proof, error_in, json_object
from loom.process.listen import is_loopback
from loom.tls import client_context, tls_error
from loom.tracing.trace_ids import TRACE_HEADER, current_trace
from loom.wire.plain import plain

if TYPE_CHECKING:
    from loom.tracing.collecting import ProcessSpans

WEBSOCKET_PATH = "/ws/v1"  # path of the gateway's WebSocket

MAX_PATH = 16 << 10  # characters of the path and the query of a request, which a gateway takes

_TRUE = ("1", "true", "yes", "on")

_SCHEMES = {"ws": "ws", "wss": "wss", "http": "ws", "https": "wss"}

ENDS_WITHIN = 20.0
"""Seconds that a session may take to end. Its driver has 10 of them to stop its meshes before it is killed."""

IDLE = 4.0
"""Seconds that a connection is kept for the next request. The gateway closes an idle one after 5."""

_NOBODY_BEHIND = (502, 503, 504)  # the HTTP statuses of an ingress whose gateway does not answer


TokenSource = str | Callable[[], str] | None
"""A token, or a function that returns the one to show now, for tokens that expire."""


def token_now(token: TokenSource) -> str | None:
    """Return the token to show now. Raise `GatewayUnreachable` if its function fails: it is asked again later."""
    if callable(token):
        try:
            token = token()
        except Exception as error:
            raise GatewayUnreachable(f"there is no token to show: token=… raised {error!r}") from error
    shown = plain(token, "token")
    if isinstance(shown, str) and not shown.isprintable():
        raise WrongArguments("token: a line feed, or another character that cannot be printed, is in it")
    if shown is None or isinstance(shown, str):
        return shown
    raise WrongArguments(f"token: a text has to be given, not a {type(token).__name__}")


class Route(Protocol):
    """A way to a gateway whose URL may change, such as a port that is forwarded."""

    @property
    def name(self) -> str:
        """The gateway's address for people and programs, which stays."""

    @property
    def url(self) -> str:
        """The URL by which the gateway is reached now."""

    def renew(self) -> None:
        """Look for another way, because the gateway did not answer by this one."""


class ForwardedRoute(Route, Protocol):
    """A way to a gateway that was made, such as a port of this machine that is forwarded, until it is closed."""

    @property
    def token(self) -> str | None:
        """The gateway's token, if it was found with the way."""

    def why_not(self) -> LoomError | None:
        """Return why the gateway does not answer by this way, if that is known. This may take a while."""

    def gone(self) -> str | None:
        """Return why no gateway will answer by this way any more; None if one may. This returns at once."""

    def close(self, error: LoomError | None = None) -> None:
        """Close the way, for an error if there is one."""


class _Url:
    """The route of a URL that stays."""

    def __init__(self, url: str) -> None:
        self.name = self.url = url

    def renew(self) -> None:
        pass


def route_to(gateway: str | Route) -> Route:
    """Return a route, for a URL one that stays."""
    return _Url(gateway) if isinstance(gateway, str) else gateway


class Gateway:
    """A REST client of one gateway, for any thread. Connections are kept for a while for the next calls.

    Args:
        url: the gateway's address, ``ws://HOST:PORT`` or ``wss://HOST/PREFIX``, or a `Route`.
        token: the token to show.
        timeout: seconds that each call may take.
        ca: as `loom.tls.client_context`.
        insecure: as `safe_url`, for a URL.

    A call raises `GatewayUnreachable` if nothing answers, `NotAGateway` if something else answers, and the
    gateway's own error, such as `AuthenticationError`, if the gateway refuses.
    """

    def __init__(
        self,
        url: str | Route,
        token: TokenSource,
        timeout: float = 10.0,
        ca: str | None = None,
        insecure: bool = False,
    ) -> None:
        self._route = route_to(url)
        self.url = self._route.name
        """The gateway's address as it was given: of a `Route`, its name."""
        self._insecure = insecure or not isinstance(url, str)  # whoever has made a route has decided
        self._token = token
        self._timeout = timeout
        self._context = client_context(ca) if self._base.startswith("https:") else None
        self._owner = os.getpid()
        self._idle: list[tuple[http.client.HTTPConnection, float]] = []
        """Connections that no thread uses, with the time since which they are idle; the newest is last."""

    def __del__(self) -> None:
        for connection, _ in self.__dict__.get("_idle", ()):
            connection.close()

    @property
    def _base(self) -> str:
        """The URL of the REST interface at this moment."""
        url = safe_url(self._route.url, self._insecure)
        return "http" + url.removeprefix("ws").removesuffix(WEBSOCKET_PATH) + "/api/v1"

    def status(self) -> Mapping[str, Any]:
        """Return the gateway's version, workers and number of sessions."""
        return self._call("GET", "/status", expect="workers")

    def page(self, scope: str | None = None, cookie: bool = True) -> str:
        """Return the address of the page, with a code that signs one browser in, once and within a minute.

        Args:
            scope: ``view`` for a sign-in that may look only; None: that of the token.
            cookie: whether a cookie may keep the sign-in; a frame in another page has to keep it in its memory.
        """
        code = self._call("POST", "/page/code", "code", {"scope": scope, "cookie": cookie})["code"]
        return f"{self.page_url}#code={code}"

    @property
    def page_url(self) -> str:
        """The address of the page."""
        return self._base.removesuffix("/api/v1") + "/"

    def sessions(self) -> list[Mapping[str, Any]]:
        """Return an entry for each living session."""
        sessions: list[Mapping[str, Any]] = self._call("GET", "/sessions", expect="sessions")["sessions"]
        return sessions

    def ended_sessions(self) -> list[Mapping[str, Any]]:
        """Return an entry for each of the last ended sessions, the newest last."""
        ended: list[Mapping[str, Any]] = self._call("GET", "/sessions?ended=true", expect="sessions").get(
            "ended", []
        )
        return ended

    def end_session(self, name: str) -> None:
        """End a session: its driver, its meshes and their processes. This may take `ENDS_WITHIN` seconds longer."""
        self._call("DELETE", _session(name), expect="name", patience=ENDS_WITHIN)

    def share_session(self, name: str, user: str, scope: str) -> None:
        """Share a session with a user, who may ``view``, ``operate`` or ``drive`` it from now on."""
        self._call("PUT", f"{_session(name)}/shares/{quoted(user, 'user')}", "name", {"scope": scope})

    def unshare_session(self, name: str, user: str) -> None:
        """Take a share of a session back. The user's connections to it are closed."""
        self._call("DELETE", f"{_session(name)}/shares/{quoted(user, 'user')}", expect="name")

    def meshes(self, session: str) -> Mapping[str, Any]:
        """Return a living session's hosts, with its proc and actor meshes as a tree; see docs/reference/rest.md."""
        hosts: Mapping[str, Any] = self._call("GET", f"{_session(session)}/meshes", expect="hosts")
        return hosts

    def runs(self, session: str) -> list[Mapping[str, Any]]:
        """Return an entry for each run of a living session, the oldest first."""
        runs: list[Mapping[str, Any]] = self._call("GET", f"{_session(session)}/runs", expect="runs")["runs"]
        return runs

    def tensors(self, session: str) -> Mapping[str, Any]:
        """Return the watched tensors of a living session; see docs/reference/rest.md."""
        tensors: Mapping[str, Any] = self._call("GET", f"{_session(session)}/tensors", expect="tensors")
        return tensors

    def spans(self, session: str, seconds: float) -> ProcessSpans:
        """Return the spans of the calls that the gateway passes on for a living session, for seconds from now."""
        path = f"{_session(session)}/spans?seconds={seconds:g}"
        return cast("ProcessSpans", self._call("GET", path, expect="records", patience=seconds))

    def logs(self, session: str, follow: bool, **wanted: str | int | None) -> Iterator[Mapping[str, Any]]:
        """Yield each line that a session's processes printed; with ``follow`` also new lines, until it ends.

        Args:
            session: a living session, or one that has ended recently.
            follow: whether to wait for new lines.
            wanted: ``mesh``, ``rank``, ``stream``, ``run`` and ``tail``; None for all.

        Raises:
            UnknownSession, NoSuchMesh, NoSuchRank: there is no such session, mesh or rank.
        """
        given = {name: value for name, value in wanted.items() if value is not None}
        path = f"{_session(session)}/logs?" + _query({**given, "follow": int(follow)})
        with self._open("GET", path) as response:
            for line in response:
                # The gateway sends empty lines to a follower, as a keep-alive.
                if line.strip():
                    entry = json_object(line)
                    if "text" not in entry:
                        raise self._not_a_gateway()
                    yield entry

    def ask(
        self, operation: str, *, as_user: str | None = None, in_session: str | None = None, **arguments: Any
    ) -> Any:
        """Ask the weaver to do an operation; see `loom.control.operations.Ask`.

        Args:
            as_user: another user whose replicas it is about, which only an admin may name.
            in_session: the only session whose replicas it is about.
        """
        asked = OPERATIONS[operation]
        method, path, key = asked.route.method, asked.route.full_path, asked.route.key
        given = {name: value for name, value in arguments.items() if value is not None}
        patience = takes(operation, given)
        path = path.format_map({name: quoted(given.pop(name), name) for name in asked.route.named})
        about = {"user": as_user, "session": in_session}
        about = {name: value for name, value in about.items() if value is not None}
        if asked.result is str and not key:  # the response is plain text
            path += f"?{_query(about)}" if about else ""
            with self._open(method, path, patience=patience) as response:
                return response.read().decode()
        query = {**about, **({} if method == "POST" else given)}
        path += f"?{_query(query)}" if query else ""
        expect = key or next(iter(asked.result.__dataclass_fields__))
        answer = self._call(method, path, expect, given if method == "POST" else None, patience)
        return answer[key] if key else answer

    def _call(
        self, method: str, path: str, expect: str, body: Mapping[str, Any] | None = None, patience: float = 0.0
    ) -> Mapping[str, Any]:
        with self._open(method, path, body, patience) as response:
            answer = json_object(response.read())
        if expect not in answer:
            raise self._not_a_gateway()
        return answer

    @contextmanager
    def _open(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, patience: float = 0.0
    ) -> Iterator[http.client.HTTPResponse]:
        token = token_now(self._token)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        if (trace := current_trace()) is not None:
            headers[TRACE_HEADER] = trace
        content = None
        if body is not None:
            content = _body(body)
            headers["Content-Type"] = "application/json"
        if len(path) > MAX_PATH:
            raise TooLarge(f"the names in a request have {len(path):,} characters; {MAX_PATH:,} are the most")
        base = self._base  # once, so that the proof is that of the port that is connected to
        connection = self._connection(base, self._timeout + patience)
        whole, is_new = False, connection.sock is None
        try:
            if is_new:
                connection.connect()
                check_proof(connection.sock, base, token)
            connection.request(method, urlsplit(base).path + path, content, headers)
            response = connection.getresponse()
            if response.status >= 300:
                refusal = self._refusal(response)
                whole = not response.will_close
                raise refusal
            yield response
            response.read()
            whole = not response.will_close
        except LoomError as error:
            if is_new and isinstance(error, NotAGateway):
                self._route.renew()
            raise
        except ssl.SSLError as error:
            raise tls_error(self.url, error) from error
        except OSError as error:
            if is_new:
                self._route.renew()
            raise self._unreachable(error) from error
        except http.client.HTTPException as error:
            raise self._not_a_gateway() from error
        finally:
            if whole:
                self._idle.append((connection, time.monotonic()))
            else:
                connection.close()

    def _connection(self, base: str, timeout: float) -> http.client.HTTPConnection:
        """Return a connection for one request: an idle one that the gateway has not closed, or a new one."""
        if self._owner != os.getpid():  # the connections are those of a process whose forked child this is
            self._owner = os.getpid()
            while self._idle:
                self._idle.pop()[0].close()
        with suppress(IndexError):  # the pop is atomic, and raises if there is no idle connection
            while True:
                connection, since = self._idle.pop()
                if time.monotonic() - since < IDLE and not _readable(connection.sock):
                    connection.sock.settimeout(timeout)
                    return connection
                connection.close()
        parts = urlsplit(base)
        assert parts.hostname is not None
        if self._context is None:
            return http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout)
        return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=timeout, context=self._context)

    def _refusal(self, response: http.client.HTTPResponse) -> LoomError:
        if (refusal := error_in(json_object(response.read()))) is not None:
            return refusal
        if response.status in _NOBODY_BEHIND:
            return self._unreachable(f"{response.status} {response.reason}")
        return self._not_a_gateway()

    def _unreachable(self, reason: object) -> GatewayUnreachable:
        # A listener that speaks TLS closes a connection on which something else arrives.
        closed = isinstance(reason, ConnectionResetError) and self._context is None
        hint = "; if it speaks TLS, use wss:// or https://" if closed else ""
        return GatewayUnreachable(
            f"no answer from {self.url} ({reason}): check the address and that the gateway runs{hint}"
        )

    def _not_a_gateway(self) -> NotAGateway:
        return NotAGateway(f"what answers at {self.url} is no Loom gateway: check the host and the port")


def _session(name: str) -> str:
    """Return the path of a session."""
    return f"/sessions/{quoted(name, 'session')}"


def quoted(part: str, what: str) -> str:
    """Return a part of a path, quoted for a URL.

    Raises:
        WrongArguments: the part is empty, so that the path would be another one, or no text that can be sent.
            ``what`` is the part's name.
    """
    part = plain(part, what)
    if not isinstance(part, str):
        raise WrongArguments(f"{what}: a text has to be given, not {part!r:.80}")
    if not part:
        raise WrongArguments(f"no {what} is given, only an empty text")
    return quote(part, safe="")


def _query(given: Mapping[str, Any]) -> str:
    return urlencode({name: plain(value, name) for name, value in given.items()})


# `select.select` takes no descriptor above 1023.
_Selector: Any = getattr(selectors, "PollSelector", selectors.SelectSelector)


def _readable(sock: socket.socket) -> bool:
    """Return whether data has come: on an idle connection, this means its end."""
    with _Selector() as selector:
        try:
            selector.register(sock, selectors.EVENT_READ)
            return bool(selector.select(0))
        except (OSError, ValueError):  # it is closed
            return True


def _body(body: Mapping[str, Any]) -> bytes:
    return json.dumps(plain(body, "", finite=True)).encode()


def normalise_url(url: str) -> str:
    """Return the WebSocket URL for a gateway's URL such as ``ws://host:8470`` or ``https://host/prefix``."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InvalidAddress(
            f"{url!r} is not a gateway's URL ({error}): write ws://HOST:PORT or wss://HOST"
        ) from None
    if parts.scheme not in _SCHEMES or not parts.hostname:
        raise InvalidAddress(f"{url!r} is not a gateway's URL: write ws://HOST:PORT or wss://HOST")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    prefix = parts.path.rstrip("/").removesuffix(WEBSOCKET_PATH)
    return f"{_SCHEMES[parts.scheme]}://{host}{'' if port is None else f':{port}'}{prefix}{WEBSOCKET_PATH}"


def safe_url(url: str, insecure: bool) -> str:
    """Return the WebSocket URL for a gateway's URL, as `normalise_url`.

    Raises:
        InvalidAddress: it has no TLS and leads to another machine, without ``insecure`` or ``LOOM_INSECURE``.
    """
    normal = normalise_url(url)
    host = urlsplit(normal).hostname or ""
    if normal.startswith("wss:") or insecure or is_loopback(host) or os.environ.get("LOOM_INSECURE") in _TRUE:
        return normal
    raise InvalidAddress(
        f"{url} has no TLS: whoever is on the way to {host} could read the token and everything that is sent, and "
        f"run code with it. Use wss:// (docs/deploy/tls.md), kube:// or slurm://; or, in a network that you trust, "
        f"say so: insecure=True, --insecure or LOOM_INSECURE=1"
    )
