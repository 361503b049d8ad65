"""Options that several commands have, and functions that use them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loom.errors import UnknownSession, WaitTimeout, WrongArguments
from loom.rest import Gateway

if TYPE_CHECKING:
    from loom.control.commands import Acknowledgement
    from loom_proxy.weaver.client import WeaverProxy
    from loom_proxy.weaver.command import CommandProxy


Url = Annotated[str, typer.Option(envvar="LOOM_URL", metavar="ws://HOST:PORT", help="Address of the gateway.")]
Token = Annotated[str | None, typer.Option(envvar="LOOM_TOKEN", help="The gateway's token.")]
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
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Timeout = Annotated[float, typer.Option(min=0, metavar="SECONDS", help="How long to wait for acknowledgements.")]


@dataclass(frozen=True)
class Access:
    """The options with which a command asks a gateway."""

    url: Url
    token: Token = None
    ca: Ca = None
    insecure: Insecure = False

    def gateway(self) -> Gateway:
        """Return the gateway. No request is sent yet."""
        return Gateway(self.url, self.token, ca=self.ca, insecure=self.insecure)

    def weaver(self, user: str | None = None) -> WeaverProxy:
        """Return a proxy for the weaver behind the gateway. No request is sent yet."""
        from loom_proxy.weaver.client import WeaverProxy

        return WeaverProxy(self.url, self.token, self.ca, insecure=self.insecure, user=user)


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
        run(access(**given), **options)

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
