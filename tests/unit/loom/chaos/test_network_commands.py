"""Programs that make faults, and commands that run when a fault ends, whichever way its process does."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from loom.chaos.host import network_commands
from loom.chaos.host.network_commands import run, run_at_end
from loom.errors import FaultRefused

HOLDER = """
import sys
from loom.chaos.host.network_commands import run_at_end
undo = run_at_end(["touch", sys.argv[1]])
print("held", flush=True)
sys.stdin.read()
"""


def test_a_program_that_is_not_installed_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")

    with pytest.raises(FaultRefused, match="the program tc is not installed here: install iproute2"):
        run("tc", "qdisc")


def test_what_a_program_says_of_its_failure_is_told() -> None:
    with pytest.raises(FaultRefused, match=r"`ls /no/such/folder` failed: .*No such file"):
        run("ls", "/no/such/folder")


def test_a_program_that_may_not_do_it_leads_to_advice() -> None:
    with pytest.raises(FaultRefused, match="Operation not permitted: it needs root, or CAP_NET_ADMIN"):
        run("sh", "-c", "echo Operation not permitted >&2; exit 2")


def test_a_program_that_does_not_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_commands, "PROGRAM_WITHIN", 0.05)

    with pytest.raises(FaultRefused, match=r"`sleep 60` did not end within 0\.05 s"):
        run("sleep", "60")


def test_commands_run_in_order_when_they_are_asked_for(tmp_path: Path) -> None:
    undo = run_at_end(["mkdir", str(tmp_path / "a folder")], ["touch", str(tmp_path / "a folder" / "file")])
    assert not list(tmp_path.iterdir())

    undo()

    assert (tmp_path / "a folder" / "file").exists()


def test_a_command_that_fails_at_the_end_is_told() -> None:
    undo = run_at_end(["ls", "/no/such/folder"])

    with pytest.raises(FaultRefused, match="No such file"):
        undo()


def test_commands_run_all_the_same_when_their_process_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "undone"
    command = [sys.executable, "-c", HOLDER, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert not file.exists()

        holder.kill()

        until = time.monotonic() + 10
        while not file.exists():
            assert time.monotonic() < until
            time.sleep(0.01)
