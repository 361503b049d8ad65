"""torchtitan's own Trainer class under Loom's hook: its steps, its metrics, and what it does on command."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.processes import start
from tests.unit.loom.threadlet.fake_weaver import FakeWeaver
from tests.unit.loom.threadlet.fake_weaver import weaver as running_weaver

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed"),
]

LOOP = """
import runpy
from loom.instrument.bootstrap import begin

begin()
runpy.run_module("tests.system.stacks.titan_loop", run_name="__main__")
"""


def test_its_trainer_is_watched_changed_saved_and_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.unit.loom.threadlet.fake_weaver.BOUND", 120.0)
    with running_weaver() as weaver:
        environment = {**os.environ, "LOOM_WEAVER": weaver.address, "LOOM_RUN": "titan"}
        process = start("-c", LOOP, str(tmp_path), env=environment, cwd=ROOT, stderr=sys.stderr)
        try:
            check(weaver, tmp_path)
            assert process.wait(120) == 0
        finally:
            process.kill()
            process.communicate()


def check(weaver: FakeWeaver, folder: Path) -> None:
    weaver._listener.settimeout(120.0)  # type: ignore[union-attr]
    connection, hello = weaver.welcome()
    assert (hello["replica"], hello["group"]) == ("titan_0", "titan")
    first, second, *_ = connection.rows(2)
    assert [row[2] for row in (first, second)] == [1, 2]
    assert first[4] == 1_000_000
    assert second[5]["loss_metrics/global_avg_loss"] == 0.5

    changed = weaver.command(connection, "update_config", learning_rate=0.25, max_norm=2.0)
    assert connection.ack(changed)[1]["changes"]["learning_rate"] == {"old": 0.5, "new": 0.25}

    saved = weaver.command(connection, "save")
    step, answer = connection.ack(saved)
    assert answer["ok"]
    assert (folder / f"step-{step}").exists()
    assert len(list(folder.glob("step-*"))) == 1

    refused = connection.ack(weaver.command(connection, "evaluate"))[1]
    assert "validator.enable is false" in refused["reason"]

    assert connection.ack(weaver.command(connection, "stop"))[1]["ok"]
    connection.close()
