"""Generators that do not start: another attempt follows while others generate, and an error when none is left."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loom.errors import LoomError, Unavailable
from loom.rl.generation.generator_pool import GeneratorPool, PooledGenerator
from loom.train.settings import RetryBudget

BOUND = 30.0


class BrokenHost:
    """A stand-in for a session whose host starts no process."""

    def __init__(self) -> None:
        self.attempts = 0

    def hosts(self) -> list[str]:
        return ["host"]

    def spawn_procs(self, *_: Any) -> Any:
        self.attempts += 1
        raise Unavailable("the host is away")


def test_a_generator_is_started_again_as_long_as_another_one_lives(tmp_path: Path) -> None:
    host: Any = BrokenHost()
    spec: Any = SimpleNamespace(own_tokenizer=None, options={})
    nothing: Any = None
    pool = GeneratorPool(host, spec, tmp_path, nothing, nothing, nothing, lines=False)
    pool._retries = RetryBudget(attempts=2, first_wait=0.001, second_wait=0.001, longest_wait=0.001)
    pool.living.append(PooledGenerator(0, nothing, nothing, threading.Event()))

    pool.resize(2)
    until = time.monotonic() + BOUND
    while host.attempts < 8:
        assert time.monotonic() < until
        pool.admit()
        time.sleep(0.001)

    pool.living.clear()
    with pytest.raises(LoomError, match=r"no generator is left.*the host is away"):
        pool.admit(block=True)
