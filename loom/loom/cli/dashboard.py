"""``loom dashboard``: the gateway's page in a browser that is signed in."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
import webbrowser
from contextlib import nullcontext, suppress
from html import escape
from pathlib import Path
from typing import Annotated

import typer

from loom.cli.options import Access, asking
from loom.cli.output import say
from loom.token_file import state_folder

FILES_LAST = 120.0
"""Seconds after which the file of an earlier command is removed: its code is long of no use."""

_PAGE = """<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer"><title>Loom</title>
<script>location.replace({address})</script><a href="{link}">The gateway's page</a>
"""


@asking
def dashboard(
    access: Access,
    view: Annotated[bool, typer.Option("--view", help="Sign in with a scope that may look only.")] = False,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open a browser; without, only print the address.")
    ] = True,
) -> None:
    """Open the gateway's page, on which a training is watched and steered. The browser is signed in.

    The address is good once, and for a minute: it has a code in the token's place. The browser gets it by a file
    that only you can read. With a kube:// or slurm:// address the command runs, and forwards, until Ctrl-C.
    """
    address = access.gateway().page("view" if view else None)
    # The user may press Ctrl-C as soon as the address is shown.
    with nullcontext() if access.forward is None else suppress(KeyboardInterrupt):
        if browser and _open(address):
            say(f"opened {address.partition('#')[0]} in a browser")
        else:
            say(address)
        if access.forward is not None:
            say(f"forwarding to {access.forward.name} until Ctrl-C", err=True)
            threading.Event().wait()


def _open(address: str) -> bool:
    """Open an address in a browser, by a file that leads there: every user sees a browser's command line."""
    try:
        file = _leading_to(address)
    except OSError:  # such as a home that cannot be written: who is asked for the address gets it printed
        return False
    return webbrowser.open(file.as_uri())


def _leading_to(address: str) -> Path:
    """Return a new file, which only this user can read, with a page that leads to an address."""
    folder = state_folder() / "page"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    for old in folder.glob("open-*.html"):
        with suppress(OSError):
            if old.stat().st_mtime < time.time() - FILES_LAST:
                old.unlink()
    descriptor, path = tempfile.mkstemp(prefix="open-", suffix=".html", dir=folder)  # of mode 600
    with os.fdopen(descriptor, "w") as file:
        # The address as a text of JavaScript that cannot end the script.
        file.write(_PAGE.format(address=json.dumps(address).replace("<", "\\u003c"), link=escape(address)))
    return Path(path)
