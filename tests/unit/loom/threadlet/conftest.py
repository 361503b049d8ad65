"""A fake weaver for each test, and threadlets that are closed after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from loom.devices import LocalDevice
from loom.threadlet import Threadlet
from tests.unit.loom.threadlet.fake_weaver import FakeWeaver

GPU = LocalDevice("GPU-a", "cpu", "host", "Model", 1 << 30)


@pytest.fixture
def weaver() -> Iterator[FakeWeaver]:
    running = FakeWeaver()
    yield running
    running.stop()


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("WEAVER", "REPLICA", "GROUP", "SESSION", "PROCS", "RANK", "ACTORS", "INJECTABLE")
    others = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "TORCHELASTIC_RESTART_COUNT",
        "SLURM_RESTART_COUNT",
        "LOOM_STARTED_AGAIN",
    )
    for name in (*(f"LOOM_{one}" for one in names), *others):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def threadlet(weaver: FakeWeaver) -> Iterator[Callable[..., Threadlet]]:
    """Makes threadlets of the fake weaver."""
    made: list[Threadlet] = []

    def make(replica_id: str | None = "train_0", **options: Any) -> Threadlet:
        made.append(Threadlet(replica_id, **{"weaver": weaver.address, "devices": [GPU], **options}))
        return made[-1]

    yield make
    weaver.stop()  # so that nobody waits for answers
    for one in made:
        one.close()
