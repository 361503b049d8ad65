"""Variables that come after the start of a process reach what it has imported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.processes import run

PROGRAM = """
import sys
if {imported}: import loom.tracing
from loom.process.late_environment import add_to_environment
add_to_environment({{"LOOM_TIMING_DIR": sys.argv[1], "LOOM_TIMING_ROLE": "generator", "OTHER": "1"}})
import os, loom.tracing
loom.tracing.event("it begins")
assert os.environ["OTHER"] == "1"
"""


@pytest.mark.parametrize("imported", [False, True])
def test_the_recorder_of_spans_takes_over_its_variables(tmp_path: Path, imported: bool) -> None:
    done = run("-c", PROGRAM.format(imported=imported), str(tmp_path))

    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("*.jsonl")
    assert json.loads(file.read_text())["role"] == "generator"
