"""The example timeline of the seed, as three logs, gives the seed's numbers."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from loom.rl.diagnosis import Analysis, analyze
from loom.tracing.lines import FORMS, parse_line

SEED = Path(__file__).parent / "seed"
LOGS = [SEED / f"{name}.log" for name in ("orchestrator", "server", "trainer")]

NUMBERS = {
    "wall_ms": 1222.0,
    "rpc_ms": 1219.0,
    "queue_ms": 3.0,
    "wait_ms": 232.1,
    "write_ms": 234.5,
    "dur_ms": 2109.0,
    "trunc_pct": 5.2,
    "staleness": 2,
    "inflight": 96,
    "completions": 64,
    "step_s": 3.570,
}


def check_numbers(analysis: Analysis) -> None:
    for name, number in NUMBERS.items():
        stats = analysis.metrics[name]
        assert (stats.count, stats.mean, stats.stddev, stats.min, stats.max) == (1, number, 0.0, number, number), (
            name
        )
        assert stats.p50 == stats.p99 == number


@pytest.mark.guarantees("diagnosis", "The seed's three logs give the seed's numbers")
def test_the_three_logs_give_the_numbers_of_the_seed() -> None:
    analysis = analyze(LOGS)

    check_numbers(analysis)
    assert analysis.broken.count == 0
    assert analysis.events == 14
    assert analysis.async_level == 2


def test_nothing_is_diagnosed() -> None:
    assert analyze(LOGS).primary == "none"


def test_the_barrier_that_is_not_hit_is_named() -> None:
    analysis = analyze(LOGS)

    (found,) = analysis.contradictions.first
    assert (found.file, found.line) == (str(LOGS[0]), 3)
    assert "Hit async barrier (5-3 > 2)" in found.text
    assert "not above async_level" in found.why


def test_the_parts_of_the_way_are_known() -> None:
    ways = analyze(LOGS).measured.ways

    assert [round(part.mean, 6) for part in (ways.accept, ways.handle, ways.back)] == [1.0, 1.0, 1.0]


def colours(text: str) -> bytes:
    return text.replace("[", "\x1b[32m[\x1b[0m").replace("ms=", "\x1b[1mms=").encode()


FORMATS: dict[str, Callable[[str], bytes]] = {
    "timestamps": lambda text: "".join(
        f"2026-01-01T00:00:00Z INFO x: {line}\n" for line in text.splitlines()
    ).encode(),
    "no prefix": lambda text: "".join(f"{line[28:]}\n" for line in text.splitlines()).encode(),
    "CRLF": lambda text: text.replace("\n", "\r\n").encode(),
    "no last line end": lambda text: text.rstrip().encode(),
    "colours": colours,
    "parentheses": lambda text: (
        text.replace("wall_ms=1222.0 rpc", "(wall_ms=1222.0 rpc")
        .replace("queue_ms=3.0", "queue_ms=3.0)")
        .replace("client.send t", "client.send (url=http://h:8000/ path=/w/step_3) t")
        .replace("write.done step=3 write_ms=234.5", "write.done (step=3 write_ms=234.5)")
        .encode()
    ),
    "gzip": lambda text: gzip.compress(text.encode()),
    "other lines": lambda text: (
        ("GET /v1/completions 200 [gen] is busy\n" * 3).join(text.splitlines(True)).encode()
    ),
    "loom logs": lambda text: "".join(f"[driver/hosts=0] {line}\n" for line in text.splitlines()).encode(),
    "loom logs --json": lambda text: "".join(
        json.dumps({"time": 1.0, "mesh": "driver", "text": line}) + "\n" for line in text.splitlines()
    ).encode(),
    "bytes that are no text": lambda text: b"\xff\x00\n".join(text.encode().splitlines(True)),
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_numbers_are_the_same_in_other_formats(name: str, tmp_path: Path) -> None:
    for log in LOGS:
        (tmp_path / log.name).write_bytes(FORMATS[name](log.read_text()))

    analysis = analyze(tmp_path)

    check_numbers(analysis)
    assert analysis.broken.count == 0


def as_json(text: str) -> str:
    """The log as JSON lines of `loom.tracing`."""
    records = []
    for line in text.splitlines():
        if (said := parse_line(line)) is not None:
            records.append({"name": said.name, "t": float(line[:5]), "trace": said.trace, **said.fields})
    return "".join(json.dumps(record) + "\n" for record in records)


def test_json_lines_give_the_same(tmp_path: Path) -> None:
    for log in LOGS:
        (tmp_path / f"{log.stem}.jsonl").write_text(as_json(log.read_text()))

    analysis = analyze(tmp_path, async_level=2)

    check_numbers(analysis)
    assert analysis.primary == "none"
    assert len(analysis.measured.timeline) == 4


def test_an_event_in_a_log_and_in_json_counts_once(tmp_path: Path) -> None:
    for log in LOGS:
        (tmp_path / f"{log.stem}.jsonl").write_text(as_json(log.read_text()))

    check_numbers(analyze([*LOGS, tmp_path]))


def test_every_event_of_the_table_is_found_by_the_quick_expression() -> None:
    from loom.rl.diagnosis.evidence import Problems
    from loom.rl.diagnosis.scanner import KEPT, Scanner
    from loom.rl.diagnosis.sources import Block
    from loom.tracing.lines import format_line

    values = {"url": "http://h/x", "path": "/x", "op": "update_weights"}
    lines = []
    for name, form in FORMS.items():
        fields = {each.name: values.get(each.name, 7) for each in form.fields}
        lines.append(f"12:00 INFO {format_line(name, 'abc123', fields)}")
    scanner = Scanner(Problems())
    scanner._parse = lambda text, position, lines: pytest.fail(text.decode())  # type: ignore[method-assign]

    found, _ = scanner.scan("x", Block("\n".join(lines).encode(), 1))

    assert found.order == list(FORMS)
    for name, kept in KEPT.items():
        _, (trace,), *fields = found.columns[name]
        assert trace == (b"abc123" if name.startswith("weights.") else None)
        for each, (value,) in zip(kept, fields, strict=True):
            said = value.decode()
            assert said == values[each.name] if each.digits is None else float(said) == 7
