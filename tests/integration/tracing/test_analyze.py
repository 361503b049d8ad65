"""``loom analyze --session`` reads what a session's processes print, and JSON lines beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import loom
from loom_proxy.local import LocalCluster

BOUND = 60.0

LINES = """\
Step 5 begins
[weights][abc123] client.send t=0.236
[weights][abc123] client.done wall_ms=29653.1 rpc_ms=1200.0 queue_ms=28453.1
[ckpt] write.done step=3
Step 5 complete (wall=31.000s)
"""


def say(text: str) -> None:
    print(text, flush=True)


def loom_analyze(cluster: LocalCluster, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LOOM_URL": cluster.url, "LOOM_TOKEN": cluster.token}
    return subprocess.run(
        [sys.executable, "-c", "from loom.cli import main; main()", "analyze", *options],
        env=environment, capture_output=True, text=True, timeout=BOUND, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_it_reads_the_log_of_a_session(job: loom.Job, cluster: LocalCluster, tmp_path: Path) -> None:
    job.print_logs = False
    job.run(say, LINES)
    job.flush_logs(BOUND)
    beside = tmp_path / "trainer.jsonl"
    beside.write_text('{"name": "train.step.done", "t": 1.0, "step": 5, "rank": 0, "dur_ms": 900.0}\n')

    found = loom_analyze(cluster, str(beside), "--session", job.session, "--out", str(tmp_path))

    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[0] == "PRIMARY: queue"
    assert "1 broken line is left out" in found.stderr
    (folder,) = tmp_path.glob("analysis_*")
    summary = (folder / "SUMMARY.md").read_text()
    assert summary.splitlines().count("PRIMARY: queue") == 1
    assert f"`session {job.session}:3: [weights][abc123] client.done" in summary
    assert f"`session {job.session}:4: ckpt.write.done without write_ms" in summary
    assert "Training step of a rank (train_ms)" in summary


def test_an_unknown_session_is_an_error_of_its_own(cluster: LocalCluster, tmp_path: Path) -> None:
    found = loom_analyze(cluster, "--session", "nobody", "--out", str(tmp_path))

    assert found.returncode == 8
    assert "'nobody'" in found.stderr
    assert not list(tmp_path.iterdir())


def test_a_session_that_printed_nothing_is_an_error(job: loom.Job, cluster: LocalCluster, tmp_path: Path) -> None:
    found = loom_analyze(cluster, "--session", job.session, "--out", str(tmp_path))

    assert found.returncode == 1
    assert f"nothing to analyse: session {job.session} has no line" in found.stderr
