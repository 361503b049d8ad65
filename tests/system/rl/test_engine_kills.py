"""vLLM servers killed in the middle of weight updates and of completions: nothing is lost, doubled or mixed.

``LOOM_KILLS=50`` kills as often. ``LOOM_KILLS_SEED`` gives other moments. With the real vLLM the same is done if
there is an environment with it. The stand-in tells its weights by each log probability, too.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

import loom
from loom.rl import RunSummary
from loom.rl.rollouts import Rollout
from tests.support.real_vllm import needs_vllm
from tests.support.vllm_stand_in import environment
from tests.system.rl.runs import WatchedRun

KILLS = int(os.environ.get("LOOM_KILLS", "5"))
SEED = int(os.environ.get("LOOM_KILLS_SEED", "7"))
BOUND = 600.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200 + 240 * KILLS)]


class Killer:
    """Kills the vLLM servers of a run."""

    def __init__(self, run: WatchedRun) -> None:
        self._run = run
        self._chance = random.Random(SEED)
        self.killed = 0
        self._loaded: set[int] = set()

    def events(self, name: str) -> int:
        """How often something happened, in all processes."""
        files = (self._run.folder / "timing").glob("*.jsonl")
        return sum(path.read_bytes().count(f'"{name}"'.encode()) for path in files)

    def kill(self, begins: str, within: float) -> None:
        """Kill a server that takes part some time after something has begun once more."""
        before = self.events(begins)
        self._run.await_true(lambda: self.events(begins) > before, f"another {begins}", BOUND)
        time.sleep(self._chance.uniform(0, within))
        servers = sorted(self.taking_part())
        assert servers, "no server lives"
        os.kill(self._chance.choice(servers), signal.SIGKILL)
        self.killed += 1
        print(f"{time.strftime('%X')} kill {self.killed} of {KILLS}", flush=True)

    def taking_part(self) -> list[int]:
        """The servers whose generator has given them weights."""
        self._loaded |= {
            pid
            for pid in set(self._run.pids("generator")) - self._loaded
            if '"weights.rpc.done"' in next((self._run.folder / "timing").glob(f"*-{pid}.jsonl")).read_text()
        }
        found = []
        for server in self._run.servers():
            with contextlib.suppress(psutil.Error):
                if psutil.Process(server).ppid() in self._loaded:
                    found.append(server)
        return found

    def await_none(self) -> None:
        """Wait until no server is left: they have some seconds to clean up."""
        until = time.monotonic() + BOUND
        while self._run.servers():
            assert time.monotonic() < until
            time.sleep(0.1)

    def await_servers(self, count: int) -> None:
        """Wait until so many servers take part.

        Those that start come first where this user may say so: the others leave little of two cores to them.
        """

        def ready() -> bool:
            taking_part = self.taking_part()
            _prefer([one for one in self._run.servers() if one not in taking_part], -15)
            _prefer(taking_part, 0)
            return len(taking_part) >= count

        self._run.await_true(ready, f"{count} servers", BOUND)


def _prefer(servers: list[int], nice: int) -> None:
    """Give servers a priority: each leads a session, of whose processes Linux schedules all together."""
    for pid in servers:
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/autogroup").write_text(str(nice))


def assert_whole(summary: RunSummary, batch: int) -> None:
    """Each step was made once with all of its rollouts, and each rollout was trained on at most once."""
    assert [one.step for one in summary.steps] == list(range(len(summary.steps)))
    assert {one.rollouts for one in summary.steps} == {batch}
    assert summary.trained == batch * summary.training.steps


def kept(run: WatchedRun) -> dict[int, list[Rollout]]:
    """The rollouts that are there still."""
    from loom.rl import RolloutStore

    store = RolloutStore(run.folder)
    found = {}
    for step in store.steps():
        try:
            found[step] = store.read_all(step)
        except FileNotFoundError:  # trained on meanwhile
            continue
    return found


@pytest.mark.guarantees("rl serving", "A killed vLLM server loses, doubles and mixes no completion")
@pytest.mark.parametrize("moment", ["updates", "completions"])
def test_a_killed_server_loses_nothing_and_the_others_go_on(job: loom.Job, tmp_path: Path, moment: str) -> None:
    folder = environment(tmp_path / "stand-in")
    options = {"installation": str(folder), "environment": {"STAND_IN_SECONDS": "0.15", "STAND_IN_TOKENS": "13"}}
    run = WatchedRun(
        job, tmp_path / "run", steps=100_000, engine="vllm", options=options, generators=2, batch=32, group=4
    )
    killer, seen = Killer(run), dict[str, Rollout]()
    run.await_true(lambda: any(one.step >= 2 for one in run.records()), "step 2", BOUND)
    begins, within = ("weights.rpc.start", 0.3) if moment == "updates" else ("gen.batch.start", 0.3)
    for _ in range(KILLS):
        killer.await_servers(2)
        killer.kill(begins, within)
        seen.update((one.id, one) for group in kept(run).values() for one in group)
        step = run.records()[-1].step
        run.await_true(lambda step=step: run.records()[-1].step > step, "another step", BOUND)  # type: ignore[misc]
    killer.await_servers(2)
    job.weaver.stop("orchestrator").get(BOUND)
    summary = run.result()

    assert_whole(summary, 32)
    assert summary.lost_generators >= KILLS
    for rollout in seen.values():
        assert set(rollout.logprobs) == {-float(rollout.weights_step)}, "tokens of other weights than it says"
    killer.await_none()


@needs_vllm
@pytest.mark.parametrize("moment", ["updates", "completions"])
def test_a_killed_real_server_loses_nothing(job: loom.Job, tmp_path: Path, moment: str) -> None:
    run = WatchedRun(job, tmp_path / "run", steps=100_000, engine="vllm", generators=3, batch=64, group=8)
    killer, seen = Killer(run), dict[str, Rollout]()
    run.await_true(lambda: any(one.step >= 2 for one in run.records()), "step 2", BOUND)
    begins, within = ("weights.rpc.start", 0.5) if moment == "updates" else ("gen.batch.start", 0.5)
    for _ in range(KILLS):
        killer.await_servers(2)
        killer.kill(begins, within)
        step = run.records()[-1].step
        run.await_true(lambda step=step: run.records()[-1].step > step, "another step", BOUND)  # type: ignore[misc]
        seen.update((one.id, one) for group in kept(run).values() for one in group)
    job.weaver.stop("orchestrator").get(BOUND)
    summary = run.result()

    assert_whole(summary, 64)
    assert seen
    killer.await_none()
