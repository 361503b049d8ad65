"""Tensor workers for tests of operations: this process, or some others. No session, no actor."""

from __future__ import annotations

import math
import multiprocessing
import resource
from collections.abc import Callable, Generator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from loom.tensors.tensors import Tensors
from loom.tensors.worker.checkpoints import load, save
from loom.tensors.worker.values import Values
from tests.support.torch_agreement import DEVICE

BOUND = 120.0
"""Seconds for an answer of a process."""


class _Done:
    def __init__(self, value: Any) -> None:
        self._value = value

    def get(self, timeout: float | None = None) -> Any:
        return self._value

    def __await__(self) -> Generator[None, None, Any]:
        yield
        return self._value


class _Endpoint:
    def __init__(self, work: Callable[..., list[Any]]) -> None:
        self._work = work

    def call(self, *args: Any) -> _Done:
        return _Done(dict(enumerate(self._work(*args))))

    def call_one(self, *args: Any) -> _Done:
        return _Done(self._work(*args)[0])


class NearWorker:
    """Stands where the mesh of one worker stands."""

    sizes: Mapping[str, int] = {"gpus": 1}

    def __init__(self) -> None:
        self.values = Values(torch.device(DEVICE), {})
        self.begin = _Endpoint(lambda program: [DEVICE])
        self.run = _Endpoint(lambda program, *batch: [self.values.run(*batch)])
        self.read = _Endpoint(lambda program, *batch: [self.values.read(*batch)])
        self.save = _Endpoint(lambda *args: [save(self.values, 0, *args)])
        self.load = _Endpoint(lambda *args: [load(self.values, 0, *args)])
        self.watched = _Endpoint(lambda *args: [self.values.watched.newest(*args)])

    def __len__(self) -> int:
        return 1


class NearWorkers:
    """Stands where the mesh of several workers stands: processes of their own, which end with this one.

    Args:
        sizes: the processes in each dimension of the mesh.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes
        context = multiprocessing.get_context("forkserver")  # torch is imported once
        context.set_forkserver_preload(["loom.tensors.worker.sharding"])
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(len(self)):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, rank), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self.begin = _Endpoint(lambda *args: self._all("begin", *args))
        self.meet = _Endpoint(lambda *args: self._asked("meet", self._pipes[:1], *args))
        self.join = _Endpoint(lambda *args: self._all("join", *args))
        self.run = _Endpoint(lambda *args: self._all("run", *args))
        self.read = _Endpoint(lambda *args: self._all("read", *args))
        self.save = _Endpoint(lambda *args: self._all("save", *args))
        self.load = _Endpoint(lambda *args: self._all("load", *args))
        self.watched = _Endpoint(lambda *args: self._all("watched", *args))

    def __len__(self) -> int:
        return math.prod(self.sizes.values())

    def slice(self, **dimensions: int) -> NearWorkers:
        return self

    def limit(self, rank: int) -> None:
        """Leave a process as much memory as it has, and little more."""
        self._asked("limit", self._pipes[rank : rank + 1])

    def _all(self, what: str, *args: Any) -> list[Any]:
        return self._asked(what, self._pipes, *args)

    def _asked(self, what: str, pipes: list[Connection], *args: Any) -> list[Any]:
        for pipe in pipes:
            pipe.send((what, args))
        for pipe in pipes:
            assert pipe.poll(BOUND), f"no answer to {what}"
        found = [pipe.recv() for pipe in pipes]
        for each in found:
            if isinstance(each, Exception):
                raise each
        return found

    def __enter__(self) -> NearWorkers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(BOUND)


def _work(pipe: Connection, rank: int) -> None:
    """Be a worker."""
    from loom.tensors.worker.process_group import Group

    torch.set_num_threads(1)
    group = Group(torch.device("cpu"))
    values = Values(torch.device("cpu"), {}, group, rank == 0)

    def begin(program: str) -> str:
        torch.manual_seed(int(program[:15], 16))
        return "cpu"

    def limit() -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + (64 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))

    work: dict[str, Callable[..., Any]] = {
        "limit": limit,
        "begin": begin,
        "meet": lambda program: group.meet(),
        "join": lambda program, store, sizes: group.join(store, rank, sizes),
        "run": lambda program, *batch: values.run(*batch),
        "read": lambda program, *batch: values.read(*batch),
        "save": lambda *args: save(values, rank, *args),
        "load": lambda *args: load(values, rank, *args),
        "watched": values.watched.newest,
    }
    while True:
        try:
            what, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(work[what](*args))
        except Exception as error:  # noqa: BLE001 - the test is told
            pipe.send(error)


def near_tensors() -> Tensors:
    """Return lazy tensors of this process."""
    return Tensors(NearWorker())
