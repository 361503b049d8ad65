"""No process that a command has started shows a token to the other users of the machine."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import pytest

from tests.support.processes import read_json, start

TOKEN = secrets.token_urlsafe(16)


def command_lines() -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.append((process / "cmdline").read_text(errors="replace"))
        except OSError:  # it has ended
            continue
    return found


@pytest.mark.slow
def test_a_gateway_with_its_token_on_its_command_line_shows_it_no_more(tmp_path: Path) -> None:
    loom = ["-c", "from loom.cli import main; main()", "serve", "gateway", "--worker", "tcp://127.0.0.1:1"]
    gateway = start(*loom, "--port", "0", "--token", TOKEN, "--state-dir", str(tmp_path / "state"))
    try:
        read_json(gateway)
        until = time.monotonic() + 3.0
        while time.monotonic() < until:
            assert [line for line in command_lines() if TOKEN in line] == []
    finally:
        gateway.terminate()
        gateway.communicate(timeout=30)
