"""Runs every script natively, through Loom and in Loom's driver on one pool of workers; compares the outcomes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from loom_proxy.local import LocalCluster
from tests.benchmarks.caller_process import CallerProcess
from tests.parity.outcomes import difference
from tests.parity.scripts import SCRIPTS

__all__ = ["SIDES", "Verdict", "compare"]

SIDE = "tests.parity.side"

SIDES = {"loom": "through Loom", "inside": "in the driver"}
"""What is compared with the native side: a program on the laptop, and a function of `Job.run`."""


class Verdict(NamedTuple):
    """What came of one script."""

    script: str
    side: str
    """One of `SIDES`."""
    disagreement: str | None
    """Where the two outcomes differ; None where they agree."""
    seconds: float
    """How long the slowest side took."""


def compare(
    cluster: LocalCluster,
    names: Sequence[str] = tuple(SCRIPTS),
    bare: bool = True,
    sides: Sequence[str] = tuple(SIDES),
) -> Iterator[Verdict]:
    """Run scripts one after the other, each natively and on the other sides at once; a verdict for each of these.

    Args:
        cluster: the pool: its workers are attached to natively, and driven through its gateway.
        names: of the scripts.
        bare: hide torchmonarch from the laptop, which must not need it.
        sides: those of `SIDES` to compare.
    """
    prefix = "bare-" if bare else ""
    with contextlib.ExitStack() as stack:
        callers = [CallerProcess("the native side", SIDE, ("native", *cluster.workers))]
        callers += [CallerProcess(SIDES[side], SIDE, (prefix + side, cluster.url, cluster.token)) for side in sides]
        for caller in callers:
            stack.enter_context(caller)
        at_once = stack.enter_context(concurrent.futures.ThreadPoolExecutor(len(callers)))
        list(at_once.map(CallerProcess.await_ready, callers))
        for name in names:
            start = time.perf_counter()
            native, *others = at_once.map(lambda caller, name=name: caller.ask("run", name=name), callers)  # type: ignore[misc]
            seconds = time.perf_counter() - start
            for side, outcome in zip(sides, others, strict=True):
                yield Verdict(name, side, difference(native, outcome), seconds)
