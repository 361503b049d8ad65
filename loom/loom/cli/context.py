"""``loom context``: the gateways that this user has named, and the current one of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loom.cli.options import Json
from loom.cli.output import say, show
from loom.errors import UnknownContext, WrongArguments
from loom.rest_client import safe_url

if TYPE_CHECKING:
    from loom_proxy.contexts import GatewayContext

app = typer.Typer(
    help="Name gateways, and choose the one that `loom.connect()` and every command ask.", no_args_is_help=True
)

Name = Annotated[str, typer.Argument(help="Name of the context.")]


@app.command()
def add(
    name: Name,
    address: Annotated[
        str,
        typer.Argument(
            metavar="ADDRESS",
            help="wss://HOST, ws://HOST:PORT, kube://NAMESPACE/SERVICE or slurm://USER@LOGIN/NAME.",
        ),
    ],
    token_stdin: Annotated[
        bool, typer.Option("--token-stdin", help="Read the token from standard input; without, it is asked for.")
    ] = False,
    ca: Annotated[
        str | None, typer.Option("--ca", metavar="FILE", help="Certificate of your own authority, for wss://.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Go without TLS to another machine, for ws://, with this context.")
    ] = False,
) -> None:
    """Name a gateway, with the token to show to it, or replace the context of that name.

    The first context becomes the current one. The token is kept in the system's keyring, if the package `keyring`
    is installed and finds one, and else in the file of contexts, which only you can read.
    """
    from loom_proxy.contexts import ContextFile, GatewayContext

    _check_address(address, insecure)
    if ca is not None and not Path(ca).is_file():
        raise WrongArguments(f"--ca: there is no file {ca}")
    token = _read_token() if token_stdin else _ask_for_token(name)
    file = ContextFile()
    in_keyring = file.add(GatewayContext(name, address, ca and os.path.abspath(ca), insecure), token)
    current = (
        "the current one" if file.read().current == name else f"`loom context use {name}` makes it the current one"
    )
    place = "no token" if token is None else f"its token in {'the keyring' if in_keyring else file.path}"
    say(f"context {name}: {address}, {place}; {current}")


@app.command()
def use(name: Name) -> None:
    """Make a context the current one."""
    from loom_proxy.contexts import ContextFile

    context = ContextFile().use(name)
    say(f"the current context is {name}: {context.url}")


@app.command("list")
def list_contexts(as_json: Json = False) -> None:
    """List the contexts, without their tokens; the current one is marked."""
    from loom_proxy.contexts import ContextFile

    file = ContextFile()
    contexts = file.read()
    found = [
        {"name": name, "current": name == contexts.current, **_described(context)}
        for name, context in sorted(contexts.by_name.items())
    ]
    rows = [["*" if one["current"] else "", one["name"], one["url"], one["token"] or "none"] for one in found]
    show(as_json, {"contexts": found}, f"contexts of {file.path}", ["current", "name", "address", "token"], rows)


@app.command("show")
def show_context(
    name: Annotated[str | None, typer.Argument(help="Name of the context. Default: the current one.")] = None,
    as_json: Json = False,
) -> None:
    """Show a context, without its token."""
    from loom_proxy.contexts import ContextFile

    contexts = ContextFile().read()
    context = contexts.named(name or _current(contexts.current, contexts.listed))
    shown = {"name": context.name, "current": context.name == contexts.current, **_described(context)}
    rows = [[key, "none" if value is None else value] for key, value in shown.items()]
    show(as_json, shown, f"context {context.name}", ["what", "value"], rows)


@app.command()
def current() -> None:
    """Print the name of the current context."""
    from loom_proxy.contexts import ContextFile

    contexts = ContextFile().read()
    say(_current(contexts.current, contexts.listed))


@app.command()
def remove(name: Name) -> None:
    """Remove a context and its token. The gateway still takes the token: `loom token revoke` is its end."""
    from loom_proxy.contexts import ContextFile

    ContextFile().remove(name)
    say(f"removed context {name}")


def _current(name: str | None, listed: str) -> str:
    if name is None:
        raise UnknownContext(f"no context is the current one: choose one with `loom context use NAME`; {listed}")
    return name


def _check_address(url: str, insecure: bool) -> None:
    """Raise `InvalidAddress` unless `loom.connect` takes the address."""
    from loom_proxy.gateway_address import read_address

    if read_address(url) is None:
        safe_url(url, insecure)


def _described(context: GatewayContext) -> Mapping[str, object]:
    place = ("keyring" if context.keyring is not None else "file") if context.has_token else None
    return {"url": context.url, "token": place, "ca": context.ca, "insecure": context.insecure}


def _read_token() -> str:
    token = sys.stdin.read().strip()
    _check_token(token)
    if not token:
        raise WrongArguments("--token-stdin: nothing came from standard input")
    return token


def _ask_for_token(name: str) -> str | None:
    """Return the token that the user types; None for an empty line."""
    if not sys.stdin.isatty():
        raise WrongArguments("there is no terminal to ask for the token: give it to --token-stdin")
    asked = f"Token of {name} (not shown; empty for none)"
    token: str = typer.prompt(asked, default="", hide_input=True, show_default=False)
    _check_token(token.strip())
    return token.strip() or None


def _check_token(token: str) -> None:
    if not token.isascii() or not token.isprintable() or " " in token:
        raise WrongArguments("a token is one line of ASCII without blanks, and this is not")
