"""Broken lines are named and left out; logs that say nothing, and files that are not there, are errors."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from loom.errors import EmptyLog, WrongArguments
from loom.rl.diagnosis import analyze
from loom.rl.diagnosis.sources import LONGEST

GOOD = "[ckpt] write.done step=3 write_ms=234.5\n"


@pytest.mark.guarantees("diagnosis", "Broken lines are named and left out")
@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("[ckpt] write.done step=3 write_ms=fast", "ckpt.write.done with write_ms='fast'"),
        ("[ckpt] write.done step=3", "ckpt.write.done without write_ms"),
        ("[ckpt] write.done step=3 write_ms=nan", "ckpt.write.done with write_ms='nan'"),
        ("[ckpt] write.done step=3 write_ms=-1.0", "ckpt.write.done with write_ms below zero"),
        ("[ckpt] write.do", "no such event, or a line that was cut off"),
        ("[weights][abc1", "no such event, or a line that was cut off"),
        ("[gen] batch.dun completions=64 dur_ms=1.0 inflight=1", "no such event, or a line that was cut off"),
        ("[weights][abc] client.done wall_ms=1.0 rpc_ms=", "weights.client.done without rpc_ms"),
        ("Step 5 complete (wall=", "other words than expected in 'Step 5 complete (wall='"),
        ('{"name": "ckpt.write.done", "step": 3, "wri', "this is no JSON"),
        ('{"name": "ckpt.write.done", "step": 3, "write_ms": NaN}', "ckpt.write.done with write_ms=nan"),
        ('{"name": "ckpt.write.done", "step": 3, "write_ms": true}', "ckpt.write.done with write_ms=True"),
        ('{"name": "ckpt.write.done", "write_ms": 3}', "ckpt.write.done without step"),
    ],
)
def test_a_broken_line_is_named_and_left_out(line: str, why: str, tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text(f"hello\n{GOOD}{line}\n{GOOD}")

    analysis = analyze(log)

    (found,) = analysis.broken.first
    assert (found.file, found.line, found.why, found.text) == (str(log), 3, why, line)
    assert analysis.metrics["write_ms"].count == 2
    assert analysis.metrics["write_ms"].max == 234.5


@pytest.mark.parametrize(
    "line",
    [
        "[weights] loading shard 1 of 3",
        "[gen] 3 requests",
        "Step 5 is done",
        "{'loss': 3}",
        "{}",
        "[1, 2]",
        "[gen]x",
    ],
)
def test_lines_of_others_are_not_broken(line: str, tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text(f"{GOOD}{line}\n")

    assert analyze(log).broken.count == 0


def test_the_first_broken_lines_are_named_and_all_are_counted(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text(GOOD + "[ckpt] write.done step=3\n" * 50)

    analysis = analyze(log, tmp_path)

    assert analysis.broken.count == 50
    assert [each.line for each in analysis.broken.first] == list(range(2, 22))
    assert analysis.folder is not None
    summary = (analysis.folder / "SUMMARY.md").read_text()
    assert "## Broken lines: 50" in summary
    assert f"`{log}:21: ckpt.write.done without write_ms: [ckpt] write.done step=3`" in summary
    assert f"{log}:22:" not in summary


def test_a_compressed_file_that_is_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    lines = [f"[ckpt] write.done step={step} write_ms={step * 7919 % 1000}.5\n" for step in range(200_000)]
    log = tmp_path / "run.log.gz"
    log.write_bytes(gzip.compress("".join(lines).encode())[:-200_000])

    analysis = analyze(log)

    assert analysis.broken.count >= 1
    assert any(each.why == "the compressed file is cut off or damaged" for each in analysis.broken.first)
    assert 1000 < analysis.metrics["write_ms"].count < 200_000


def test_a_line_without_end_takes_no_memory_and_lines_after_it_are_found(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text(GOOD + "x" * (3 * LONGEST) + "\n" + GOOD + "y" * (2 * LONGEST))

    analysis = analyze(log)

    assert analysis.metrics["write_ms"].count == 2
    assert [line.line for line in analysis.measured.metrics["write_ms"].largest.lines()] == [1, 3]


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WrongArguments, match=r"no log .*missing\.log: there is no such file"):
        analyze(tmp_path / "missing.log")


def test_no_file_at_all_is_an_error() -> None:
    with pytest.raises(WrongArguments, match="no log to read"):
        analyze([])


def test_a_folder_without_logs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WrongArguments, match="no log in the folder"):
        analyze(tmp_path)


@pytest.mark.parametrize(("text", "why"), [("", "has no line"), ("hello\n", "none of the 1 lines")])
def test_a_log_without_events_is_an_error(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text(text)

    with pytest.raises(EmptyLog, match=why):
        analyze(tmp_path)


def test_a_log_of_broken_lines_only_is_an_error_that_names_one(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("[ckpt] write.done step=3\n")

    with pytest.raises(EmptyLog, match=r"1 are broken, the first one: .*without write_ms"):
        analyze(tmp_path)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text(GOOD)

    with pytest.raises(WrongArguments, match="cannot write the analysis to"):
        analyze(tmp_path / "run.log", tmp_path / "run.log")


def test_a_file_that_is_named_twice_counts_once(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text(GOOD)

    assert analyze([tmp_path, tmp_path / "run.log"]).metrics["write_ms"].count == 1


def test_json_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_text(GOOD + json.dumps({"name": "load", "t": 1.0, "dur_ms": 3}) + "\n")

    analysis = analyze(tmp_path)

    assert (analysis.events, analysis.broken.count) == (1, 0)
