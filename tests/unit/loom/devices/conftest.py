"""GPUs for the real pynvml, which a test makes and changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.nvml import Gpus, loaded

Install = Callable[[int], Gpus]


@pytest.fixture(autouse=True)
def _no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "LOOM_IGNORED_XIDS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Install]:
    """Shows a number of GPUs to this process."""
    with ExitStack() as shown:

        def install(count: int) -> Gpus:
            gpus = Gpus(count, tmp_path)
            shown.enter_context(loaded(monkeypatch, gpus))
            return gpus

        yield install
