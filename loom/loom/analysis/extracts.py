"""The first lines of each kind of event as they stand in the logs, for people who want to read on."""

from __future__ import annotations

from loom.analysis.evidence import Evidence
from loom.analysis.scanner import Batch

MOST = 2000
"""Lines that are kept of each tag."""


class Extracts:
    """The first lines of each tag: ``weights``, ``ckpt``, ``gen``, ``rollout``, ``train`` and ``step``."""

    def __init__(self) -> None:
        self.lines: dict[str, list[Evidence]] = {}
        self._full: set[str] = set()

    def take(self, batch: Batch) -> None:
        """Keep lines of a block, as long as there is room."""
        names = [name for name in batch.columns if _tag(name) not in self._full]
        places = [
            (position, index, name)
            for name in names
            for index, position in enumerate(batch.columns[name][0][:MOST])
        ]
        for _, index, name in sorted(places):
            tag = _tag(name)
            kept = self.lines.setdefault(tag, [])
            if len(kept) < MOST:
                kept.append(batch.evidence(name, index))
            else:
                self._full.add(tag)


def _tag(name: str) -> str:
    tag = name.partition(".")[0]
    return "step" if tag == "barrier" else tag
