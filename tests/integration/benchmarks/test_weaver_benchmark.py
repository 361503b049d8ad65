"""The benchmarks of threadlet and weaver run and add up; how fast anything is, they say, and no test does."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

import loom
from tests.benchmarks import steering, threadlet, weaver
from tests.benchmarks.budgets import BudgetReport
from tests.benchmarks.report import Ratio
from tests.benchmarks.steering import Commands
from tests.benchmarks.threadlet import CallTimes, ThreadletPlan, Training
from tests.benchmarks.weaver import Busy, Load, Steady, WeaverPlan

PLAN = WeaverPlan(
    rounds=1,
    seconds=0.3,
    per_second=500,
    busy_replicas=5,
    replicas=(4, 20),
    steady=6.0,
    window=3.0,
    commands=3,
    kills=1,
)


def busy(**changed: float) -> Busy:
    """A round within all budgets, but for what is changed."""
    figures = {"cpu": 0.2, "p99": 0.05, "seconds": 10.0, **changed}
    load = Load(200_000, figures["seconds"], figures["cpu"] * 10, 1.0)
    few, many = (
        Load(count * 10, 10.0, count * 20e-6 * 10 * factor, 1.0, (figures["p99"],) * 10, 0.5)
        for count, factor in ((100, 1.0), (10_000, figures.get("growth", 1.0)))
    )
    return Busy(load, {100: few, 10_000: many})


def weaver_report(*rounds: Busy, applied: float = 0.005, failed: float = 0.1, stored: float = 0.99) -> BudgetReport:
    plan = WeaverPlan(rounds=len(rounds), replicas=(100, 10_000))
    commands = [Commands((applied,) * 3, (2 * applied,) * 3) for _ in rounds]
    steady = Steady((1.0, stored, 1.0), (0.3, 0.3, 0.3), (0.001, 0.02))
    return weaver.load_report(plan, "command", rounds, commands, [[0.01, failed] for _ in rounds], {}, steady)


def missed(report: BudgetReport) -> list[Ratio]:
    return [each for each in report.budgets if not each.met]


def test_a_weaver_within_its_budgets() -> None:
    assert weaver_report(busy()).within_budgets


@pytest.mark.parametrize(
    ("report", "name"),
    [
        (weaver_report(busy(cpu=1.1)), "status reports"),
        (weaver_report(busy(seconds=11.0)), "status reports stored"),
        (weaver_report(busy(p99=0.11)), "command, p99, 10,000 replicas"),
        (weaver_report(busy(growth=1.3)), "CPU of a report"),
        (weaver_report(busy(), stored=0.94), "reports stored, 10,000 replicas"),
        (weaver_report(busy(), applied=0.021), "command to applied, p50"),
        (weaver_report(busy(), failed=0.6), "dead to failed, median"),
    ],
)
def test_each_budget_of_the_weaver_can_be_missed(report: BudgetReport, name: str) -> None:
    assert not report.within_budgets
    assert [each.name for each in missed(report)] == [name]


def test_the_median_over_rounds_decides() -> None:
    assert weaver_report(busy(p99=9.0), busy(), busy()).within_budgets
    assert not weaver_report(busy(p99=9.0), busy(), busy(p99=9.0)).within_budgets


def test_the_threadlet_beside_its_budgets() -> None:
    def report(publish: float, check: float, watched: float, block: float = 1.0) -> BudgetReport:
        calls = [CallTimes([publish] * 4, [check] * 4)]
        plan = ThreadletPlan()
        demo = [Training(*one, procs=plan.procs) for one in (("calls", 1.0, watched), ("block", 1.0, block))]
        training = [*demo, *(Training(way, 1.0, 1.02) for way in threadlet.WAYS)] * 4
        return threadlet.threadlet_report(plan, "command", calls, training)

    assert report(0.9e-6, 0.29e-6, 1.009).within_budgets
    assert not report(1.1e-6, 0.29e-6, 1.0).within_budgets
    assert not report(0.9e-6, 0.31e-6, 1.0).within_budgets
    assert not report(0.9e-6, 0.1e-6, 1.011).within_budgets
    assert not report(0.9e-6, 0.1e-6, 1.0, block=1.011).within_budgets


def test_the_report_has_every_round() -> None:
    found = weaver_report(busy(), busy(cpu=0.4))

    report = json.loads(json.dumps(found.as_json()))
    (reports,) = [each for each in report["budgets"] if each["name"] == "status reports"]
    assert reports["by_round"] == [100_000.0, 50_000.0]
    assert report["within_budgets"]
    console = Console(record=True, width=110)
    console.print(found.as_table())
    assert "at least 20,000: met" in console.export_text()


@pytest.mark.slow
def test_it_measures_a_weaver_under_load() -> None:
    throughput = weaver._throughput(PLAN)
    replicas = weaver._replicas(PLAN, 20)

    assert throughput.reports == 150
    assert replicas.reports == 6
    assert throughput.cpu_seconds > 0
    assert len(replicas.command_seconds) >= 2
    assert replicas.broadcast_seconds > 0


@pytest.mark.slow
def test_it_measures_a_weaver_for_long() -> None:
    found = weaver.measure_steady(PLAN)

    assert len(found.stored) == len(found.cores) == 2
    assert all(stored > 0 for stored in found.stored)
    assert all(cores > 0 for cores in found.cores)
    assert len(found.waits) > 2


@pytest.mark.slow
def test_it_measures_commands_and_deaths(job: loom.Job) -> None:
    cluster = steering.Steering(job)

    commands = cluster.commands(3)
    (failed,) = cluster.kills(1)

    assert len(commands.applied) == len(commands.known) == 3
    assert all(0 < applied < known for applied, known in zip(commands.applied, commands.known, strict=True))
    assert failed > 0


def test_it_measures_single_calls() -> None:
    (times,) = threadlet.measure_calls(ThreadletPlan(rounds=1, calls=40))

    assert len(times.publish) == len(times.check) == 40
    assert all(seconds > 0 for seconds in (*times.publish, *times.check))


@pytest.mark.slow
def test_it_measures_training_with_a_threadlet_and_without(job: loom.Job) -> None:
    found = threadlet.measure_training(job, 2, 1, ThreadletPlan(turns=2, steps=2))

    assert [training.way for training in found] == ["calls", "block"] * 2
    assert all(training.plain > 0 and training.watched > 0 for training in found)
    assert all(training.plain_cpu > 0 and training.watched_cpu > 0 for training in found)
