"""`Records`: what the steps of a run were like, in a file."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path

from loom.rl.settings import StepRecord

logger = logging.getLogger(__name__)


class Records:
    """The records of all steps, in a file of JSON lines. Those that a full disk does not take follow later."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.all = [record for line in lines if (record := _read(line)) is not None]
        self._behind = False  # whether the file lacks some of them, or has one in part

    def keep_before(self, step: int) -> None:
        """Forget the steps that are made again."""
        self.all = [one for one in self.all if one.step < step]
        self._write_all()

    def _write_all(self) -> None:
        aside = self._path.with_suffix(".new")
        aside.write_text("".join(f"{json.dumps(asdict(one))}\n" for one in self.all))
        aside.replace(self._path)

    def add(self, record: StepRecord) -> None:
        self.all.append(record)
        try:
            if self._behind:
                self._write_all()
            else:
                with self._path.open("a") as file:
                    file.write(f"{json.dumps(asdict(record))}\n")
        except OSError as error:
            if not self._behind:
                logger.warning("the steps' records wait until %s has room: %s", self._path, error)
            self._behind = True
        else:
            self._behind = False


def _read(line: str) -> StepRecord | None:
    """Return the record of a line; None if its program was killed while it wrote it."""
    try:
        return StepRecord(**json.loads(line))
    except (ValueError, TypeError):
        return None
