"""`analyze`: reads logs, says where the time goes, and writes the folder of the analysis.

The folder ``analysis_TIMESTAMP`` has the summary, statistics, lines and plots.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

from loom.errors import EmptyLog, WrongArguments
from loom.rl.diagnosis.attribution import attribute
from loom.rl.diagnosis.collector import LAST, Collector, put_together
from loom.rl.diagnosis.diagnosis import diagnose
from loom.rl.diagnosis.evidence import Evidence, Problem, Problems
from loom.rl.diagnosis.foreign_run import ForeignRun, beside
from loom.rl.diagnosis.frameworks import FRAMEWORKS, Framework
from loom.rl.diagnosis.metric_rows import recognize
from loom.rl.diagnosis.related_events import UpdatePaths
from loom.rl.diagnosis.result import Analysis
from loom.rl.diagnosis.rules import RuleName
from loom.rl.diagnosis.scanner import EventBlock, Scanner, is_own
from loom.rl.diagnosis.sources import BrokenSource, LogSource, files, peek
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


def analyze(
    paths: Iterable[str | Path] | str | Path = (),
    out: str | Path | None = None,
    *,
    sources: Iterable[LogSource] = (),
    async_level: int | None = None,
    framework: str | None = None,
    steps: range | None = None,
) -> Analysis:
    """Read logs and return what they say; memory does not grow with their size.

    Args:
        paths: logs in text or JSON lines, compressed by gzip or not; trackers' files; folders with such files.
        out: a folder in which ``analysis_TIMESTAMP`` is written; nothing is written if None.
        sources: more logs, such as `loom.rl.diagnosis.sources.session`.
        async_level: the async level of the run; that of the logs if None.
        framework: the name of the framework that wrote the logs, as in `loom.rl.diagnosis.frameworks`; it is
            recognized by its names if None.
        steps: the steps of a framework's run that count; all if None.

    Raises:
        WrongArguments: there is no log of that name, it may not be read, or there is no such framework.
        EmptyLog: no log has an event.
    """
    given = list(sources)
    paths = [paths] if isinstance(paths, (str, Path)) else list(paths)
    if paths or not given:
        given = [*files(paths), *given]
    broken, contradictions, extracts = Problems(), Problems(), Extracts()
    scanner = Scanner(broken)
    ways = UpdatePaths()
    collectors = Collector(scanner, contradictions, ways), Collector(scanner, contradictions, ways)
    given, written_by = _recognize(given, framework)
    foreign = None if written_by is None else ForeignRun(written_by, broken, steps)
    count = 0
    for source in given:
        count += _read(source, scanner, collectors, extracts, broken, foreign)
    for collector in collectors:
        collector.finish()
    measured = put_together(*collectors)
    if foreign is not None and foreign.rows:
        measured = beside(foreign.measured(), measured)
    events = sum(measured.counts.values())
    names = [source.name for source in given]
    if not events:
        raise EmptyLog(_nothing(names, count, broken, written_by))
    level = next(
        (one for one in (async_level, *(each.async_level for each in (*collectors, scanner))) if one is not None),
        None,
    )
    found = attribute(measured)
    findings = diagnose(measured, found, level)
    over = [finding.name for finding in findings if finding.over_bound]
    stats = {name: metric.series.stats() for name, metric in measured.metrics.items()}
    analysis = Analysis(
        datetime.now(),
        names,
        count,
        events,
        (over[0] if over else RuleName.NONE).value,
        findings,
        {name: one for name, one in stats.items() if one is not None},
        found,
        level,
        broken,
        contradictions,
        measured,
        extracts.lines,
        framework=None if measured.history is None else measured.history.framework.name,
    )
    return analysis if out is None else write(analysis, Path(out))


def _recognize(given: list[LogSource], framework: str | None) -> tuple[list[LogSource], Framework | None]:
    """Return the sources, and the framework that wrote them; None if they are Loom's own, or of an unknown one.

    Raises:
        WrongArguments: there is no framework of that name, or the logs are as much one framework's as another's.
    """
    if framework is not None:
        named = next(
            (one for one in FRAMEWORKS if framework.lower() in one.name.lower().split("/") + [one.name.lower()]),
            None,
        )
        if named is None:
            known = ", ".join(one.name for one in FRAMEWORKS)
            raise WrongArguments(f"no framework {framework!r}; known are {known}")
        return given, named
    peeked, blocks = [], []
    for source in given:
        first, source = peek(source)
        peeked.append(source)
        if first is not None:
            blocks.append(first.data)
    if any(is_own(block) for block in blocks):
        return peeked, None
    found = recognize(blocks)
    best = [one for one, texts in found.items() if len(texts) == len(next(iter(found.values())))]
    if len(best) > 1:
        named_by = "; ".join(f"{one.name} by {', '.join(found[one])}" for one in best)
        raise WrongArguments(
            f"these logs may be of several frameworks: {named_by}. Say which one with --framework NAME"
        )
    return peeked, best[0] if best else None


def _read(
    source: LogSource,
    scanner: Scanner,
    collectors: tuple[Collector, Collector],
    extracts: Extracts,
    broken: Problems,
    foreign: ForeignRun | None = None,
) -> int:
    """Read a source; return the number of its lines."""
    count = 0
    try:
        for block in source.blocks():
            count = block.line - 1 + block.data.count(b"\n") + (not block.data.endswith(b"\n"))
            with _without_garbage_collection():
                for batch, collector in zip(scanner.scan(source.name, block), collectors, strict=True):
                    if batch.order:
                        collector.feed(batch)
                        extracts.feed(batch)
                if foreign is not None:
                    foreign.feed(source.name, block)
    except BrokenSource as error:
        line, why = error.line, error.why
        broken.add(lambda: Problem(source.name, line, why, "the rest is left out"))
    return count


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Leave out the search for cycles, for which every event of a block is looked at again and again: a tenth."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _nothing(names: list[str], lines: int, broken: Problems, framework: Framework | None) -> str:
    where = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    if not lines:
        return f"nothing to analyse: {where} has no line"
    more = f"; {broken.count} are broken, the first one: {broken.first[0]}" if broken.count else ""
    if framework is not None:
        first = ", ".join(name for each in framework.quantities[:6] for name in each.names[:1])
        found = f"none of the {lines} lines of {where} has a metric of {framework.name}, such as {first}"
        return f"nothing to analyse: {found}"
    looked_for = "; ".join(f"of {one.name} {', '.join(one.telling[:3])}" for one in FRAMEWORKS)
    return (
        f"nothing to analyse: none of the {lines} lines of {where} is a JSON line of loom.tracing or a line like "
        f"'[ckpt] write.done step=3 write_ms=234.5'{more}. "
        f"Names of other frameworks were looked for, too: {looked_for}"
    )
