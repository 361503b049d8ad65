"""Files and folders are copied to ranks and back, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

import loom
from loom.cli.app import app
from loom_proxy.local import LocalCluster
from loom_proxy.mesh.procs import ProcMeshProxy
from loom_proxy.remote_exec.copies import PIECE, CopyProgress
from tests.support.gateways import await_true
from tests.support.network.gate import Gate


def folder_to_copy(parent: Path) -> Path:
    folder = parent / "original"
    (folder / "inside" / "read only").mkdir(parents=True)
    (folder / "large").write_bytes(os.urandom(3 * PIECE + 5))
    (folder / "exact").write_bytes(os.urandom(PIECE))
    (folder / "empty").touch()
    (folder / "inside" / "run.sh").write_text("exit 4")
    (folder / "inside" / "run.sh").chmod(0o751)
    (folder / "inside" / "link").symlink_to("run.sh")
    (folder / "inside" / "read only" / "note").write_text("x")
    (folder / "inside" / "read only").chmod(0o555)
    return folder


def described(folder: Path) -> dict[str, tuple[int, object]]:
    """Return the permissions and the content of what is in a folder."""
    found: dict[str, tuple[int, object]] = {}
    for path in sorted(folder.rglob("*")):
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(folder))] = path.lstat().st_mode, content
    return found


def test_a_folder_comes_back_as_it_was(gate: Gate, trainers: ProcMeshProxy, tmp_path: Path) -> None:
    original = folder_to_copy(tmp_path)
    seen: list[CopyProgress] = []

    def cut_once(progress: CopyProgress) -> None:
        if not seen:
            gate.cut()
        seen.append(progress)

    there = trainers.copy_to(original, str(tmp_path / "there"), 1, on_progress=cut_once)
    back = trainers.copy_from(there, tmp_path / "back", 0)

    assert (there, back) == (str(tmp_path / "there"), str(tmp_path / "back"))
    assert described(tmp_path / "there") == described(original)
    assert described(tmp_path / "back") == described(original)
    assert seen[-1] == CopyProgress(5, 4 * PIECE + 5 + 6 + 1)


def test_a_copy_that_is_given_up_leaves_no_file(trainers: ProcMeshProxy, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(40 * PIECE))
    there = tmp_path / "there"
    there.mkdir()

    def give_up(progress: CopyProgress) -> None:
        raise KeyboardInterrupt

    for copy in (
        lambda: trainers.copy_to(tmp_path / "large", f"{there}/", on_progress=give_up),
        lambda: trainers.copy_from(str(tmp_path / "large"), f"{there}/", on_progress=give_up),
    ):
        with pytest.raises(KeyboardInterrupt):
            copy()
        await_true(lambda: os.listdir(there) == [])


def test_a_file_that_becomes_shorter_is_not_copied(trainers: ProcMeshProxy, tmp_path: Path) -> None:
    changing = tmp_path / "changing"
    changing.write_bytes(bytes(40 * PIECE))

    with pytest.raises(loom.FileChanged, match="'changing' became shorter"):
        trainers.copy_from(str(changing), tmp_path / "copy", on_progress=lambda progress: os.truncate(changing, 5))

    assert os.listdir(tmp_path) == ["changing"]


def test_what_cannot_be_copied_is_an_error_that_names_it(trainers: ProcMeshProxy, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(loom.NotFound, match="'/missing' on this machine"):
        trainers.copy_to("/missing", str(tmp_path))
    with pytest.raises(loom.NotFound, match="'/missing' on rank 1 of 'trainers'"):
        trainers.copy_from("/missing", tmp_path, 1)
    with pytest.raises(loom.NotFound, match="'/missing' on rank 0 of 'trainers'"):
        trainers.copy_to(tmp_path / "file", "/missing/file")
    with pytest.raises(loom.LoomError, match="'/proc/file' on rank 0 of 'trainers'"):
        trainers.copy_to(tmp_path / "file", "/proc/")
    with pytest.raises(loom.LoomError, match="'/proc/file' on this machine"):
        trainers.copy_from(str(tmp_path / "file"), "/proc/")
    with pytest.raises(loom.WrongArguments, match=r"pipe' is neither a file nor a folder"):
        trainers.copy_from(str(tmp_path), tmp_path / "copy")


def test_the_command_line_copies_both_ways(
    far: loom.Job, trainers: ProcMeshProxy, cluster: LocalCluster, tmp_path: Path
) -> None:
    (tmp_path / "here").write_text("content")
    options = ["--url", cluster.url, "--token", cluster.token, "--session", far.session, "--mesh", "trainers"]

    to = CliRunner().invoke(app, ["cp", *options, str(tmp_path / "here"), f"1:{tmp_path}/there"])
    back = CliRunner().invoke(app, ["cp", *options, f"0:{tmp_path}/there", str(tmp_path / "back")])
    both = CliRunner().invoke(app, ["cp", *options, "0:/tmp", "1:/tmp"])

    assert (to.stdout, to.exit_code) == (f"{tmp_path}/there\n", 0)
    assert (back.exit_code, (tmp_path / "back").read_text()) == (0, "content")
    assert isinstance(both.exception, loom.WrongArguments)
