"""Tokens of contexts in a real Secret Service: GNOME's keyring, on a bus of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.needs import skipped_if
from tests.support.processes import run

BUS, KEYRING = "dbus-daemon", "gnome-keyring-daemon"

LOOM = ("-c", "from loom.cli import main; main()")

CHOSEN = "import loom_proxy.contexts as c; print(c.choose_gateway().token)"

ENTRIES = """
import secretstorage
bus = secretstorage.dbus_init()
items = secretstorage.get_default_collection(bus).search_items({"service": "loom"})
print(*(item.get_secret().decode() for item in items))
"""
"""What another program sees in the keyring."""

pytestmark = skipped_if(next((f"{one} is not installed" for one in (BUS, KEYRING) if not shutil.which(one)), None))

Start = Callable[["str | None"], None]


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def user(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a user who has a bus, and no screen on which a keyring could ask for a password."""
    out = ("PYTHON_KEYRING_BACKEND", "DISPLAY", "WAYLAND_DISPLAY", "LOOM_TOKEN", "LOOM_URL")
    env = {name: value for name, value in os.environ.items() if name not in out}
    folders = {"HOME": "", "XDG_CONFIG_HOME": "config", "XDG_DATA_HOME": "data", "XDG_RUNTIME_DIR": "run"}
    env |= {name: str(tmp_path / folder) for name, folder in folders.items()}
    (tmp_path / "run").mkdir(mode=0o700)
    command = [BUS, "--session", "--nofork", "--nopidfile", "--print-address=1"]
    with ended(
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    ) as bus:
        assert bus.stdout is not None
        yield {**env, "DBUS_SESSION_BUS_ADDRESS": bus.stdout.readline().strip()}


@pytest.fixture
def start(user: dict[str, str]) -> Start:
    """Starts the user's keyring, in place of one that runs. It is made and unlocked if a password is given.

    It goes on by itself when it is ready, and ends with its bus.
    """

    def start(password: str | None) -> None:
        unlock = ["--daemonize"] if password is None else ["--unlock"]
        command = [KEYRING, "--replace", "--components=secrets", *unlock]
        subprocess.run(
            command, env=user, input=password, text=True, stdout=subprocess.DEVNULL, check=True, timeout=60
        )

    return start


def add(user: dict[str, str], token: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *LOOM, "context", "add", "prod", "ws://127.0.0.1:1", "--token-stdin"]
    return subprocess.run(command, env=user, input=token, capture_output=True, text=True, timeout=60)


def test_a_token_is_in_the_secret_service_as_long_as_its_context_is_there(
    user: dict[str, str], start: Start
) -> None:
    start("a password")

    added = add(user, "geheim\n")

    assert added.returncode == 0, added.stderr
    file = Path(user["XDG_CONFIG_HOME"], "loom", "contexts.json")
    assert "prod" in file.read_text()
    assert "geheim" not in file.read_text()
    assert not any(b"geheim" in one.read_bytes() for one in Path(user["XDG_DATA_HOME"]).rglob("*") if one.is_file())
    assert run("-c", CHOSEN, env=user).stdout == "geheim\n"
    assert run("-c", ENTRIES, env=user).stdout == "geheim\n"

    assert run(*LOOM, "context", "remove", "prod", env=user).returncode == 0
    assert run("-c", ENTRIES, env=user).stdout == "\n"


def test_a_locked_keyring_is_an_error_and_the_token_is_nowhere_else(user: dict[str, str], start: Start) -> None:
    start("a password")
    assert add(user, "geheim\n").returncode == 0
    start(None)

    chosen = run("-c", CHOSEN, env=user)
    added = add(user, "other\n")

    assert "KeyringUnavailable" in chosen.stderr
    assert added.returncode != 0
    assert "Unlock it and try again" in " ".join(added.stderr.replace("│", "").split())
    assert "other" not in Path(user["XDG_CONFIG_HOME"], "loom", "contexts.json").read_text()
