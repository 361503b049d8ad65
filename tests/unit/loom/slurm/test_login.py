"""The machine on which Slurm's commands run."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

import loom
from loom.slurm.login import NO_SUCH_COMMAND, LocalLogin

LOGIN = LocalLogin()


def test_a_command_has_its_code_its_output_and_its_input() -> None:
    done = LOGIN.run(["sh", "-c", "cat; echo no >&2; exit 3"], input="žluť".encode())
    assert (done.code, done.stdout, done.stderr) == (3, "žluť", "no\n")
    assert done.said == "no"


def test_a_missing_command_has_the_code_of_a_shell() -> None:
    assert LOGIN.run(["loom-has-no-such-command"]).code == NO_SUCH_COMMAND


def test_a_command_does_not_see_the_job_in_which_the_program_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")  # srun in another job's script would ask for them, too
    monkeypatch.setenv("SLURM_CONF", "/opt/slurm.conf")
    assert LOGIN.run(["sh", "-c", "env | grep SLURM_"]).stdout == "SLURM_CONF=/opt/slurm.conf\n"


def test_a_command_that_takes_too_long_is_named() -> None:
    with pytest.raises(loom.Unavailable, match=r"sleep on this machine did not end within 0\.01 s") as raised:
        LOGIN.run(["sleep", "60"], timeout=0.01)
    assert raised.value.code == "login_unreachable"


def test_a_file_is_written_as_a_whole_and_for_its_user_only(tmp_path: Path) -> None:
    path = tmp_path / "it's a token"
    for content in (b"first", b"\xff\x00second"):
        LOGIN.write(str(path), content)
        assert LOGIN.read(str(path)) == content
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_file_is_no_failure_of_the_machine(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="on this machine"):
        LOGIN.read(str(tmp_path / "none"))
    with pytest.raises(loom.AllocationFailed, match="cannot read"):
        LOGIN.read(str(tmp_path))


def test_a_folder_that_cannot_be_written_names_the_way_to_another(tmp_path: Path) -> None:
    with pytest.raises(loom.AllocationFailed, match="LOOM_SLURM_FOLDER"):
        LOGIN.write(str(tmp_path / "none" / "token"), b"token")
