"""`connect`, which opens a session on a gateway or attaches to a living one."""

from __future__ import annotations

import logging
import os
import time

from loom.errors import GatewayUnreachable, LoomError, ProtocolMismatch, WorkersSilent, WrongArguments
from loom.rest_client import ForwardedRoute, TokenSource, normalise_url, safe_url
from loom.tracing.spans import recorder
from loom.wire.handshake import MODES, Hello
from loom.wire.plain import plain
from loom_proxy.contexts import choose_gateway
from loom_proxy.futures.timing import check_timeout
from loom_proxy.gateway_address import NO_ANSWER, way_to
from loom_proxy.job import Job
from loom_proxy.session.connection import Connection
from loom_proxy.session.spans import correct_clock
from loom_proxy.session.transport_and_handshake import CLIENT, RECONNECT, Address

logger = logging.getLogger(__name__)

ATTEMPTS = 3  # sessions that `connect` tries to open if the workers accept connections but do not answer


def connect(
    url: str | None = None,
    token: TokenSource = None,
    session: str | None = None,
    *,
    mode: str = "drive",
    take_over: bool = False,
    persist: bool = False,
    timeout: float = 30.0,
    reconnect_timeout: float | None = None,
    ca: str | None = None,
    transport: str | None = None,
    insecure: bool = False,
) -> Job:
    """Open a session on a gateway, or attach to a living one.

    A lost connection reconnects by itself. Meanwhile `FutureProxy.get` takes longer, and calls wait to be sent.
    Each call runs once, however often the connection is lost. `Job.events` reports losses.

    Args:
        url: the gateway, such as ``ws://host:8470`` or ``wss://host/prefix``; default ``LOOM_URL``, else the
            current context of ``loom context``. Or ``kube://NAMESPACE/SERVICE[:PORT[/PATH]]``: through a ``kubectl
            port-forward``, which is restarted when it ends or no longer reaches the gateway. Or
            ``slurm://[[USER@]LOGIN[:PORT]/]NAME``: an allocation of Slurm, through ssh to its login node, or
            without ssh from within the cluster; the way follows the gateway when Slurm moves it.
        token: the token, or a function that returns it; default ``LOOM_TOKEN``, else, if the gateway is that of the
            current context, that context's, else the one in the folder of an allocation of Slurm. The function is
            called, in any thread, for each connection: a token that expires is replaced by the next, and the
            session goes on.
        session: name of a living session to attach to; None opens a new one.
        mode: ``drive``; or, next to the client that drives, ``watch``: such a job sees events, logs, meshes and
            runs, and everything else raises `ReadOnlySession`. ``debug`` has `Job.debugger` besides, and
            ``ranks`` the methods of meshes that reach ranks, such as `ProcMeshProxy.exec`, and ``call`` calls of
            actors; these need a token that may drive.
        take_over: disconnect the session's client, if it has one; that client's error says so.
        persist: keep the session without a client until it is closed, not only for the gateway's linger time.
        timeout: seconds to wait for the gateway to accept the connection, and to try again if the connection is cut
            before the session is open; and to wait for an allocation of Slurm that is in the queue, or starts.
        reconnect_timeout: seconds of attempts to reconnect before the session counts as lost; None for as long as
            the session can live, which is without end unless the gateway has ``--session-max``.
        ca: file with the certificate (PEM) of the authority that vouches for the gateway, if that is your own;
            default ``LOOM_CA``, else the context's, else the authorities that this machine trusts.
        transport: ``"websocket"``; ``"http"``, which is slower and goes through networks that break WebSockets; or
            ``"auto"``: HTTP if only that can be opened. Default ``LOOM_TRANSPORT``, or auto.
        insecure: connect without TLS to another machine, where whoever is on the way could read the token and send
            code with it: only in a network that you trust. Default ``LOOM_INSECURE``.

    Raises:
        InvalidAddress: there is no URL and no current context, or it is no URL, or it is without TLS and leads to
            another machine.
        ContextFileError, KeyringUnavailable: the current context or its token is needed and cannot be read.
        UnknownTransport: ``transport`` is none of these.
        GatewayUnreachable: no program answers at the URL.
        NotAGateway: the program that answers is not a Loom gateway.
        UntrustedGateway: no trusted authority vouches for the gateway's certificate.
        AuthenticationError: the token is missing or wrong; `TokenRevoked` if it was revoked or has expired.
        ScopeError: the token's scope does not allow it.
        LimitReached: the user has as many sessions as one may; `RateLimited` if too many requests come from here.
        UnknownSession: no living session has the name.
        SessionInUse: the session has a client already.
        WorkerUnreachable: the gateway's workers do not answer.
        ProtocolMismatch: the gateway's major version of the protocol is another.
        MissingDependency: a ``kube://`` address needs kubectl, and a ``slurm://`` address ssh.
        PortForwardFailed: kubectl or ssh does not forward.
        LoginRefused, LoginUnreachable: ssh does not get to the login node of a ``slurm://`` address.
        UnknownAllocation: this user has no such allocation of Slurm; `AllocationFailed` if it has ended.
    """
    session, mode, timeout = plain(session, "session"), plain(mode, "mode"), check_timeout(timeout) or 0.0
    reconnect_timeout = plain(reconnect_timeout, "reconnect_timeout")
    if not isinstance(mode, str) or mode not in MODES:
        raise WrongArguments(f"mode is {mode!r}: give 'drive', 'watch', 'debug', 'ranks' or 'call'")
    if mode != "drive" and session is None:
        raise WrongArguments(f"mode={mode!r} needs session=…: there is nothing to see in a new session")
    transport = transport or os.environ.get("LOOM_TRANSPORT") or "auto"
    hello = Hello(client=CLIENT, session=session, persist=persist, mode=mode, take_over=take_over)
    chosen = choose_gateway(url, token, ca, insecure)
    with chosen.explained():
        until = time.monotonic() + timeout
        forward = way_to(chosen.url, timeout)
        if forward is None:
            gateway = safe_url(chosen.url, chosen.insecure)
            return _open_job(
                Address(gateway, chosen.token, reconnect_timeout, chosen.ca, transport), hello, timeout
            )
        try:
            shown = chosen.token or forward.token
            address = Address(forward.url, shown, reconnect_timeout, chosen.ca, transport)
            job = _open_by(forward, address, hello, timeout, until)
        except BaseException:
            forward.close()
            raise
        job._reach_by(forward)
        return job


