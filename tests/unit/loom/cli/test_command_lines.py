"""No one-time code, token or password is on a command line that other users of the machine can read."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from typer.testing import CliRunner

import loom
import loom_gateway
import loom_proxy
from loom.cli.app import app
from loom.process.hidden_secrets import SECRET_OPTIONS
from loom.rest_client import Gateway
from tests.support.gateways import BOUND

SECRET = "s3cret-Ä-of-this-test"
ADDRESS = "https://gateway/?a=<b>\"'</script>#code=0123456789"

SHOWS = """
import json, sys
from loom.process.hidden_secrets import hide_arguments
found = hide_arguments()
print(json.dumps([open("/proc/self/cmdline", errors="replace").read(), found, sys.argv]))
"""


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(Gateway, "page", lambda self, scope=None: ADDRESS)
    return tmp_path / "state"


@pytest.mark.guarantees(
    "laptop", "A browser gets its one-time code by a file of the user's own, and not by its command line"
)
def test_a_browser_gets_the_code_by_a_file_of_the_users_own(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, browser = tmp_path / "log", tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> {log}\n')
    browser.chmod(0o755)
    opens = "import sys; from loom.cli import dashboard; dashboard._open(sys.argv[1])"
    environment = {"BROWSER": f"{browser} %s", "XDG_STATE_HOME": str(state), "PATH": "/usr/bin:/bin"}

    for _ in range(2):
        subprocess.run([sys.executable, "-c", opens, ADDRESS], env=environment, check=True, timeout=BOUND)

    first, second = (Path(unquote(urlsplit(line).path)) for line in log.read_text().split())
    assert "0123456789" not in log.read_text()
    assert first != second
    for file in (first, second):
        assert file.stat().st_mode & 0o777 == 0o600
        assert file.parent.stat().st_mode & 0o777 == 0o700
        (text,) = re.findall(r"location\.replace\((.*)\)</script>", file.read_text())
        assert json.loads(text) == ADDRESS
        assert file.read_text().count("</script>") == 1


def test_the_address_is_printed_where_no_file_can_be_written(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state.write_text("no folder")
    monkeypatch.setattr("webbrowser.open", lambda url: pytest.fail(url))

    ended = CliRunner().invoke(app, ["dashboard", "--url", "ws://127.0.0.1:1"])

    assert ended.stdout.strip() == ADDRESS


@pytest.mark.guarantees(
    "laptop", "A token or password in an argument is overwritten as soon as the program has started"
)
@pytest.mark.parametrize("option", SECRET_OPTIONS)
@pytest.mark.parametrize("together", [False, True])
def test_a_secret_of_an_option_is_overwritten(option: str, together: bool) -> None:
    given = [f"{option}={SECRET}"] if together else [option, SECRET]
    words = ["status", *given, "--url", "wss://host", "--", "last"]

    said = subprocess.run([sys.executable, "-c", SHOWS, *words], check=True, capture_output=True, timeout=BOUND)
    shown, found, kept = json.loads(said.stdout)

    assert SECRET not in shown
    assert shown.split("\0")[-5:-1] == ["--url", "wss://host", "--", "last"]
    assert found == [option]
    assert kept[1:] == words


def test_a_password_in_an_address_is_overwritten() -> None:
    words = ["bridge", f"nats://user:{SECRET}@host:4222"]

    said = subprocess.run([sys.executable, "-c", SHOWS, *words], check=True, capture_output=True, timeout=BOUND)

    shown, found, kept = json.loads(said.stdout)
    assert "//user:xxx" in shown
    assert SECRET not in shown
    assert (found, kept[1:]) == (["a password in an address"], words)


def test_no_program_is_started_with_a_secret_in_its_arguments() -> None:
    starts = re.compile(r"(Popen|subprocess\.run|create_subprocess_exec|execv|_kubectl|python|Child)$")
    secret = re.compile(r"token|secret|password|code\b", re.IGNORECASE)
    found, counted = [], 0
    for package in (loom, loom_gateway, loom_proxy):
        folder = Path(package.__file__).parent
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and starts.search(ast.unparse(node.func)):
                    counted += 1
                    if secret.search(" ".join(map(ast.unparse, node.args[:3]))):
                        found.append(f"{path.relative_to(folder)}: {ast.unparse(node)}")

    assert counted > 15
    assert found == []
