"""Options that several commands have, and functions that use them."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from loom.chaos.durations import parse_time
from loom.errors import LoomError, UnknownSession, WaitTimeout, WrongArguments
from loom.rest_client import ForwardedRoute, Gateway, TokenSource

if TYPE_CHECKING:
    from loom.control.commands import Acknowledgement
    from loom_proxy.contexts import GatewayChoice
    from loom_proxy.job import Job
    from loom_proxy.weaver.client import WeaverProxy
    from loom_proxy.weaver.command import CommandProxy
    from loom_proxy.weaver.watch import WeaverWatch


Url = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="The gateway: wss://HOST, kube://NAMESPACE/SERVICE, …. Default: LOOM_URL, else the current context.",
    ),
]
Token = Annotated[str | None, typer.Option(help="The token. Default: LOOM_TOKEN, else that of the context.")]
Ca = Annotated[
    str | None,
    typer.Option("--ca", envvar="LOOM_CA", metavar="FILE", help="Certificate of your own authority, for wss://."),
]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", envvar="LOOM_INSECURE", help="Go without TLS to another machine, for ws://."),
]
User = Annotated[
    str | None,
    typer.Option("--user", metavar="NAME", help="Another user's replicas, or * for everyone's; for admins."),
]
Since = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Only what happened since: 10m, 2h or 1d ago, or such as 2026-01-31T14:05."),
]
Until = Annotated[
    str | None, typer.Option(metavar="TIME", help="Only what happened until then, written as for --since.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Timeout = Annotated[float, typer.Option(min=0, metavar="SECONDS", help="How long to wait for acknowledgements.")]


@dataclass(frozen=True)
class Access:
    """The options with which a command asks a gateway, and the way to it, which is open as long as it is `held`."""

    url: Url = None
    token: Token = None
    ca: Ca = None
    insecure: Insecure = False

    @functools.cached_property
    def chosen(self) -> GatewayChoice:
        """The gateway to ask, and the token."""
        from loom_proxy.contexts import choose_gateway

        return choose_gateway(self.url, self.token, self.ca, self.insecure)

    @property
    def is_given(self) -> bool:
        """True if there is a gateway to ask, for commands that need none."""
        from loom_proxy.contexts import find_gateway

        return find_gateway(self.url, self.token) is not None

    @functools.cached_property
    def forward(self) -> ForwardedRoute | None:
        """The way, until the command ends, to a gateway whose address is no URL; None for a URL."""
        from loom_proxy.gateway_address import way_to

        return way_to(self.chosen.url)

    @property
    def _shown_token(self) -> TokenSource:
        """The token to show: the chosen one, or else the one that was found with the way to the gateway."""
        return self.chosen.token or (None if self.forward is None else self.forward.token)

    def gateway(self) -> Gateway:
        """Return the gateway. No request is sent yet."""
        to = self.chosen
        return Gateway(self.forward or to.url, self._shown_token, ca=to.ca, insecure=to.insecure)

    def weaver(self, user: str | None = None) -> WeaverProxy:
        """Return a proxy for the weaver behind the gateway. No request is sent yet."""
        from loom_proxy.weaver.client import WeaverProxy

        to = self.chosen
        return WeaverProxy(self.forward or to.url, self._shown_token, to.ca, insecure=to.insecure, user=user)

    def weaver_watch(self) -> WeaverWatch:
        """Return a watch of the weaver behind the gateway. It does not connect yet."""
        from loom_proxy.weaver.watch import WeaverWatch

        to = self.chosen
        return WeaverWatch(self.forward or to.url, self._shown_token, to.ca, to.insecure)

    def connect(self, session: str, mode: Literal["watch", "debug", "ranks"]) -> Job:
        """Attach to a living session, next to the client that drives it."""
        from loom_proxy.session.open import connect

        to = self.chosen
        return connect(to.url, to.token, session, mode=mode, ca=to.ca, insecure=to.insecure)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Close the way to the gateway at the end. Errors about the gateway say where its address comes from."""
        try:
            yield
        except LoomError:
            if "chosen" not in self.__dict__:  # the command has not asked a gateway
                raise
            from loom_proxy.gateway_address import explained_by

            with self.chosen.explained(), explained_by(self.__dict__.get("forward")):
                raise
        finally:
            if (forward := self.__dict__.get("forward")) is not None:  # without opening one
                forward.close()


@dataclass(frozen=True)
class UserAccess(Access):
    """The options with which a command asks about a user's replicas."""

    user: User = None

    def weaver(self, user: str | None = None) -> WeaverProxy:
        return super().weaver(user or self.user)


def asking(run: Callable[..., None]) -> Callable[..., None]:
    """Return a command for Typer that has the options of an `Access` in place of the parameter ``access``."""
    parameters = dict(inspect.signature(run, eval_str=True).parameters)
    access = parameters.pop("access").annotation

    def with_options(**options: Any) -> None:
        given = {option.name: options.pop(option.name) for option in fields(access)}
        asked: Access = access(**given)
        with asked.held():
            run(asked, **options)

    shown = [*parameters.values(), *inspect.signature(access, eval_str=True).parameters.values()]
    with_options.__name__, with_options.__doc__ = run.__name__, run.__doc__
    with_options.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in shown]
    )
    return with_options


def only_session(gateway: Gateway) -> str:
    """Return the name of the session that lives, if only one does."""
    names = [str(session["name"]) for session in gateway.sessions()]
    if len(names) == 1:
        return names[0]
    if not names:
        raise UnknownSession("no session lives here; name one that has ended lately with --session")
    raise UnknownSession(f"{len(names)} sessions live here; choose with --session: {', '.join(names)}")


def check_lives(gateway: Gateway, session: str) -> None:
    """Raise `UnknownSession` unless a session lives that the token may see."""
    names = [str(each["name"]) for each in gateway.sessions()]
    if session not in names:
        living = ", ".join(map(repr, names)) or "none"
        raise UnknownSession(f"no session named {session!r}; living sessions: {living}. It may have ended.")


def read_moment(text: str, now: Callable[[], float]) -> float:
    """Return the seconds since the epoch of a time: ``10m`` ago, or ISO, which is local without a zone.

    ``now`` is asked for the time from which to count back, by the clock of the source.
    """
    with contextlib.suppress(WrongArguments):
        ago = parse_time(text)
        return now() - ago
    try:
        return datetime.fromisoformat(re.sub("[zZ]$", "+00:00", text)).timestamp()
    except ValueError:
        raise WrongArguments(
            f"{text!r:.80} is no time: write such as 10m, 2h or 1d for so long ago, or 2026-01-31T14:05"
        ) from None


def weaver_clock(weaver: WeaverProxy) -> Callable[[], float]:
    """Return a function that asks a weaver for its time: this machine's may be another, or have jumped since."""
    return lambda: float(weaver.status()["time"])


def acknowledgements(command: CommandProxy, timeout: float) -> dict[str, Acknowledgement]:
    """Return the acknowledgements of a command, also for replicas that have not answered in time."""
    try:
        return command.get(timeout)
    except WaitTimeout:
        return command.outcomes()


def read_assignments(texts: Iterable[str], form: str) -> dict[str, Any]:
    """Return the values of ``NAME=VALUE`` arguments by name; a value is parsed as JSON, or else taken as text.

    A text of another form raises `WrongArguments` with ``form``, which has an example.
    """
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise WrongArguments(f"{text!r} is not {form}")
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    return values
