"""The folder of an analysis, ``analysis_TIMESTAMP``: the summary, statistics, lines and plots."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from loom.errors import WrongArguments
from loom.rl.diagnosis.collector import LAST
from loom.rl.diagnosis.evidence import Evidence
from loom.rl.diagnosis.result import Analysis
from loom.rl.diagnosis.scanner import EventBlock
from loom.rl.diagnosis.statistics import Series
from loom.rl.diagnosis.summary import summary

MOST = 2000
"""Lines that are kept of each tag."""


class Extracts:
    """The first lines of each tag: ``weights``, ``ckpt``, ``gen``, ``rollout``, ``train`` and ``step``."""

    def __init__(self) -> None:
        self.lines: dict[str, list[Evidence]] = {}
        self._full: set[str] = set()

    def feed(self, batch: EventBlock) -> None:
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


STATISTICS = {
    "queue_ms_stats.txt": {"queue_ms": "ms"},
    "rpc_ms_stats.txt": {"rpc_ms": "ms", "reload_ms": "ms"},
    "ckpt_wait_stats.txt": {"wait_ms": "ms"},
    "ckpt_write_stats.txt": {"write_ms": "ms"},
    "gen_batch_stats.txt": {"dur_ms": "ms", "completions": "", "inflight": ""},
    "truncation_stats.txt": {"trunc_pct": "%"},
    "staleness_stats.txt": {"staleness": "steps"},
    "train_stats.txt": {"train_ms": "ms", "batch_wait_ms": "ms"},
}
"""The metrics of each file, with their units."""
ALWAYS = {"queue_ms", "rpc_ms", "wait_ms", "write_ms", "dur_ms", "trunc_pct", "staleness", "train_ms"}
"""Metrics whose lack a file says."""


def write(analysis: Analysis, out: Path) -> Analysis:
    """Write an analysis into a new folder in ``out``; return it with the folder.

    Raises:
        WrongArguments: nothing can be written there.
    """
    try:
        folder = _new_folder(out, f"analysis_{analysis.made:%Y%m%d_%H%M%S}")
        analysis = replace(analysis, folder=folder)
        for name, metrics in STATISTICS.items():
            _write(folder / name, _statistics(analysis, metrics))
        _write(folder / "slowest_updates.txt", _lines(analysis.slowest, "update of weights"))
        _write(
            folder / "timeline.txt", _lines(analysis.measured.timeline[-LAST:], "[gen] batch or [weights] client")
        )
        for tag, lines in analysis.extracts.items():
            more = [f"# the first {MOST} lines"] if len(lines) == MOST else []
            _write(folder / f"{tag}_raw.log", [*more, *map(str, lines)])
        pictures: list[str] = []
        if find_spec("matplotlib") is not None:
            from loom.rl.diagnosis.plots import draw

            pictures = draw(analysis, folder)
        (folder / "SUMMARY.md").write_text(summary(analysis, pictures), encoding="utf-8")
    except OSError as error:
        raise WrongArguments(f"cannot write the analysis to {out}: {error.strerror or error}") from error
    return analysis


def _new_folder(out: Path, name: str) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = out / (name if number == 1 else f"{name}_{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def _write(path: Path, lines: Iterable[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _lines(lines: list[Evidence], what: str) -> list[str]:
    return [str(line) for line in lines] or [f"No line of {what} found"]


def _statistics(analysis: Analysis, metrics: dict[str, str]) -> list[str]:
    lines = []
    for name, unit in metrics.items():
        stats = analysis.metrics.get(name)
        if stats is None:
            lines += [f"No {name} data found"] if name in ALWAYS else []
            continue
        series: Series = analysis.measured.metrics[name].series
        lines += [f"===== {name} =====", f"Count: {stats.count}"]
        named = {"mean": "Mean", "stddev": "StdDev", "min": "Min", "max": "Max"}
        for field, value in stats.as_dict().items():
            if field != "count":
                near = "" if series.exact or field in named else " (within 0.5 %)"
                lines.append(f"{named.get(field, field)}: {value:.3f} {unit}".rstrip() + near)
    return lines
