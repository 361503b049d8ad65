"""The benchmarks run and add up; how fast anything is, they say, and no test does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from tests.benchmarks import calls, large, ray_environment, report
from tests.benchmarks.caller_process import CallerError, CallerProcess
from tests.benchmarks.calls import Figures, Measured, Plan, Subject, SubjectName
from tests.benchmarks.machine import Machine, describe_machine
from tests.support.paths import ROOT

TINY = Plan(
    rounds=2,
    one_calls=3,
    pipelined=5,
    pipelined_turns=2,
    echo_size=2**20,
    echoes=1,
    warm_up_calls=1,
    idle_seconds=0.05,
)
RAW = [calls.SUBJECTS[SubjectName.RAW_ASYNCIO], calls.SUBJECTS[SubjectName.RAW_SYNC]]
MACHINE = Machine(cores=2, cpu="a processor", python="3.11.7", packages={"torchmonarch": "0.7.0"})
SUBJECTS = {**calls.SUBJECTS, SubjectName.RAY: Subject(SubjectName.RAY, "Ray Client", "", pipelines=("one",))}
ASYNCIO = calls.SUBJECTS[SubjectName.RAW_ASYNCIO]


def figures(p50_ms: float, pipelined_per_s: float, echo_bytes_s: float, echo_array_s: float = 0.0) -> Figures:
    return Figures(
        p50_ms=p50_ms,
        p99_ms=2 * p50_ms,
        pipelined_per_s={"one": pipelined_per_s, "many": pipelined_per_s / 2, "mesh": pipelined_per_s / 8},
        pipelined_cpu_ms=0.1,
        echo_s={"bytes": echo_bytes_s, "array": echo_array_s},
    )


def measured(*rounds: dict[SubjectName, Figures]) -> Measured:
    return Measured(Plan(), tuple(SUBJECTS[name] for name in rounds[0]), rounds)


FIXED = measured(
    {
        SubjectName.RAW_ASYNCIO: figures(0.2, 20_000, 0.5),
        SubjectName.RAW_SYNC: figures(0.1, 30_000, 1.0),
        SubjectName.NATIVE: figures(0.9, 4_000, 0.4, 0.6),
        SubjectName.LOOM: figures(1.2, 4_200, 1.0, 1.25),
    },
    {
        SubjectName.RAW_ASYNCIO: figures(0.4, 10_000, 1.0),
        SubjectName.RAW_SYNC: figures(0.2, 15_000, 2.0),
        SubjectName.NATIVE: figures(1.8, 2_000, 0.8, 1.2),
        SubjectName.LOOM: figures(2.6, 1_800, 2.5, 5.0),
    },
    {
        SubjectName.RAW_ASYNCIO: figures(0.2, 20_000, 0.5),
        SubjectName.RAW_SYNC: figures(0.1, 30_000, 1.0),
        SubjectName.NATIVE: figures(0.9, 4_000, 0.4, 0.6),
        SubjectName.LOOM: figures(1.5, 3_600, 0.9, 1.75),
    },
)


def _family(caller: CallerProcess) -> list[psutil.Process]:
    process = psutil.Process(caller.pid)
    return [process, *process.children(recursive=True)]


def test_a_ratio_is_taken_within_each_round() -> None:
    one_call, pipelined, many, mesh, echo_bytes, echo_array = report.ratios(FIXED)

    assert one_call.by_round == pytest.approx((1.2, 1.3, 1.5))  # to native and the sync client, the faster here
    assert pipelined.by_round == many.by_round == mesh.by_round == pytest.approx((1.05, 0.9, 0.9))
    assert echo_bytes.by_round == pytest.approx((2.0, 2.5, 1.8))  # to the asyncio client, the faster here
    assert echo_array.by_round == pytest.approx((2.5, 5.0, 3.5))


def test_the_median_of_a_ratio_decides_whether_its_budget_is_met() -> None:
    found = report.ratios(FIXED)

    assert [ratio.median for ratio in found] == pytest.approx([1.3, 0.9, 0.9, 0.9, 2.0, 3.5])
    assert not any(ratio.met for ratio in found)
    assert report.budgeted("one call", "one call, p50", "loom / native", (1.0, 1.15, 1.3)).met
    assert not report.budgeted("one call", "one call, p50", "loom / native", (1.0, 1.16, 1.3)).met
    assert report.budgeted("pipelined calls, one actor", "calls", "loom / native", (0.9, 1.0, 1.1)).met


def test_ratios_to_ray_client() -> None:
    rays = measured(
        {
            SubjectName.LOOM: figures(0.5, 6_000, 0.39),
            SubjectName.RAY: Figures(3.0, 6.0, {"one": 1_500.0}, 0.5, {"bytes": 1.2}),
        }
    )

    latency, pipelined, size = report.ratios(rays)

    assert [one.median for one in (latency, pipelined, size)] == pytest.approx([1 / 6, 4.0, 1.2 / 0.39])
    assert [one.met for one in (latency, pipelined, size)] == [True, False, True]


def test_a_ratio_that_lacks_a_subject_is_left_out() -> None:
    without_raw = measured({name: FIXED.rounds[0][name] for name in (SubjectName.NATIVE, SubjectName.LOOM)})
    without_loom = measured({name: FIXED.rounds[0][name] for name in (SubjectName.RAW_SYNC, SubjectName.NATIVE)})

    assert [ratio.name for ratio in report.ratios(without_raw)] == [
        "pipelined calls, one actor",
        "pipelined calls, 100 actors",
        "pipelined calls, mesh of 8",
    ]
    assert report.ratios(without_loom) == ()


def test_the_report_shows_every_figure_and_ratio_beside_its_budget() -> None:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115

    console.print(
        report.Report("python -m tests.benchmarks calls", MACHINE, FIXED, report.ratios(FIXED)).as_table()
    )

    text = console.export_text()
    assert "raw echo, sync" in text
    assert "4,000" in text
    assert "at most 1.15, aim 1.1" in text
    assert "missed" in text
    assert "2 cores, a processor" in text
    assert "python -m tests.benchmarks calls" in text


@pytest.mark.slow
def test_the_raw_echo_is_measured_in_rounds() -> None:
    told: list[str] = []

    result = calls.measure(RAW, TINY, told.append)

    assert len(result.rounds) == TINY.rounds
    for by_subject in result.rounds:
        for name in (SubjectName.RAW_ASYNCIO, SubjectName.RAW_SYNC):
            assert 0 < by_subject[name].p50_ms <= by_subject[name].p99_ms
            assert by_subject[name].pipelined_per_s["one"] > 0
            assert by_subject[name].echo_s["bytes"] > 0
    assert [text for text in told if text.startswith("round")] == ["round 1 of 2", "round 2 of 2"]


def test_a_report_is_one_json_object() -> None:
    result = report.Report("command", describe_machine(), FIXED, report.ratios(FIXED), ("a note",))

    loaded = json.loads(json.dumps(result.as_json()))

    assert loaded["subjects"]["native"]["pipelined_per_s"]["one"] == 4_000
    assert loaded["ratios"][0]["budget"] == 1.15
    assert loaded["ratios"][0]["met"] is False
    assert loaded["within_budgets"] is False
    assert len(loaded["rounds"]) == 3
    assert loaded["notes"] == ["a note"]


def test_a_caller_that_cannot_start_says_why() -> None:
    with CallerProcess("nothing", "tests.benchmarks.no_such_module") as caller:
        with pytest.raises(CallerError, match="No module named"):
            caller.await_ready()


def test_a_caller_ends_with_what_it_started() -> None:
    with CallerProcess("raw", ASYNCIO.module, ASYNCIO.arguments) as caller:
        caller.await_ready()
        processes = _family(caller)

    assert len(processes) == 2
    assert psutil.wait_procs(processes, timeout=10)[1] == []


KILLED_PARENT = """
import signal

