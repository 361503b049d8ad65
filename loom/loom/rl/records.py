"""`Records`: what the steps of a run were like, in a file."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from loom.rl.settings import StepRecord


class Records:
    """The records of all steps, in a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.all = [record for line in lines if (record := _read(line)) is not None]

    def keep_before(self, step: int) -> None:
        """Forget the steps that are made again."""
        self.all = [one for one in self.all if one.step < step]
        aside = self._path.with_suffix(".new")
        aside.write_text("".join(f"{json.dumps(asdict(one))}\n" for one in self.all))
        aside.replace(self._path)

    def add(self, record: StepRecord) -> None:
        self.all.append(record)
        with self._path.open("a") as file:
            file.write(f"{json.dumps(asdict(record))}\n")


def _read(line: str) -> StepRecord | None:
    """Return the record of a line; None if its program was killed while it wrote it."""
    try:
        return StepRecord(**json.loads(line))
    except (ValueError, TypeError):
        return None
