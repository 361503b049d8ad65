"""``loom dashboard``: the gateway's page in a browser, signed in."""

from __future__ import annotations

import threading
import webbrowser
from contextlib import nullcontext, suppress
from typing import Annotated

import typer

from loom.cli.options import Access, asking
from loom.cli.output import say


@asking
def dashboard(
    access: Access,
    view: Annotated[bool, typer.Option("--view", help="Sign in with a scope that may look only.")] = False,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open a browser; without, only print the address.")
    ] = True,
) -> None:
    """Open the gateway's page, on which a training is watched and steered. The browser is signed in.

    The address is good once, and for a minute: it has a code in the token's place. With a kube:// address the
    command runs, and forwards, until Ctrl-C.
    """
    address = access.gateway().page("view" if view else None)
    # Whoever sees the address may press Ctrl-C.
    with nullcontext() if access.forward is None else suppress(KeyboardInterrupt):
        if browser and webbrowser.open(address):
            say(f"opened {address.partition('#')[0]} in a browser")
        else:
            say(address)
        if access.forward is not None:
            say(f"forwarding to {access.forward.name} until Ctrl-C", err=True)
            threading.Event().wait()
