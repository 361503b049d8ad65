"""``loom token``: tokens in addition to the gateway's own."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from loom.cli.options import Json
from loom.cli.output import print_json, say, say_lines, show, when
from loom.errors import WrongArguments
from loom.token_file import REPORT, Token, TokenFile, default_path

app = typer.Typer(help="Make, list and revoke tokens of the gateways that read a file.", no_args_is_help=True)

File = Annotated[
    Path | None,
    typer.Option("--tokens", metavar="FILE", help="The file. Default: LOOM_TOKENS, or the user's own."),
]

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@app.command()
def create(
    scope: Annotated[
        Literal["view", "operate", "drive", "admin"] | None,
        typer.Option(
            help="view reads; operate also sends commands and ends sessions; drive also opens them; admin reaches "
            "what is other users', too. Needed without --replica."
        ),
    ] = None,
    user: Annotated[str | None, typer.Option(help="The user whose token it is. Default: --name.")] = None,
    name: Annotated[str | None, typer.Option(help="A name for lists and logs. Default: --user.")] = None,
    expires: Annotated[
        str | None, typer.Option(metavar="7d", help="How long it is valid: a number and s, m, h, d or w.")
    ] = None,
    replica: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Make a token that only reports this replica's status, for pods without Loom."
        ),
    ] = None,
    tokens: File = None,
    as_json: Json = False,
) -> None:
    """Make a token and print it. It cannot be shown again."""
    if (scope is None) == (replica is None):
        raise WrongArguments("say what the token may do, with --scope, or whose status it reports, with --replica")
    name = user if name is None else name
    if name is None:
        raise WrongArguments("say whose token it is, with --user NAME")
    file = TokenFile(tokens or default_path())
    token, text = file.create(name, scope or REPORT, None if expires is None else _seconds(expires), user, replica)
    if as_json:
        print_json({"id": token.id, "user": token.user, "token": text, "expires": token.expires})
        return
    what = token.scope if token.replica is None else f"status of replica {token.replica!r}"
    about = f"{token.name!r} of user {token.user!r}, {what}"
    say(f"token {token.id} ({about}) in {file.path}; it is not shown again:", err=True)
    say_lines(text)


@app.command("list")
def list_tokens(
    user: Annotated[str | None, typer.Option(help="Only this user's tokens.")] = None,
    tokens: File = None,
    as_json: Json = False,
) -> None:
    """List the tokens: their names and scopes, not their secrets."""
    file = TokenFile(tokens or default_path())
    known = [token for token in file.read() if user in (None, token.user)]
    columns = ["id", "user", "name", "scope", "state", "created", "expires"]
    shown = [_shown(token) for token in known]
    rows = [
        [*(one[name] for name in columns[:5]), when(one["created"]), when(one["expires"]) or "never"]
        for one in shown
    ]
    show(as_json, {"tokens": shown}, f"tokens of {file.path}", columns, rows)


@app.command()
def revoke(
    ident: Annotated[
        str | None, typer.Argument(metavar="ID", help="The id that `loom token list` shows.", show_default=False)
    ] = None,
    user: Annotated[str | None, typer.Option(help="Revoke every token of this user.")] = None,
    tokens: File = None,
) -> None:
    """Revoke a token, or all of a user's. Gateways close its connections and end its sessions within seconds."""
    file = TokenFile(tokens or default_path())
    if (ident is None) == (user is None):
        raise WrongArguments("say which token to revoke: its ID, or --user NAME for all of a user's")
    for token in [file.revoke(ident)] if ident is not None else file.revoke_user(user or ""):
        say(f"revoked token {token.id} ({token.name!r})")


def _shown(token: Token) -> Mapping[str, Any]:
    shown = asdict(token)
    del shown["sha256"]
    return {**shown, "state": token.state(time.time())}


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text)
    if match is None:
        raise WrongArguments(f"{text!r} is no length of time: write a number and s, m, h, d or w, such as 7d")
    return float(match[1]) * _SECONDS[match[2]]
