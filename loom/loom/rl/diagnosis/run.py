"""`analyze`: reads logs and says where the time goes."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from loom.errors import EmptyLog
from loom.rl.diagnosis.attribution import attribute
from loom.rl.diagnosis.collector import Collector, put_together
from loom.rl.diagnosis.diagnosis import diagnose
from loom.rl.diagnosis.evidence import Problem, Problems
from loom.rl.diagnosis.folder import Extracts, write
from loom.rl.diagnosis.result import Analysis
from loom.rl.diagnosis.rules import RuleName
from loom.rl.diagnosis.scanner import Scanner
from loom.rl.diagnosis.sources import BrokenSource, LogSource, files


def analyze(
    paths: Iterable[str | Path] | str | Path = (),
    out: str | Path | None = None,
    *,
    sources: Iterable[LogSource] = (),
    async_level: int | None = None,
) -> Analysis:
    """Read logs and return what they say; memory does not grow with their size.

    Args:
        paths: logs in text or JSON lines, compressed by gzip or not, and folders with such files.
        out: a folder in which ``analysis_TIMESTAMP`` is written; nothing is written if None.
        sources: more logs, such as `loom.rl.diagnosis.sources.session`.
        async_level: the async level of the run; that of the logs if None.

    Raises:
        WrongArguments: there is no log of that name, or it may not be read.
        EmptyLog: no log has an event.
    """
    given = list(sources)
    paths = [paths] if isinstance(paths, (str, Path)) else list(paths)
    if paths or not given:
        given = [*files(paths), *given]
    broken, contradictions, extracts = Problems(), Problems(), Extracts()
    scanner = Scanner(broken)
    collectors = Collector(scanner, contradictions), Collector(scanner, contradictions)
    count = 0
    for source in given:
        count += _read(source, scanner, collectors, extracts, broken)
    for collector in collectors:
        collector.finish()
    measured = put_together(*collectors)
    events = sum(measured.counts.values())
    names = [source.name for source in given]
    if not events:
        raise EmptyLog(_nothing(names, count, broken))
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
    )
    return analysis if out is None else write(analysis, Path(out))


def _read(
    source: LogSource,
    scanner: Scanner,
    collectors: tuple[Collector, Collector],
    extracts: Extracts,
    broken: Problems,
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


def _nothing(names: list[str], lines: int, broken: Problems) -> str:
    where = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    if not lines:
        return f"nothing to analyse: {where} has no line"
    more = f"; {broken.count} are broken, the first one: {broken.first[0]}" if broken.count else ""
    return (
        f"nothing to analyse: none of the {lines} lines of {where} is a JSON line of loom.tracing or a line like "
        f"'[ckpt] write.done step=3 write_ms=234.5'{more}"
    )
