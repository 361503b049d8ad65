"""A run whose generators use the trainers' GPUs: who does what, in which order."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loom.errors import Unavailable
from loom.rl.generation.generator_pool import GeneratorPool, PooledGenerator
from loom.rl.generation.weight_orders import Loaded
from loom.rl.rollouts import Rollout
from loom.rl.run import OrchestratorRun
from tests.unit.loom.rl.test_settings import gpu_run


class Log(list[str]):
    """What happened."""

    def noting(self, what: str, found: Any = None) -> Any:
        def note(*args: Any) -> Any:
            self.append(what)
            return found

        return note


class Turns(OrchestratorRun):
    """A run whose generators, trainers and completions only note that they were asked."""

    def __init__(self, folder: Path) -> None:
        spec = gpu_run(folder, lines=False)
        super().__init__(spec)
        self.log = Log()
        self.refused = ""
        self._pool = GeneratorPool(None, spec.generators, folder, None, None, None, False)  # type: ignore[arg-type]
        self._pool._start = self.log.noting("start")  # type: ignore[method-assign]
        endpoints = {
            name: SimpleNamespace(call_one=lambda name=name: self._called(name)) for name in ("sleep", "wake")
        }
        procs: Any = SimpleNamespace(stop=self.log.noting("stop"))
        self._pool.living = [PooledGenerator(0, procs, SimpleNamespace(**endpoints), threading.Event())]
        training = {
            "await_weights": lambda step: self.log.append("trained") or step,
            "rollouts_written": self.log.noting("rollouts"),
            "ranks": lambda: 1,
            "running": lambda: 1,
            "oldest_step": lambda: 0,
            "metrics": dict,
        }
        self._training = SimpleNamespace(**training)  # type: ignore[assignment]
        self._orders = SimpleNamespace(load=self._load_all)  # type: ignore[assignment]
        self._barrier.ckpt_step = 0

    def _called(self, name: str) -> Any:
        def get() -> None:
            if self.refused == name:
                raise Unavailable("no memory")
            self.log.append(name)

        return SimpleNamespace(get=get)

    def _load_all(self, generators: Any, step: int) -> Loaded:
        self.log.append("load")
        return Loaded(step, [])

    def _generate(self, step: int) -> Any:
        self.log.append("generate")
        judged = SimpleNamespace(rewards=[1.0], failed=0, flat=0, means={})
        return [], judged, [Rollout("0.0.0", [1], [2], [0.0], 1.0, 1.0, step)], 0


def test_generators_sleep_before_trainers_have_rollouts_and_wake_when_they_have_trained(tmp_path: Path) -> None:
    run = Turns(tmp_path)
    for step in range(3):
        run._step(step)

    turn = ["generate", "sleep", "rollouts"]
    assert run.log == [*turn, *["trained", "wake", "load", *turn] * 2]


@pytest.mark.parametrize("name", ["sleep", "wake"])
def test_a_generator_that_does_not_take_its_turn_is_lost_and_started_again(tmp_path: Path, name: str) -> None:
    run = Turns(tmp_path)
    if name == "wake":
        run._pool.sleep()
    run.refused = name
    run.log.clear()

    getattr(run._pool, name)()

    assert run.log == ["stop", "start"]
    assert (run._pool.living, run._pool.lost, run._pool.asleep) == ([], 1, False)
