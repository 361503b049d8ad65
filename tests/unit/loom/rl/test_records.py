"""The records of a run's steps are all in their file, also those for which a full disk had no room."""

from __future__ import annotations

import resource
from pathlib import Path

from loom.rl.run import StepRecords
from loom.rl.settings import StepRecord


def record(step: int) -> StepRecord:
    return StepRecord(step, 0.5, 0, 0.0, 0, 8, 1.0)


def test_records_wait_for_room(tmp_path: Path) -> None:
    records = StepRecords(tmp_path / "records.jsonl")
    records.add(record(0))
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (150, most))  # as if the disk were full
        for step in (1, 2, 3):
            records.add(record(step))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
    records.add(record(4))

    assert [one.step for one in StepRecords(tmp_path / "records.jsonl").all] == [0, 1, 2, 3, 4]
