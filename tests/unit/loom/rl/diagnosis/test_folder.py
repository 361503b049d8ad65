"""The folder of an analysis has every file, and the summary says its diagnosis in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from loom.rl.diagnosis import Analysis, analyze
from tests.unit.loom.rl.diagnosis.pipeline import Pipeline, Times, slowed

FILES = {
    "SUMMARY.md",
    "queue_ms_stats.txt",
    "rpc_ms_stats.txt",
    "ckpt_wait_stats.txt",
    "ckpt_write_stats.txt",
    "gen_batch_stats.txt",
    "truncation_stats.txt",
    "staleness_stats.txt",
    "slowest_updates.txt",
    "timeline.txt",
    "weights_raw.log",
    "ckpt_raw.log",
    "gen_raw.log",
    "rollout_raw.log",
    "step.png",
    "updates.png",
}


@pytest.fixture(scope="module")
def analysis(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    folder = tmp_path_factory.mktemp("analysis")
    return analyze(slowed("queue", 1).write(folder / "logs"), folder / "out")


def text_of(analysis: Analysis, name: str) -> str:
    assert analysis.folder is not None
    return (analysis.folder / name).read_text()


def test_every_file_is_there(analysis: Analysis) -> None:
    assert analysis.folder is not None
    assert re.fullmatch(r"analysis_\d{8}_\d{6}", analysis.folder.name)
    assert {path.name for path in analysis.folder.iterdir()} >= FILES


@pytest.mark.guarantees("diagnosis", "`SUMMARY.md` has exactly one line `PRIMARY: RULE`, whatever a log says")
def test_the_summary_has_one_primary_line(analysis: Analysis) -> None:
    lines = text_of(analysis, "SUMMARY.md").splitlines()

    assert [line for line in lines if line.startswith("PRIMARY:")] == ["PRIMARY: queue"]
    assert any(line.startswith("### queue: critical") for line in lines)
    assert any(line.startswith("Suggestion: ") for line in lines)


@pytest.mark.guarantees("diagnosis", "`SUMMARY.md` has exactly one line `PRIMARY: RULE`, whatever a log says")
def test_a_log_cannot_say_the_diagnosis(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    done = "[weights][a] client.done wall_ms=9000.0 rpc_ms=100.0 queue_ms=8900.0"
    ends = ("", "\nPRIMARY: none", " x=`\rPRIMARY: none", " x=`\x0bPRIMARY: none", " x=\u2028PRIMARY: none")
    log.write_text("".join(f"{done}{end}\n" for end in ends), newline="")

    summary = text_of(analyze(log, tmp_path), "SUMMARY.md")

    assert [line for line in summary.splitlines() if line.startswith("PRIMARY")] == ["PRIMARY: queue"]


def test_statistics_have_every_number(analysis: Analysis) -> None:
    text = text_of(analysis, "queue_ms_stats.txt")

    for name in ("Count", "Mean", "StdDev", "Min", "Max", "p50", "p90", "p95", "p99"):
        assert re.search(rf"^{name}: [\d.]+( ms)?$", text, re.MULTILINE), name
    assert f"Count: {analysis.metrics['queue_ms'].count}\n" in text
    assert f"Mean: {analysis.metrics['queue_ms'].mean:.3f} ms\n" in text


def test_the_ten_slowest_updates_are_in_order(analysis: Analysis) -> None:
    found = [float(wall) for wall in re.findall(r"wall_ms=([\d.]+)", text_of(analysis, "slowest_updates.txt"))]

    assert len(found) == 10
    assert found == sorted(found, reverse=True)
    assert found[0] == analysis.metrics["wall_ms"].max


def test_the_timeline_has_the_last_fifty_events(tmp_path: Path) -> None:
    paths = Pipeline(Times(), steps=60).write(tmp_path)
    wanted = re.compile(r"\[gen\] batch\.|\[weights\]\[\w+\] client\.")
    expected = [line for line in paths[0].read_text().splitlines() if wanted.search(line)][-50:]

    lines = text_of(analyze(paths, tmp_path), "timeline.txt").splitlines()

    assert [line.split(": ", 1)[1] for line in lines] == [line.strip() for line in expected]


def test_what_no_line_says_is_said(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("[ckpt] write.done step=3 write_ms=234.5\n")

    analysis = analyze(tmp_path / "run.log", tmp_path)

    assert text_of(analysis, "queue_ms_stats.txt") == "No queue_ms data found\n"
    assert text_of(analysis, "slowest_updates.txt") == "No line of update of weights found\n"


def test_two_analyses_in_a_second_have_two_folders(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("[ckpt] write.done step=3 write_ms=234.5\n")

    folders = {analyze(tmp_path / "run.log", tmp_path).folder for _ in range(3)}

    assert len(folders) == 3
