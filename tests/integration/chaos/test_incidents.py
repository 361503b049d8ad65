"""Real incidents: what happened to a training is read as events, becomes a plan, and is replayed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest

from loom.chaos import read_plan
from loom.weaver.views import WeaverEvent
from loom_proxy.local import LocalCluster
from loom_proxy.weaver.client import WeaverProxy
from tests.support.gateways import TOKEN, await_true, gateway_of
from tests.support.weavers import await_weaver
from tests.system.chaos.restarted import restarted


@pytest.fixture
def weaver(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[WeaverProxy]:
    """The weaver of a gateway of its own, which the command line asks."""
    with gateway_of(cluster) as gateway:
        monkeypatch.setenv("LOOM_URL", gateway.url)
        monkeypatch.setenv("LOOM_TOKEN", TOKEN)
        weaver = WeaverProxy(gateway.url, TOKEN)
        await_weaver(weaver)
        yield weaver


def loom(*arguments: str, folder: Path) -> tuple[str, str]:
    """What a command prints on standard output and on standard error."""
    command = [sys.executable, "-c", "from loom.cli import main; main()", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


def happened(weaver: WeaverProxy, after: int, kind: str, replica: str) -> WeaverEvent:
    """Wait for an event."""
    await_true(lambda: any(weaver.events(after, kind=kind, replica=replica)))
    return next(weaver.events(after, kind=kind, replica=replica))


@pytest.mark.slow
def test_a_real_incident_is_replayed_with_the_same_faults_at_the_same_distances(
    weaver: WeaverProxy, tmp_path: Path
) -> None:
    with restarted(weaver.address(), tmp_path, "run_0", "run_1") as (first, second):
        for replica in ("run_0", "run_1"):
            happened(weaver, 0, "running", replica)
        incident = weaver.status()["event"]
        began = datetime.fromtimestamp(time.time(), timezone.utc).isoformat()
        os.kill(weaver.replicas()["run_0"].pid, signal.SIGKILL)
        died = happened(weaver, incident, "failed", "run_0")
        happened(weaver, died.id, "running", "run_0")
        hung = weaver.replicas()["run_1"].pid
        os.kill(hung, signal.SIGSTOP)
        silent = happened(weaver, incident, "recovering", "run_1")
        os.kill(hung, signal.SIGCONT)
        happened(weaver, silent.id, "running", "run_1")
        stalled = list(weaver.events(incident, kind="stalled", replica="run_1"))  # first on a busy machine
        hung_at = stalled[0].time - stalled[0].data["seconds"] if stalled else silent.time

        events, _ = loom("events", "--since", began, "--json", folder=tmp_path)
        (tmp_path / "events.jsonl").write_text(events)
        printed, _ = loom("inject", "from-events", "events.jsonl", folder=tmp_path)
        loom("inject", "from-events", "--since", "10m", "--output", "plan.yaml", folder=tmp_path)
        checked, _ = loom("inject", "check", "plan.yaml", "--url", os.environ["LOOM_URL"], folder=tmp_path)
        loom("inject", "run", "plan.yaml", "--report", "report", folder=tmp_path)

        assert (first.starts, second.starts) == (3, 1)
    told = [json.loads(line) for line in events.splitlines()]
    assert all(one["id"] > incident for one in told)
    assert "failed" in {one["kind"] for one in told}
    plan = read_plan(tmp_path / "plan.yaml")
    assert len(plan.faults) == 2, plan.text + events
    kill, stop = plan.faults
    assert (kill.fault, kill.target.replica, kill.when.time) == ("sigkill", "run_0", 0.0)
    assert (stop.fault, stop.target.replica) == ("sigstop", "run_1")
    assert stop.when.time == pytest.approx(hung_at - died.time, abs=0.001)
    assert [one.text.split(" within")[0] for one in kill.expect] == ["recovers"]
    assert "- fault: sigkill" in printed
    assert "- fault: sigstop" in printed
    assert "2 faults" in checked
    replayed = json.loads((tmp_path / "report" / "report.json").read_text())
    assert replayed["held"]
    assert [one["fault"] for one in replayed["faults"]] == ["sigkill", "sigstop"]


def test_events_of_a_time_are_shown(cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOM_URL", cluster.url)
    monkeypatch.setenv("LOOM_TOKEN", cluster.token)
    weaver = WeaverProxy(cluster.url, cluster.token)
    first = weaver.set_policy("events_*", "pause") and list(weaver.events(kind="policy"))[-1]
    second = weaver.set_policy("events_*", "notify") and list(weaver.events(kind="policy"))[-1]

    iso = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(first.time - 1))
    since, _ = loom("events", "--since", iso, "--kind", "policy", "--json", folder=tmp_path)

    assert [json.loads(line)["id"] for line in since.splitlines()][-2:] == [first.id, second.id]
    assert list(weaver.events(since=first.time, until=first.time, kind="policy")) == [first]
    assert list(weaver.events(0, since=second.time, kind="policy")) == [second]
