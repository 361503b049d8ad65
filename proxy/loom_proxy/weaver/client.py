"""`WeaverProxy`, the class of `Job.weaver`: views of every replica and device, their events, and commands.

::

    job.weaver.replicas()
    job.weaver.update_config("train_*", learning_rate=0.002).get(timeout=10)

The weaver has a command when the call returns; wait for the replicas with the `CommandProxy` that it returns, in
ordinary code with ``get`` and in a coroutine with ``await``. A coroutine uses the methods of the same names in
``job.weaver.aio``, which do not block the event loop.
"""

from __future__ import annotations

import contextvars
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from loom import driver_api
from loom.control.operations import OPERATIONS, Ask, takes
from loom.errors import GatewayUnreachable, LoomError, WaitTimeout, WeaverUnavailable, WrongState, error_for_code
from loom.rest_client import Gateway, Route, TokenSource, token_now
from loom.wire.bodies import AskWeaver
from loom_proxy.weaver.alerts import AlertRules
from loom_proxy.weaver.methods import WeaverMethods
from loom_proxy.weaver.runs import TrainingRuns

if TYPE_CHECKING:
    from loom_proxy.session.calls import Calls
    from loom_proxy.weaver.watch import WeaverWatch


BY_GATEWAY = frozenset(("inject", "remove_fault", "fail_device", "address"))
"""Operations for the gateway, which injects faults of drivers and its own, audits all faults, knows who is an
admin, and has keys of users, not only of sessions."""


class WeaverProxy(WeaverMethods):
    """The weaver of a gateway.

    That of a session may be an argument of `Job.run` or of an endpoint, where it becomes `loom.this_weaver`.

    Every method raises `WeaverUnavailable` while the weaver is away, `ScopeError` if the token does not allow it
    (commands need ``operate``), and the errors of `Gateway`.

    Args:
        url: URL of the gateway, or a route to it.
        token: token to show to the gateway.
        ca: file of the authority that vouches for the gateway; see `loom.tls.client_context`.
        transport: transport of updates for `watch` and `events`: ``"websocket"``; ``"http"``, which polls every
            second; or ``"auto"``: HTTP if there is no WebSocket.
        session: the session that carries requests to the weaver; None uses REST.
        insecure: whether a URL without TLS may lead to another machine; see `loom.connect`.
        user: another user whose replicas everything is about, ``"*"`` for everyone's lists; only an admin may name
            one. The replicas and devices of everyone have ``USER/`` before their id.
        in_session: the only session whose replicas everything is about, with ``transport="http"``.
    """

    def __init__(
        self,
        url: str | Route,
        token: TokenSource,
        ca: str | None = None,
        transport: str = "auto",
        session: Calls | None = None,
        insecure: bool = False,
        user: str | None = None,
        in_session: str | None = None,
    ) -> None:
        self._given = url, token, ca, insecure
        self._gateway = Gateway(url, token, ca=ca, insecure=insecure)
        self._session = session
        ask: Ask = partial(self._gateway.ask, as_user=user, in_session=in_session)
        if session is not None:
            ask = SessionWeaver(session, self._gateway).ask

        def socket() -> WeaverWatch:
            from loom_proxy.weaver.watch import WeaverWatch  # it takes a while, and few programs need it

            return WeaverWatch(url, token, ca, insecure, user)

        super().__init__(ask, transport, socket, user)

    def _environment(self) -> Mapping[str, str]:
        url, token, ca, insecure = self._given
        given = {
            "LOOM_URL": url if isinstance(url, str) else self._gateway.url,
            "LOOM_TOKEN": token_now(token),
            "LOOM_CA": ca,
            "LOOM_INSECURE": "1" if insecure else None,
        }
        return {name: value for name, value in given.items() if value}

    def __reduce__(self) -> tuple[Any, ...]:
        if self._session is None:
            raise WrongState(
                "this weaver is asked by REST with a token, which does not travel: call loom.this_weaver() in the "
                "actor, or in the function of job.run"
            )
        return this_weaver, ()

    def __repr__(self) -> str:
        return f"<WeaverProxy of {self._gateway.url}>"


class SessionWeaver:
    """The weaver, asked through a session, or by REST when the session is over."""

    def __init__(self, caller: Calls, gateway: Gateway) -> None:
        self._caller = caller
        self._gateway = gateway

    def ask(self, operation: str, **arguments: Any) -> Any:
        """Ask for an operation and return its answer; see `loom.control.operations.Ask`."""
        if operation in BY_GATEWAY or self._caller.error is not None:
            return self._gateway.ask(operation, **arguments)
        given = {name: value for name, value in arguments.items() if value is not None}
        timeout = ANSWER_TIMEOUT + takes(operation, given)
        try:
            # Without an order key, so that the request does not wait behind large calls.
            return self._caller.ask(AskWeaver(operation, given, timeout), key=None).get(timeout)
        except WaitTimeout:
            raise GatewayUnreachable(f"no answer from the weaver over the session within {timeout:g} s") from None
        except LoomError:
            # The session ended before the answer. A read is repeated by REST; a command might be given twice.
            if self._caller.error is None or not OPERATIONS[operation].reads():
                raise
            return self._gateway.ask(operation, **arguments)


