"""What the scope of a token lets ``loom tune`` do."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from loom.errors import ScopeError, UnknownSession
from loom_proxy.local import LocalCluster
from tests.support.processes import run
from tests.support.users import House
from tests.system.rl.bottlenecks import BOTTLENECKS, run_of

BOUND = 120.0
LOOM = "import sys; from loom.cli import main; main()"


@pytest.fixture
def house(cluster: LocalCluster, tmp_path: Path) -> Iterator[House]:
    made = House(list(cluster.workers), tmp_path)
    yield made
    made.gateway.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_look_needs_the_scope_view_and_a_change_more(house: House, tmp_path: Path) -> None:
    _, viewer = house.file.create("ann's phone", "view", user="ann")

    with house.connect("ann") as job:
        going_on = job.run(run_of(tmp_path / "run", 0, **BOTTLENECKS["generator"]).run, detach=True, name="rl")
        weaver = house.weaver("ann")

        def tune(token: str, *options: str) -> tuple[int, str]:
            place = ["--url", house.url, "--session", job.session, "--steps", "4", "--out", str(tmp_path / "out")]
            done = run("-c", LOOM, "tune", *place, *options, env={**os.environ, "LOOM_TOKEN": token})
            return done.returncode, done.stdout + done.stderr

        try:
            until = time.monotonic() + BOUND
            while "orchestrator" not in weaver.replicas():
                assert not going_on.done(), going_on.exception()
                assert time.monotonic() < until
                time.sleep(0.1)
            looked, proposed = tune(viewer)
            refused, why = tune(viewer, "--apply", "--change", "generators=2")
            config = weaver.replicas()["orchestrator"].config
            strange, nothing = tune(house.tokens["bob"])
            admins, also = tune(house.tokens["root"], "--user", "ann")
        finally:
            going_on.cancel()

    assert (looked, "generators" in proposed) == (0, True), proposed
    assert (refused, "scope" in why) == (ScopeError.exit_status, True), why
    assert config["generators"] == 1
    assert (strange, "living sessions: none" in nothing) == (UnknownSession.exit_status, True), nothing
    assert (admins, "generators" in also) == (0, True), also