import psutil

from tests.benchmarks import calls
from tests.benchmarks.caller_process import CallerProcess

subject = calls.SUBJECTS[calls.SubjectName.RAW_SYNC]
caller = CallerProcess("raw", subject.module, subject.arguments)
caller.await_ready()
print(caller.pid, *[child.pid for child in psutil.Process(caller.pid).children(recursive=True)], flush=True)
signal.pause()
"""


def test_a_caller_ends_when_its_parent_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", KILLED_PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    processes = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]

    parent.kill()
    parent.wait()

    assert len(processes) == 2
    assert psutil.wait_procs(processes, timeout=10)[1] == []


def test_an_interpreter_without_ray_is_named_with_what_to_do() -> None:
    with pytest.raises(ray_environment.RayNotInstalled, match="--ray-python"):
        ray_environment.subject(Path("/nowhere/python"))


PARENT_OF_A_SLEEPER = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
print("started", flush=True)
time.sleep(100)
"""


def test_a_guarded_command_ends_when_standard_input_is_closed() -> None:
    guard = subprocess.Popen(
        [sys.executable, "-m", "tests.benchmarks.guard", sys.executable, "-c", PARENT_OF_A_SLEEPER],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert guard.stdin
    assert guard.stdout
    guard.stdout.readline()
    processes = psutil.Process(guard.pid).children(recursive=True)

    guard.stdin.close()

    assert len(processes) == 2
    assert psutil.wait_procs(processes, timeout=10)[1] == []
    assert guard.wait(timeout=10) == 0


def _large_round(echo_s: dict[str, float], busy_ms: float) -> large.LargeRound:
    return large.LargeRound(
        echo_s=echo_s,
        idle_s=[0.001] * 100,
        busy_s={way: [busy_ms / 1000] * 100 for way in large.WAYS},
        native_idle_s=[0.002] * 100,
        native_busy_s={way: [0.008] * 100 for way in large.WAYS},
        gateway_peak=32 * 2**20,
        stream_s={"first": 0.01, "last": 0.5},
    )


def test_the_report_on_large_data_shows_each_ratio_beside_its_budget() -> None:
    rounds = [
        _large_round({"raw": 4.0, "native": 5.0, "loom": 5.0}, 2.5),
        _large_round({"raw": 4.0, "native": 5.0, "loom": 10.0}, 4.0),
        _large_round({"raw": 4.0, "native": 5.0, "loom": 5.0}, 4.0),
    ]
    figures = large.LargeFigures("python -m tests.benchmarks large", MACHINE, large.LargePlan(rounds=3), rounds)

    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(figures.as_table())

    bandwidth, there, _, _, memory, first = figures.ratios
    assert bandwidth.by_round == pytest.approx((0.8, 0.4, 0.8))
    assert [ratio.met for ratio in (bandwidth, there, memory, first)] == [True, False, True, True]
    assert there.median == pytest.approx(4.0)
    assert memory.median == pytest.approx(0.25)
    assert not figures.within_budgets
    assert "1024 MiB echo, bandwidth" in console.export_text()
    calls = json.loads(json.dumps(figures.as_json()))["small_calls_ms"]
    assert calls["Loom, to an actor"]["p99"] == pytest.approx(4.0)
    assert calls["native, to an actor"]["p99"] == pytest.approx(8.0)


@pytest.mark.slow
def test_large_data_is_measured_in_rounds() -> None:
    plan = large.LargePlan(size=4 * 2**20, rounds=1, idle_calls=5, stream_step=0.0)

    figures = large.measure(plan, "python -m tests.benchmarks large")

    (one,) = figures.rounds
    assert set(one.echo_s) == {"raw", "native", "loom"}
    assert all(seconds > 0 for seconds in one.echo_s.values())
    assert all(one.busy_s[way] and one.native_busy_s[way] for way in large.WAYS)
    assert 0 < one.stream_s["first"] <= one.stream_s["last"]
