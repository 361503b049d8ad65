"""What `loom tune` makes of a running run that is slow in one way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

import pytest

import loom
from loom.rest_client import Gateway
from loom.rl.tuning.ledger import Decision, Ledger, read
from loom.rl.tuning.target import RunEnded, TunedRun
from loom.rl.tuning.tuner import Tuner
from loom_proxy.local import LocalCluster
from loom_proxy.weaver.client import WeaverProxy
from tests.system.rl.bottlenecks import BOTTLENECKS, run_of

BOUND = 120.0
SEEDS = range(5)
ROUNDS = 3
STEPS = 12
CURED = ("queue", "checkpoint", "generator", "trainer", "straggler")
"""Bottlenecks for which a change of a running run makes steps faster."""


@contextmanager
def tuned(cluster: LocalCluster, folder: Path, bottleneck: str, seed: int) -> Iterator[tuple[Tuner, loom.Job]]:
    """A run with a bottleneck, in a session of its own: its tuner and its session."""
    with loom.connect(cluster.url, cluster.token) as job:
        job.print_logs = False
        run = job.run(run_of(folder, seed, **BOTTLENECKS[bottleneck]).run, detach=True, name="rl")
        try:
            weaver = WeaverProxy(cluster.url, cluster.token)  # not by the driver, which is busy with imports
            until = time.monotonic() + BOUND
            while (found := weaver.replicas().get("orchestrator")) is None or found.session != job.session:
                assert not run.done(), run.exception()
                assert time.monotonic() < until
                time.sleep(0.1)
            gateway = Gateway(cluster.url, cluster.token)
            target = TunedRun(weaver, partial(gateway.logs, job.session, follow=False), job.session)
            yield Tuner(target, Ledger(folder / "tuning", job.session), steps=STEPS, say=print), job
        except RunEnded:
            pytest.fail(f"the run ended: {run.exception(BOUND)}")
        finally:
            run.cancel()


@pytest.fixture(scope="module")
def wrong() -> list[tuple[str, str]]:
    """The wrong diagnoses of all bottlenecks: what there was, and what was found."""
    return []


@pytest.mark.guarantees(
    "diagnosis",
    "Each bottleneck that a real run has is the primary diagnosis, and there is none where nothing is slow",
)
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("bottleneck", BOTTLENECKS)
def test_the_primary_diagnosis_is_right(
    cluster: LocalCluster, tmp_path: Path, bottleneck: str, wrong: list[tuple[str, str]]
) -> None:
    found = []
    for seed in SEEDS:
        with tuned(cluster, tmp_path / str(seed), bottleneck, seed) as (tuner, _):
            found.append(tuner.look()[1].primary)
    print(f"{bottleneck}: {found}")
    wrong += [(bottleneck, one) for one in found if one != bottleneck]

    # Where nothing is slow, nothing is found. In all, 2 of 35 may be wrong, of which no bottleneck may have both.
    assert found.count(bottleneck) >= len(SEEDS) - (bottleneck != "none"), found
    assert len(wrong) <= 2, wrong


@pytest.mark.guarantees("tuning", "The change that answers a diagnosis makes steps faster on a real run")
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("bottleneck", CURED)
def test_a_change_that_answers_the_diagnosis_makes_steps_faster(
    cluster: LocalCluster, tmp_path: Path, bottleneck: str
) -> None:
    gains = []
    for seed in range(ROUNDS):
        with tuned(cluster, tmp_path / str(seed), bottleneck, seed) as (tuner, _):
            (entry,) = tuner.tune(rounds=1)
        assert entry.rule == bottleneck
        assert entry.gain is not None
        gains.append(entry.gain if entry.decision is Decision.KEPT else 0.0)
    assert median(gains) >= 0.1, gains


@pytest.mark.guarantees("tuning", "Where none does, it says so")
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_where_no_change_makes_steps_faster_it_says_so(cluster: LocalCluster, tmp_path: Path) -> None:
    with tuned(cluster, tmp_path / "loading", "loading", 0) as (tuner, _):
        (entry,) = tuner.tune(rounds=1)
    assert (entry.rule, entry.decision, entry.option) == ("loading", Decision.NONE, None)

    with tuned(cluster, tmp_path / "truncation", "truncation", 0) as (tuner, _):
        (entry,) = tuner.tune(rounds=1)
    assert (entry.rule, entry.decision, entry.option, entry.new) == ("truncation", Decision.KEPT, "max_tokens", 2)
    assert entry.expected is None  # it is for whole completions, not for speed


@pytest.mark.guarantees(
    "tuning", "A harmful change is taken back, and every change is in the ledger, also those of others"
)
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_harmful_change_is_taken_back_and_all_changes_are_in_the_ledger(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    with tuned(cluster, tmp_path, "generator", 0) as (tuner, job):
        kept = tuner.attempt(tuner.given("generators", 2), tuner.look()[0])
        job.weaver.update_config("orchestrator", async_level=2).get(BOUND)
        harmful = tuner.attempt(tuner.given("generators", 1), tuner.look()[0])
        config = job.weaver.replica("orchestrator").config

    assert (kept.decision, harmful.decision) == (Decision.KEPT, Decision.TAKEN_BACK), (kept.why, harmful.why)
    assert harmful.gain is not None
    assert harmful.gain < 0
    assert (config["generators"], config["async_level"]) == (2, 2)
    _, entries = read(tmp_path / "tuning" / "ledger.json")
    assert [(entry.option, entry.decision) for entry in entries] == [
        ("generators", Decision.KEPT), ("async_level", Decision.GIVEN), ("generators", Decision.TAKEN_BACK),
    ]  # fmt: skip
    assert all(entry.after is not None and entry.after.reward is not None for entry in entries)
