"""The examples that change a training while it runs: in actors that Loom spawned, and under torchrun."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from loom_proxy.local import LocalCluster
from loom_proxy.weaver.client import WeaverProxy
from tests.support.gateways import BOUND, await_true
from tests.support.paths import EXAMPLES
from tests.support.processes import still_there, tree

FINISHED_IN_TIME = 200
"""Seconds, on a machine that does other things too."""

STEP = r"step +(\d+)"

pytestmark = pytest.mark.timeout(FINISHED_IN_TIME + 20)


@pytest.mark.slow
def test_the_story_of_a_learning_rate_is_told_and_ends() -> None:
    ended = subprocess.run(
        [sys.executable, EXAMPLES / "tune_while_training.py"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=FINISHED_IN_TIME,
    )

    assert ended.returncode == 0, ended.stderr
    told = ended.stdout
    for rank in (0, 1):
        name = rf"  trainers_{rank}@\S+ +"
        slow = [float(loss) for _, loss in re.findall(rf"{name}{STEP} +loss (\S+) +lr 0\.0001", told)]
        fast = [float(loss) for _, loss in re.findall(rf"{name}{STEP} +loss (\S+) +lr 0\.1", told)]
        (raised,) = re.findall(rf"{name}{STEP} +applied: learning_rate from 0\.0001 to 0\.1", told)
        (lowered,) = re.findall(rf"{name}{STEP} +applied: learning_rate from 0\.1 to 0\.01", told)
        assert 0 <= int(raised) < int(lowered)
        assert min(fast) < min(slow)
        assert re.search(rf"{name}{STEP} +refused: learning_rate: .*is larger than 0", told)
        assert re.search(rf"{name}{STEP} +loss \S+ +lr 0\.01\n", told)
    assert told.count("of the test digits") == 2


@contextmanager
def torchrun(address: str) -> Iterator[subprocess.Popen[str]]:
    """The example under torchrun, for a weaver."""
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", EXAMPLES / "tune_torchrun.py"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "LOOM_WEAVER": address, "OMP_NUM_THREADS": "1", "STEPS": "100000000"},
    )
    try:
        yield process
    finally:
        for member in reversed(tree(process.pid) if process.poll() is None else []):
            member.send_signal(signal.SIGKILL)
        process.communicate()


@pytest.mark.slow
def test_a_script_of_torchrun_is_changed_over_rest_while_it_trains(cluster: LocalCluster) -> None:
    weaver = WeaverProxy(cluster.url, cluster.token)
    await_true(lambda: weaver.status()["started"] > 0)
    with torchrun(weaver.address()) as process:
        await_true(lambda: {"digits_0", "digits_1"} <= set(weaver.replicas()))
        workers = tree(process.pid)[1:]
        order = {"kind": "update_config", "target": "digits_*", "params": {"learning_rate": 0.05}, "wait": BOUND}

        answer = rest(cluster, "/commands", order)

        assert set(answer["outcomes"]) == {"digits_0", "digits_1"}
        for id, outcome in answer["outcomes"].items():
            assert outcome["ok"], outcome["reason"]
            assert outcome["changes"] == {"learning_rate": {"old": 0.001, "new": 0.05}}
            await_true(lambda id=id: weaver.replica(id).metrics.get("lr") == 0.05)  # type: ignore[misc]
            await_true(
                lambda id=id, step=outcome["step"]: (weaver.replica(id).step or 0) > step  # type: ignore[misc]
            )
        rest(cluster, "/commands", {"kind": "stop", "target": "digits_*", "wait": BOUND})
        said, _ = process.communicate(timeout=BOUND)
        assert process.returncode == 0
        assert re.findall(r"rank \d: \d+ steps, loss \S+, lr (\S+)\n", said) == ["0.05", "0.05"]
        assert still_there(workers) == []
    await_true(lambda: {weaver.replica(id).state for id in ("digits_0", "digits_1")} == {"finished"})


def rest(cluster: LocalCluster, path: str, body: Any) -> Any:
    """The answer to a request, as any program would make it."""
    request = urllib.request.Request(
        f"{cluster.url.replace('ws:', 'http:')}/api/v1/weaver{path}",
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {cluster.token}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=2 * BOUND) as response:
        return json.load(response)
