"""The plugin of pytest: a project's tests strike a real training, in a pytest of their own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn

import pytest

from loom.chaos import Plan, PlannedFault, Target, When, run
from loom.weaver.views import WeaverEvent
from loom_proxy.local import LocalCluster
from loom_proxy.weaver.client import WeaverProxy
from tests.support.gateways import BOUND, await_true
from tests.support.weaver_training import training

PROJECT = """\
import os, threading
import pytest
from loom.chaos import Plan, PlannedFault, Target, When, run
from loom.errors import ExpectationsFailed
from loom_proxy.weaver.client import WeaverProxy

class Job:
    weaver = WeaverProxy(os.environ["LOOM_URL"], os.environ["LOOM_TOKEN"])

def slow(**more):
    fault = PlannedFault("slow_rank", When(time=0), Target("plugin_0"), duration=600.0, params={"seconds": 0.05})
    return Plan(faults=(fault,), name="slow", seed=4, settle=0, watch="plugin_0", **more)

def test_holds(loom_chaos):
    fault = PlannedFault("slow_rank", When(time=0), Target(random=1), duration=0.2, params={"seconds": 0.05})
    report = loom_chaos(Plan(faults=(fault,), expect=("recovers within 30 s",), settle=0), Job)
    assert report.ok and not report.failures
    assert report.seed == 0 if "SEED" not in os.environ else int(os.environ["SEED"])

def test_a_program_runs_a_plan_of_a_file(tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_text("within: 300 ms\\nfaults: {fault: slow_rank, when: {time: 1 h}}\\nexpect: loss is finite\\n")
    report = run(file, Job, seed=5)
    assert (report.ok, report.seed) == (False, 5)
    assert "yes  loss is finite: plugin_0 0." in str(report)
    with pytest.raises(ExpectationsFailed, match="plan: 1 of 2 expectations held in .*, with seed 5"):
        report.raise_for_failures()

def test_does_not_hold(loom_chaos):
    loom_chaos(slow(within=0.5, expect=("loss at most 0",)), Job)  # the line of the test

def test_on_a_thread(loom_chaos):
    before = Job.weaver.status()["event"]
    def strike():
        with pytest.raises(AssertionError, match="the test ended"):
            loom_chaos(slow(), Job)
    threading.Thread(target=strike).start()
    next(Job.weaver.events(before, follow=True, kind="applied"))

def test_goes_on_until_it_is_interrupted(loom_chaos):
    loom_chaos(slow(), Job)
"""

USED = 'import sys\ndef test_light():\n    assert not {"pydantic", "yaml", "loom.chaos.runs"} & set(sys.modules)\n'


@pytest.fixture(scope="module")
def weaver(cluster: LocalCluster) -> Iterator[WeaverProxy]:
    """The weaver of a replica that trains as ``plugin_0``."""
    found = WeaverProxy(cluster.url, cluster.token)
    os.environ["LOOM_INJECTABLE"] = "1"
    with training(found.address(), "plugin_0"):
        del os.environ["LOOM_INJECTABLE"]
        await_true(lambda: (one := found.replicas().get("plugin_0")) is not None and one.step is not None)
        yield found


@pytest.fixture
def project(cluster: LocalCluster, weaver: WeaverProxy, tmp_path: Path) -> Path:
    (tmp_path / "test_project.py").write_text(PROJECT)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def start_pytest(folder: Path, cluster: LocalCluster, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "LOOM_URL": cluster.url, "LOOM_TOKEN": cluster.token, **variables}
    others = {one.name for one in entry_points(group="pytest11")} - {"loom_chaos"}  # they take seconds to import
    left_out = [argument for name in ("cacheprovider", *others) for argument in ("-p", f"no:{name}")]
    command = [sys.executable, "-m", "pytest", *left_out, *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def all_removed(weaver: WeaverProxy, after: int) -> list[WeaverEvent]:
    """Wait until every fault injected after an event is removed; return their injections."""

    def removed() -> bool:
        gone = {one.data["injection"] for one in weaver.events(after, kind="fault_removed")}
        return {one.data["command"] for one in injected()} <= gone

    def injected() -> list[WeaverEvent]:
        return [one for one in weaver.events(after, kind="command") if one.data["do"] == "inject"]

    await_true(removed)
    return injected()


def test_a_test_fails_with_what_did_not_hold_and_all_faults_are_removed(
    cluster: LocalCluster, weaver: WeaverProxy, project: Path
) -> None:
    before = weaver.status()["event"]

    pytest_run = start_pytest(project, cluster, "-k", "not interrupted")
    printed, _ = pytest_run.communicate(timeout=2 * BOUND)

    assert pytest_run.returncode == 1, printed
    assert "1 failed, 3 passed" in printed
    assert "loom_chaos(slow(within=0.5" in printed
    assert re.search(
        r"^E +loom\.errors\.ExpectationsFailed: slow: 0 of \d expectations held in .*seed 4", printed, re.M
    )
    assert re.search(r"^E +NO   the plan is carried out: it did not end within 0\.5 s$", printed, re.M)
    assert re.search(r"^E +NO   loss at most 0: plugin_0 0\.\d+$", printed, re.M)
    assert "repeat with --loom-chaos-seed=4" in printed
    assert len(all_removed(weaver, before)) == 3


def test_faults_are_removed_when_a_test_is_interrupted_and_a_seed_is_repeated(
    cluster: LocalCluster, weaver: WeaverProxy, project: Path
) -> None:
    before = weaver.status()["event"]
    wanted = ("-k", "holds or interrupted", "-rP", "--loom-chaos-seed=11")
    pytest_run = start_pytest(project, cluster, *wanted, SEED="11")
    await_true(lambda: len(list(weaver.events(before, kind="applied"))) == 2)

    pytest_run.send_signal(signal.SIGINT)
    printed, _ = pytest_run.communicate(timeout=2 * BOUND)

    assert pytest_run.returncode == pytest.ExitCode.INTERRUPTED, printed
    assert len(all_removed(weaver, before)) == 2
    assert "loom chaos: seed 11" in printed
    assert "plan with seed 11; repeat with --loom-chaos-seed=11" in printed
    assert "slow_rank strikes plugin_0" in printed


def test_a_fault_is_removed_though_the_answer_to_its_injection_never_came(
    cluster: LocalCluster, weaver: WeaverProxy
) -> None:
    class Interrupted(WeaverProxy):
        """A weaver whose answer to an injection never comes, because the program is interrupted before."""

        def inject(self, *arguments: Any, **more: Any) -> NoReturn:
            super().inject(*arguments, **more)
            raise KeyboardInterrupt

    before = weaver.status()["event"]
    fault = PlannedFault("slow_rank", When(time=0), Target("plugin_0"), duration=600.0)

    with pytest.raises(KeyboardInterrupt):
        run(Plan(faults=(fault,)), Interrupted(cluster.url, cluster.token))

    assert len(all_removed(weaver, before)) == 1


@pytest.mark.parametrize(
    ("arguments", "code"),
    [((), 0), (("-p", "no:loom_chaos"), 0), (("-p", "no:loom_chaos", "--loom-chaos-seed=1"), 4)],
    ids=["loaded", "left out", "left out, with its option"],
)
def test_a_test_that_does_not_use_it_does_not_pay_for_it(
    cluster: LocalCluster, tmp_path: Path, arguments: tuple[str, ...], code: int
) -> None:
    (tmp_path / "test_used.py").write_text(USED)

    pytest_run = start_pytest(tmp_path, cluster, *arguments)
    printed, _ = pytest_run.communicate(timeout=2 * BOUND)

    assert pytest_run.returncode == code, printed
