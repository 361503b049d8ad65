"""``loom context``, run as a user runs it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from loom.errors import InvalidAddress, UnknownContext, WrongArguments
from loom_proxy.contexts import ContextFile
from tests.support.cli_page import commands
from tests.support.gateways import await_true

pytestmark = pytest.mark.usefixtures("config")

URL = "kube://training/loom-gateway"


def loom(*words: str, said: str = "") -> str:
    """Run a command of ``loom context``; what it prints. Raises its error."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr("sys.stdin", io.StringIO(said))
        commands()[f"loom context {words[0]}"].main(list(words[1:]), standalone_mode=False)
    return printed.getvalue()


def add(name: str, url: str = URL, token: str = "secret") -> str:
    return loom("add", name, url, "--token-stdin", said=f"{token}\n")


def test_contexts_are_added_used_and_listed() -> None:
    assert "prod: kube://training/loom-gateway, its token in /" in add("prod")
    assert "`loom context use dev` makes it the current one" in add("dev", "ws://127.0.0.1:8470")
    assert loom("current") == "prod\n"
    assert loom("use", "dev") == "the current context is dev: ws://127.0.0.1:8470\n"
    assert loom("current") == "dev\n"

    table = loom("list")
    assert [line.split("│")[1:3] for line in table.splitlines() if "8470" in line or URL in line] == [
        [" *       ", " dev  "],
        ["         ", " prod "],
    ]
    assert json.loads(loom("list", "--json")) == {
        "contexts": [
            {
                "name": "dev",
                "current": True,
                "url": "ws://127.0.0.1:8470",
                "token": "file",
                "ca": None,
                "insecure": False,
            },
            {"name": "prod", "current": False, "url": URL, "token": "file", "ca": None, "insecure": False},
        ]
    }


def test_no_command_prints_a_token() -> None:
    said = add("prod")
    for words in (
        ("list",),
        ("list", "--json"),
        ("show",),
        ("show", "prod", "--json"),
        ("current",),
        ("use", "prod"),
    ):
        said += loom(*words)
    said += loom("remove", "prod")

    assert "secret" not in said


def test_show_is_about_the_current_context_or_a_named_one(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").touch()
    add("prod")
    loom("add", "lab", "ws://lab:1", "--insecure", "--ca", str(tmp_path / "ca.pem"), "--token-stdin", said="x")

    assert json.loads(loom("show", "--json"))["name"] == "prod"
    assert json.loads(loom("show", "lab", "--json")) == {
        "name": "lab",
        "current": False,
        "url": "ws://lab:1",
        "token": "file",
        "ca": str(tmp_path / "ca.pem"),
        "insecure": True,
    }


def test_after_the_current_context_is_removed_there_is_none() -> None:
    add("prod")
    add("dev")
    loom("remove", "prod")

    for words in (("current",), ("show",)):
        with pytest.raises(UnknownContext, match=r"loom context use NAME`; there are: dev"):
            loom(*words)


@pytest.mark.parametrize("words", [("use", "prod"), ("remove", "prod"), ("show", "prod")])
def test_a_context_that_there_is_not_is_an_error(words: tuple[str, ...]) -> None:
    with pytest.raises(UnknownContext, match=r"no context named 'prod'.*`loom context add NAME URL`"):
        loom(*words)


@pytest.mark.parametrize("url", ["kube://training", "ws://elsewhere:1", "training", "ftp://a"])
def test_an_address_that_connect_refuses_is_refused(url: str) -> None:
    with pytest.raises(InvalidAddress):
        add("prod", url)

    assert not ContextFile().path.exists()


@pytest.mark.parametrize("token", ["", "two words", "two\nlines", "é"])
def test_what_is_no_token_is_refused(token: str) -> None:
    with pytest.raises(WrongArguments, match="token"):
        add("prod", token=token)

    assert not ContextFile().path.exists()


def test_a_certificate_that_is_missing_is_refused() -> None:
    with pytest.raises(WrongArguments, match="there is no file /nowhere"):
        loom("add", "prod", "wss://a", "--ca", "/nowhere", "--token-stdin", said="x")


def test_without_a_terminal_the_token_has_to_come_from_standard_input() -> None:
    with pytest.raises(WrongArguments, match="--token-stdin"):
        loom("add", "prod", URL, said="secret\n")


def test_in_a_terminal_the_token_is_asked_for_and_not_shown() -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", "from loom.cli import main; main()", "context", "add", "prod", URL]
    adding = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    try:
        # Whoever types before the terminal stops to echo is not heard.
        await_true(lambda: not termios.tcgetattr(theirs)[3] & termios.ECHO)
        os.write(ours, b"secret\n")
        assert adding.wait(30) == 0
    finally:
        adding.kill()
        adding.wait()
    os.set_blocking(ours, False)
    said = os.read(ours, 10_000)
    os.close(theirs)
    os.close(ours)

    assert b"Token of prod" in said
    assert b"secret" not in said
    assert ContextFile().read().named("prod").read_token() == "secret"
