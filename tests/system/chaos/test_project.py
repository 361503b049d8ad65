"""The example of a project whose tests break its training: pytest runs it as it is, from a copy."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import EXAMPLES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_the_tests_of_the_example_pass(tmp_path: Path) -> None:
    project = tmp_path / "project"
    shutil.copytree(EXAMPLES / "chaos" / "project", project)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-rA",
        "--rootdir",
        str(project),
        str(project),
    ]

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
    assert "kill_one with seed 3; repeat with --loom-chaos-seed=3" in done.stdout
    assert "sigkill was recovered from within" in done.stdout
