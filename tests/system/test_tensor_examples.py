"""The programs of ``examples/tensors``, run as a newcomer runs them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples" / "tensors"
BOUND = 300

pytestmark = pytest.mark.timeout(BOUND + 30)


def run(name: str, without: tuple[str, ...] = ()) -> str:
    """Run an example, in a Python that has not some modules; return what it prints."""
    hidden = "".join(f"sys.modules[{module!r}] = None; " for module in without)
    code = f"import runpy, sys; {hidden}runpy.run_path({str(EXAMPLES / name)!r}, run_name='__main__')"
    environment = {key: value for key, value in os.environ.items() if key != "LOOM_URL"}
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=BOUND, env=environment, check=False
    )
    assert told.returncode == 0, told.stdout + told.stderr
    return told.stdout


def test_two_matrices_are_multiplied() -> None:
    assert "128 rows of 128" in run("lazy_matmul.py", ("torch", "numpy"))


@pytest.mark.slow
def test_gradients_are_torchs() -> None:
    assert "the largest difference of a gradient" in run("sanity_check.py")


@pytest.mark.slow
def test_a_network_reads_digits() -> None:
    assert "% of the test digits read correctly" in run("mnist_mlp.py")


@pytest.mark.slow
def test_a_small_gpt_learns_letters() -> None:
    assert "step 150" in run("char_transformer.py", ("torch", "numpy"))
