"""What CI checks beside tests: subjects of commits, and every Python that Loom supports."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.paths import ROOT

SCRIPT = ROOT / ".ci/commit-subjects"
loader = importlib.machinery.SourceFileLoader("commit_subjects", str(SCRIPT))
spec = importlib.util.spec_from_loader("commit_subjects", loader)
assert spec is not None
subjects = importlib.util.module_from_spec(spec)
sys.dont_write_bytecode, written = True, sys.dont_write_bytecode
loader.exec_module(subjects)
sys.dont_write_bytecode = written


@pytest.mark.parametrize(
    "subject",
    [
        "Keep a session alive while a run goes on",
        "Pass on whole lines",
        "Ping a host",
        "String names together",
        "Bring a lost host back",
        "Feed the stream",
        "Address a rank by its name",
        "Embed the page",
        "Focus on the newest run",
        "Use one splitter of frames",
        "Close what nobody takes",
        "Merge branch 'main'",
        "fixup! adds nothing.",
    ],
)
def test_an_imperative_has_no_fault(subject: str) -> None:
    assert subjects.faults(subject) == []


@pytest.mark.parametrize(
    "subject",
    [
        "A session lives while a run goes on",
        "The page says why",
        "What a session leaves is removed",
        "Added a test",
        "Adding a test",
        "Adds a test",
        "Tests of the wire",
        "keep a session alive",
        "",
    ],
)
def test_a_subject_without_an_imperative_is_refused(subject: str) -> None:
    assert "imperative" in str(subjects.faults(subject))


def test_the_length_and_a_full_stop_are_faults() -> None:
    assert subjects.faults("Keep " + "x" * 67) == []
    (fault,) = subjects.faults("Keep " + "x" * 68)
    assert "73 letters" in fault
    assert subjects.faults("Keep it.") == ["it ends with a full stop"]


def test_the_hook_reads_the_message_that_is_written(tmp_path: Path) -> None:
    message = tmp_path / "COMMIT_EDITMSG"
    message.write_text("# a comment\nAdded a test\n\nbody\n")
    refused = subprocess.run([SCRIPT, message], capture_output=True, text=True, timeout=30)
    assert refused.returncode == 1
    assert "'Added a test': it begins with no imperative" in refused.stderr
    message.write_text("Add a test\n")
    assert subprocess.run([SCRIPT, message], timeout=30).returncode == 0


def test_the_pipeline_runs_on_every_python_that_the_package_names() -> None:
    named = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    pipeline = yaml.safe_load((ROOT / ".github/workflows/ci.yaml").read_text())
    assert pipeline["jobs"]["run"]["strategy"]["matrix"]["python"] == named