def _open_by(way: ForwardedRoute, address: Address, hello: Hello, timeout: float, until: float) -> Job:
    """Open a session or attach to one by a way; again, until a time, while its gateway is known to come."""
    comes = False
    for delay in RECONNECT:
        time.sleep(delay)
        try:
            return _open_job(address._replace(url=normalise_url(way.url)), hello, timeout)
        except NO_ANSWER as error:
            why = way.why_not()
            comes = isinstance(why, GatewayUnreachable) or (comes and why is None)
            if not comes or time.monotonic() > until:
                if why is None:
                    raise
                raise why from error
            way.renew()
    raise AssertionError("unreachable")


def _open_job(address: Address, hello: Hello, timeout: float) -> Job:
    """Open a session or attach to one; another session, a few times, if the workers accept one and are silent."""
    attached = hello.session is not None
    for _ in range(ATTEMPTS - 1):
        try:
            return _job(Connection.open(address, hello, timeout), attached, hello.mode)
        except WorkersSilent:
            continue  # the next session's driver has another port
    return _job(Connection.open(address, hello, timeout), attached, hello.mode)


def _job(connection: Connection, attached: bool, mode: str) -> Job:
    welcome = connection.welcome
    if welcome.mode != mode:  # an older driver makes a client of an unknown mode drive
        text = (
            f"session {welcome.session!r} is of an older Loom, whose driver knows no mode {mode!r}: open a new one"
        )
        connection.leave(text)
        raise ProtocolMismatch(text)
    job = Job(connection, attached)
    if recorder.sinks and job._calls.knows_traces:  # this program's records are put on the session's time line
        try:
            correct_clock(job._calls)
        except (LoomError, TimeoutError) as error:
            logger.warning("this program's clock was not compared with the session's: %s", error)
    return job
