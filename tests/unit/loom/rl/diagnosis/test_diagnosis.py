"""The diagnosis is right for each bottleneck of a simulated pipeline, and there is none where nothing is slow."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from loom.rl.diagnosis import analyze
from loom.rl.diagnosis.rules import FOREIGN_RULES, RULES, RuleName
from tests.unit.loom.rl.diagnosis.pipeline import BOTTLENECKS, Pipeline, Times, ordinary, slowed

SEEDS = range(5)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("bottleneck", [*BOTTLENECKS, "staleness", "contention"])
def test_a_bottleneck_is_found(bottleneck: str, seed: int, tmp_path: Path) -> None:
    analysis = analyze(slowed(bottleneck, seed).write(tmp_path))

    assert analysis.primary == bottleneck
    (first, *_) = analysis.findings
    assert first.name.value == bottleneck
    assert first.evidence


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_found_where_nothing_is_slow(seed: int, tmp_path: Path) -> None:
    assert analyze(ordinary(seed).write(tmp_path)).primary == "none"


@pytest.mark.parametrize("async_level", [0, 1, 2])
def test_long_steps_that_keep_each_other_busy_are_no_finding(async_level: int, tmp_path: Path) -> None:
    times = Times(queue=20, rpc=900, batch=20_000, train=19_000, write=600)

    assert analyze(Pipeline(times, async_level=async_level).write(tmp_path)).primary == "none"


def test_a_slow_start_is_no_finding(tmp_path: Path) -> None:
    pipeline = ordinary(1)
    assert pipeline.starts_slowly

    assert analyze(pipeline.write(tmp_path)).primary == "none"


@pytest.mark.parametrize("async_level", [0, 1, 2])
@pytest.mark.parametrize("slow", ["train", "batch"])
def test_the_slower_side_is_found_in_a_short_run_that_starts_slowly(
    slow: str, async_level: int, tmp_path: Path
) -> None:
    times = replace(Times(), **{slow: 3000})

    analysis = analyze(Pipeline(times, steps=12, async_level=async_level).write(tmp_path))

    assert analysis.primary == {"train": "trainer", "batch": "generator"}[slow]


def test_a_straggler_is_named_with_its_lead(tmp_path: Path) -> None:
    times = Times(train=1000, slow_rank=2, lead=3000)

    analysis = analyze(Pipeline(times, ranks=4).write(tmp_path))

    straggler = analysis.attribution.training.straggler
    assert straggler is not None
    assert straggler.rank == 2
    assert straggler.lead_ms == pytest.approx(3000, rel=0.1)
    assert analysis.findings[0].details[0].startswith("Rank 2 takes ")
    assert all("rank=2" in line.text for line in analysis.findings[0].evidence)


def test_the_larger_loss_comes_first(tmp_path: Path) -> None:
    times = Times(queue=6000, rpc=12_000)

    analysis = analyze(Pipeline(times).write(tmp_path))

    assert [finding.name.value for finding in analysis.findings if finding.over_bound] == ["loading", "queue"]


def test_quality_counts_only_if_no_time_is_lost(tmp_path: Path) -> None:
    times = Times(queue=6000, truncated=60)

    analysis = analyze(Pipeline(times).write(tmp_path))

    assert [finding.name.value for finding in analysis.findings if finding.over_bound] == ["queue", "truncation"]


def test_the_evidence_has_lines_and_trace_ids(tmp_path: Path) -> None:
    analysis = analyze(Pipeline(Times(queue=6000)).write(tmp_path))

    (finding, *_) = analysis.findings
    for line in finding.evidence:
        text = Path(line.file).read_text().splitlines()[line.line - 1]
        assert line.text == text.strip()
        assert f"[weights][{line.trace}] client.done" in text
    assert "Most of it is before the server" in finding.details[0]


@pytest.mark.parametrize(
    ("pool_ms", "recv", "place"),
    [
        (2400, 2.5, "in the client's pool"),
        (5, 2.5, "between the pool and the server's first line"),
        (5, 0.1, "in the server before the engine"),
    ],
)
def test_the_place_is_named_by_json_of_the_client_and_the_log_of_a_server_behind_another(
    pool_ms: float, recv: float, place: str, tmp_path: Path
) -> None:
    numbers = {"wall_ms": 3000.0, "rpc_ms": 490.0, "queue_ms": 2510.0, "pool_ms": pool_ms}
    events = [
        {"name": "weights.client.send", "t": 100.0, "trace": "abc"},
        {"name": "weights.client.done", "t": 103.0, "trace": "abc", **numbers},
        # The server that has the order first, and gives it to the engine's.
        {"name": "weights.server.recv", "t": 100.0, "trace": "abc"},
        {"name": "weights.rpc.start", "t": 100.001, "trace": "abc"},
        {"name": "weights.rpc.done", "t": 102.999, "trace": "abc", "rpc_ms": 490.0},
    ]
    (tmp_path / "events.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in events))
    (tmp_path / "server.log").write_text(
        f"[weights][abc] server.recv path=/pause t={100 + recv}\n"
        "(ApiServer_1 pid=7) [weights][abc] rpc.start op=pause t=102.5\n"
        "[weights][abc] rpc.done op=reload_weights t=102.990 rpc_ms=490.0\n"
    )

    for logs in ("events.jsonl", "server.log"), ("server.log", "events.jsonl"):
        finding, *_ = analyze([tmp_path / name for name in logs]).findings
        assert finding.name.value == "queue"
        assert f"Most of it is {place}" in finding.details[0]
        assert "means of 1 updates" in finding.details[0]


def test_an_orchestrators_log_alone_is_enough_for_its_own_losses(tmp_path: Path) -> None:
    for bottleneck in ("queue", "loading", "checkpoint", "truncation"):
        orchestrator, *_ = slowed(bottleneck, 3).write(tmp_path)
        assert orchestrator.name == "orchestrator.log"

        assert analyze(orchestrator).primary == bottleneck


def test_lines_of_updates_alone_are_enough_for_the_queue(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text("[weights][abc123] client.done wall_ms=29653.1 rpc_ms=1200.0 queue_ms=28453.1\n" * 5)

    assert analyze(log).primary == "queue"


def test_generation_is_found_without_the_trainers_log(tmp_path: Path) -> None:
    orchestrator, *_ = Pipeline(Times(batch=15_000)).write(tmp_path)

    assert analyze(orchestrator).primary == "generator"


def test_a_trainers_log_alone_shows_its_own_losses(tmp_path: Path) -> None:
    for bottleneck in ("checkpoint", "straggler"):
        trainer = next(path for path in slowed(bottleneck, 2).write(tmp_path) if path.stem == "trainer")

        assert analyze(trainer).primary == bottleneck


def test_updates_of_several_generators_at_the_same_time_count_once(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    sends = "".join(f"[weights][a{one}] client.send t=1.0\n" for one in range(4))
    dones = "".join(f"[weights][a{one}] client.done wall_ms=300.0 rpc_ms=290.0 queue_ms=10.0\n" for one in range(4))
    log.write_text(f"Step 1 begins\n{sends}{dones}Step 1 complete (wall=1.000s)\n" * 3)

    loop = analyze(log).attribution.loop

    assert (loop.wall_ms, loop.rpc_ms, loop.queue_ms) == (1000.0, 290.0, 10.0)


def test_a_finding_that_explains_another_comes_first(tmp_path: Path) -> None:
    times = Times(queue=2000, batch=9000)

    analysis = analyze(Pipeline(times).write(tmp_path))

    assert analysis.primary == "queue"
    generator = next(finding for finding in analysis.findings if finding.name is RuleName.GENERATOR)
    assert not generator.over_bound
    assert "comes after `queue`" in generator.details[-1]


def test_staleness_is_judged_by_the_async_level_that_is_said(tmp_path: Path) -> None:
    paths = Pipeline(Times(behind=1), async_level=1).write(tmp_path)

    assert analyze(paths).primary == "staleness"
    assert analyze(paths, async_level=2).primary == "none"


def test_every_rule_has_a_suggestion_and_thresholds() -> None:
    rules = (*RULES, *FOREIGN_RULES)
    assert {rule.name for rule in rules} == set(RuleName) - {RuleName.NONE}
    for rule in rules:
        assert rule.bounds
        assert rule.says.endswith(".")
        assert rule.suggests.endswith(".")
        assert list(rule.bounds) == sorted(rule.bounds, key=lambda bound: bound.over, reverse=True)


def test_a_truncation_that_is_over_is_no_finding(tmp_path: Path) -> None:
    early, late = Pipeline(Times(truncated=60)), Pipeline(replace(Times(), truncated=2))
    text = "".join(
        pipeline.write(tmp_path / str(index))[0].read_text() for index, pipeline in enumerate((early, late))
    )
    (tmp_path / "run.log").write_text(text)

    assert analyze(tmp_path / "run.log").primary == "none"
