"""``loom analyze``: its output, its folder and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.loom.rl.diagnosis.pipeline import slowed
from tests.unit.loom.rl.diagnosis.test_seed import LOGS


def loom_analyze(folder: Path, *options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from loom.cli import main; main()", "analyze", *map(str, options)],
        env={name: value for name, value in os.environ.items() if name != "LOOM_URL"},
        cwd=folder, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_it_says_the_diagnosis_and_writes_into_the_current_folder(tmp_path: Path) -> None:
    found = loom_analyze(tmp_path, *LOGS)

    assert (found.returncode, found.stderr) == (0, "")
    (folder,) = tmp_path.glob("analysis_*")
    assert found.stdout.splitlines() == [
        "PRIMARY: none",
        "No time is lost above a threshold.",
        f"written: {folder.name}/SUMMARY.md",
    ]
    assert "PRIMARY: none" in (folder / "SUMMARY.md").read_text().splitlines()


def test_a_bottleneck_exits_with_0_too(tmp_path: Path) -> None:
    paths = slowed("queue", 0).write(tmp_path / "logs")

    found = loom_analyze(tmp_path, *paths, "--out", tmp_path / "out", "--json")

    assert found.returncode == 0, found.stderr
    said = json.loads(found.stdout)
    assert said["primary"] == "queue"
    assert said["findings"][0]["option"] == "weights_via"
    assert Path(said["folder"]).parent == tmp_path / "out"


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ((), 2, "nothing to analyse: name logs, or a session with --session NAME"),
        pytest.param(("missing.log",), 2, "no log missing.log: there is no such file", marks=pytest.mark.slow),
        pytest.param(
            *(("--session", "one"), 2, "no gateway to connect to: pass url=… or --url, or set LOOM_URL"),
            marks=pytest.mark.slow,
        ),
        (("--session", "one", "--url", "ws://127.0.0.1:9"), 5, "no answer from ws://127.0.0.1:9"),
        (("empty.log",), 1, "nothing to analyse: empty.log has no line"),
    ],
)
def test_errors_have_the_exit_codes_of_all_commands(
    arguments: tuple[str, ...], code: int, text: str, tmp_path: Path
) -> None:
    (tmp_path / "empty.log").touch()

    found = loom_analyze(tmp_path, *arguments)

    assert found.returncode == code
    assert text in found.stderr
    assert not list(tmp_path.glob("analysis_*"))