ANSWER_TIMEOUT = 10.0  # seconds that an answer may take on top of those for which the operation itself waits

_TRAVEL_TIMEOUT = 5.0  # seconds that a request and its answer may take between an actor and the driver


def this_weaver() -> LocalWeaver:
    """Return the weaver of this session, with the methods of `Job.weaver`.

    Call it in an actor or in a function of `Job.run`. Coroutines use the methods of ``this_weaver().aio``. Other
    threads of an actor's process may use the weaver that the actor got. It sees and commands the replicas of the
    session's user. Updates of `watch` and ``events(follow=True)`` come once a second.

    Raises:
        RuntimeError: the caller is neither an actor nor in a session's driver.
    """
    if not driver_api.in_driver():
        from loom.actor import in_actor  # which imports Monarch, as only the cluster needs to

        if not in_actor():
            raise RuntimeError(
                "loom.this_weaver() is for actors and for functions of job.run. A thread takes the weaver that its "
                "actor got, and a program on the laptop has job.weaver"
            )
    return LocalWeaver()


class LocalWeaver(WeaverMethods):
    """The weaver as actors and runs of a session reach it; see `this_weaver`.

    Every method raises `WeaverUnavailable` while the weaver is away, and `Denied` for a fault of the gateway's own
    processes.
    """

    def __init__(self) -> None:
        self._context = contextvars.copy_context()  # Monarch finds the calling actor in it
        super().__init__(self._ask_mesh)

    @property
    def mesh(self) -> Any:
        """The session's actor mesh ``weaver``, in its driver."""
        return self._context.copy().run(_find_mesh)

    def _ask_mesh(self, operation: str, **arguments: Any) -> Any:
        given = {name: value for name, value in arguments.items() if value is not None}
        return self._context.copy().run(_ask, operation, given, ANSWER_TIMEOUT + takes(operation, given))

    def __reduce__(self) -> tuple[Any, ...]:
        return this_weaver, ()

    def __repr__(self) -> str:
        return "<LocalWeaver>"


_mesh: Any = None  # the mesh, once it was found; a process belongs to one session


def _find_mesh() -> Any:
    global _mesh
    if _mesh is None:
        from loom.actor import get_or_spawn_controller
        from loom.weaver.server.actor import WEAVER_MESH, WeaverActor

        _mesh = get_or_spawn_controller(WEAVER_MESH, WeaverActor).get()
    return _mesh


def _ask(operation: str, arguments: Mapping[str, Any], timeout: float) -> Any:
    try:
        code, answer = _find_mesh().ask.call_one(operation, arguments, timeout).get(timeout + _TRAVEL_TIMEOUT)
    except TimeoutError:
        raise WeaverUnavailable(f"the session's driver did not answer within {timeout:g} s") from None
    if code is not None:
        raise error_for_code(code, answer)
    return answer


def runs(
    run: str | None = None,
    *,
    url: str | None = None,
    token: TokenSource = None,
    user: str | None = None,
    state: str | None = None,
    tag: str | None = None,
    since: float | None = None,
    until: float | None = None,
    archived: bool = False,
    sort: str = "-began",
    limit: int = 100,
) -> TrainingRuns:
    """Return the runs of your trainings, the latest first.

    Args:
        run: a name, an id, or a glob over both.
        url: the gateway; by default ``LOOM_URL``, the current context or a running `loom up`.
        token: the token to show to it; by default that of the context.
        user: another user, or ``"*"`` for everyone's; for admins.
        state: ``running``, or the state of ended runs, such as ``completed`` or ``crashed``.
        tag: only runs with this tag.
        since, until: only runs that began between these times, in seconds since the epoch.
        archived: whether the archived runs are meant, in place of the others.
        sort: ``began``, ``ended``, ``name``, ``state``, ``step``, ``summary.METRIC`` or ``config.KEY``; from large
            to small with ``-`` in front.
        limit: number of runs, at most 1,000.
    """
    from loom_proxy.contexts import choose_gateway

    to = choose_gateway(url, token)
    with to.explained():
        weaver = WeaverProxy(*to.kept(), to.ca, insecure=to.insecure, user=user)
        return weaver.runs(
            run, state=state, tag=tag, since=since, until=until, archived=archived, sort=sort, limit=limit
        )


def alerts(*, url: str | None = None, token: TokenSource = None, user: str | None = None) -> AlertRules:
    """Return the rules that tell you of your runs, with methods that add, remove and test them.

    Args:
        url: the gateway; by default ``LOOM_URL``, the current context or a running `loom up`.
        token: the token to show to it; by default that of the context.
        user: another user, or ``"*"`` for everyone's; for admins.
    """
    from loom_proxy.contexts import choose_gateway

    to = choose_gateway(url, token)
    with to.explained():
        return WeaverProxy(*to.kept(), to.ca, insecure=to.insecure, user=user).alerts()
