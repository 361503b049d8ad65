"""The faults inside a training process, which strike its training thread between two steps.

A fault that ends or blocks the process has two parts, so that `Strike.evidence` can be reported before
`Strike.strike` is called.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loom.chaos.host.network_commands import run_at_end
from loom.chaos.injected import Evidence, Injected, InjectedFault
from loom.errors import FaultRefused

EachStep = list[Callable[[], None]]
"""The functions that the training thread calls before each step."""

Params = Mapping[str, Any]
Remove = Callable[[], object]

MEGABYTE = 1 << 20
_BLOCK = 16 * MEGABYTE
_REMOVE_WHEN_EMPTY = 'n=0; until rmdir "$0" 2>/dev/null || [ $n = 500 ]; do n=$((n+1)); sleep 0.01; done'


@dataclass(frozen=True)
class Strike:
    """A fault that is about to strike."""

    evidence: Evidence
    strike: Callable[[], Evidence | None]
    """Injects the fault. Returns the evidence of its end if it blocks until it is over."""


def _segfault(params: Params, duration: float | None) -> Strike:
    def crash() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        ctypes.string_at(0)

    return Strike({"pid": os.getpid(), "address": 0}, crash)


def _exception(params: Params, duration: float | None) -> Strike:
    text = params["text"] or "a fault was injected into this step"

    def raise_it() -> None:
        raise InjectedFault(text)

    return Strike({"pid": os.getpid(), "raises": f"InjectedFault: {text}"}, raise_it)


def _out_of_memory(params: Params, duration: float | None) -> Strike:
    more = params["megabytes"] * MEGABYTE
    if params["bound"] == "cgroup":
        group, limit = _memory_group(more)
        return Strike({"pid": os.getpid(), "cgroup": str(group), "limit": limit}, lambda: _take_memory(None))
    address_space = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = address_space + more
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY and limit > hard:
        raise FaultRefused(
            f"the process may have {hard} bytes of memory, which is less than this fault would bound"
        )

    def run_out() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        try:
            _take_memory(limit)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

    return Strike({"pid": os.getpid(), "limit": limit}, run_out)


def _take_memory(limit: int | None) -> None:
    """Allocate memory until there is none. Each page is written to, because an untouched page takes no memory."""
    taken: list[bytes] = []
    try:
        while True:
            taken.append(b"\1" * _BLOCK)
    except MemoryError:
        size = len(taken) * _BLOCK
        taken.clear()
        raise MemoryError(f"injected: {size} bytes were taken, and of {limit} there were no more") from None


def _memory_group(more: int) -> tuple[Path, int]:
    """Put this process into a new memory cgroup that lets it allocate ``more`` further bytes."""
    root = Path("/sys/fs/cgroup")
    old = root / "memory"
    group = (old if old.is_dir() else root) / f"loom-oom-{os.getpid()}"
    # Both versions count only new pages: a page stays with the group in which it was allocated.
    limit_file = "memory.limit_in_bytes" if old.is_dir() else "memory.max"
    try:
        group.mkdir()
        # A program outside the cgroup removes it when this process has ended.
        run_at_end(["sh", "-c", _REMOVE_WHEN_EMPTY, str(group)])
        (group / limit_file).write_text(str(more))
        if not old.is_dir() and (group / "memory.swap.max").exists():
            (group / "memory.swap.max").write_text("0")
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        raise FaultRefused(f"no memory cgroup can be made here ({error}): use bound: rlimit") from error
    return group, more


def _gil_deadlock(params: Params, duration: float | None) -> Strike:
    assert duration is not None
    milliseconds = int(duration * 1000)

    def hold() -> Evidence:
        # PyDLL keeps the interpreter's lock while the function runs.
        poll = ctypes.PyDLL(None).poll
        until = time.monotonic() + milliseconds / 1000
        while (left := until - time.monotonic()) > 0:  # a signal may end a wait early
            poll(None, 0, int(left * 1000) + 1)
        return {"pid": os.getpid(), "held": duration + time.monotonic() - until}

    return Strike({"pid": os.getpid(), "seconds": duration}, hold)


STRIKES: dict[str, Callable[[Params, float | None], Strike]] = {
    "segfault": _segfault,
    "exception": _exception,
    "out_of_memory": _out_of_memory,
    "gil_deadlock": _gil_deadlock,
}
"""Functions that prepare a fault, of its parameters and duration."""


Begun = tuple[Evidence, Callable[[], Evidence] | None]
"""The evidence of a fault, and the function, if any, that removes it and returns the evidence of that."""


def begin(
    kind: str,
    params: Params,
    duration: float | None,
    each_step: EachStep,
    on_removal: Callable[[Evidence], None] | None = None,
) -> Injected:
    """Inject a fault that is no `Strike` into this process, or raise `FaultRefused` if it has no target for it.

    Args:
        duration: seconds after which the fault is removed.
        each_step: the list to which functions for each step are added.
        on_removal: called with the evidence of the removal.
    """
    injected: Injected
    evidence, undo = _HELD[kind](params, each_step, lambda: injected.remove())
    injected = Injected(kind, {"pid": os.getpid(), **evidence}, undo, duration, on_removal)
    return injected


def _slow(params: Params, each_step: EachStep, remove: Remove) -> Begun:
    seconds: float = params["seconds"]
    slept = 0

    def sleep() -> None:
        nonlocal slept
        slept += 1
        time.sleep(seconds)

    def undo() -> Evidence:
        each_step.remove(sleep)
        return {"pid": os.getpid(), "slow_steps": slept}

    each_step.append(sleep)
    return {"seconds": seconds}, undo


_clocks = threading.Lock()


def _jump(params: Params, each_step: EachStep, remove: Remove) -> Begun:
    # Each jump wraps the clock before it, so that several jumps add up and may end in any order.
    offset: list[float] = [params["seconds"]]
    with _clocks:
        before, before_ns = time.time, time.time_ns

        def jumped() -> float:
            return before() + offset[0]

        def jumped_ns() -> int:
            return before_ns() + int(offset[0] * 1e9)

        true = before()
        time.time, time.time_ns = jumped, jumped_ns
        wrong = time.time()

    def undo() -> Evidence:
        with _clocks:
            offset[0] = 0.0
            if time.time is jumped:
                time.time, time.time_ns = before, before_ns
        return {"pid": os.getpid(), "clock": time.time()}

    return {"before": true, "after": wrong}, undo


def _nan(params: Params, each_step: EachStep, remove: Remove) -> Begun:
    torch = sys.modules.get("torch")
    if torch is None:
        raise FaultRefused(
            "torch is not loaded in this process, and nothing says how its loss could be NaN: "
            '@t.on_fault("nan_loss")'
        )
    steps: int = params["steps"]
    left, spoiled = steps, 0

    def spoil(module: Any, inputs: Any, output: Any) -> Any:
        nonlocal spoiled
        if module.training and isinstance(output, torch.Tensor) and output.is_floating_point():
            spoiled += 1
            return output * float("nan")
        return None

    hook = torch.nn.modules.module.register_module_forward_hook(spoil)

    def count() -> None:
        nonlocal left
        if left <= 0:
            remove()
        left -= 1

    def undo() -> Evidence:
        hook.remove()
        if count in each_step:
            each_step.remove(count)
        return {"pid": os.getpid(), "spoiled_outputs": spoiled}

    each_step.append(count)
    return {"steps": steps}, undo


def _abort_groups(params: Params, each_step: EachStep, remove: Remove) -> Begun:
    distributed = sys.modules.get("torch.distributed")
    groups = []
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        groups = [group for group in distributed.distributed_c10d._world.pg_map if group.size() > 1]
    if not groups:
        raise FaultRefused(
            "this process has no process group of torch.distributed with others in it; where it has one of another "
            'kind, such as torchft\'s, say how to abort it: @t.on_fault("pg_abort")'
        )
    said = [abort(group) for group in groups]
    return {"groups": len(groups), "said": said}, None


_HELD: dict[str, Callable[[Params, EachStep, Remove], Begun]] = {
    "pg_abort": _abort_groups,
    "slow_rank": _slow,
    "clock_jump": _jump,
    "nan_loss": _nan,
}
"""Functions that inject a fault, of its parameters, the list of functions for each step, and its removal."""


def abort(group: Any) -> str:
    """Abort a process group or backend, so that collectives fail here and at its peers; return its error text."""
    import torch

    with contextlib.suppress(RuntimeError):  # some backends have no abort
        group.abort()
    # Gloo's abort does nothing. But a timeout makes it close all its connections: wait for a message that never
    # comes.
    try:
        peer = (group.rank() + 1) % group.size()
        group.recv([torch.zeros(1)], peer, _NOBODYS_TAG).wait(datetime.timedelta(milliseconds=1))
    except RuntimeError as error:
        return str(error)[:300]
    return "aborted"


_NOBODYS_TAG = 0x6C6F6F6D
