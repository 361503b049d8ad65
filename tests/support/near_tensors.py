"""A mesh of one tensor worker in this process, for tests of single operations: no session, no actor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from loom.tensors.backend.values import Values
from loom.tensors.tensors import Tensors


class _Done:
    def __init__(self, value: Any) -> None:
        self._value = value

    def get(self, timeout: float | None = None) -> Any:
        return self._value


class _Endpoint:
    def __init__(self, work: Callable[..., Any]) -> None:
        self._work = work

    def call(self, *args: Any) -> _Done:
        return _Done({0: self._work(*args)})

    def call_one(self, *args: Any) -> _Done:
        return _Done(self._work(*args))


class NearWorker:
    """Stands where the mesh of workers stands."""

    def __init__(self) -> None:
        self.values = Values(torch.device("cpu"), {})
        self.begin = _Endpoint(lambda program: "cpu")
        self.run = _Endpoint(lambda program, *batch: self.values.run(*batch))
        self.read = _Endpoint(lambda program, *batch: self.values.read(*batch))
        self.watched = _Endpoint(self.values.watched.newest)

    def __len__(self) -> int:
        return 1


def near_tensors() -> Tensors:
    """Return lazy tensors of this process."""
    return Tensors(NearWorker())
