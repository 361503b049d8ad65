"""Runs every script natively and through Loom on one pool of workers, and compares the outcomes."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from loom_proxy.local import LocalCluster
from tests.benchmarks.caller_process import CallerProcess
from tests.parity.outcomes import difference
from tests.parity.scripts import SCRIPTS

__all__ = ["Verdict", "compare"]

SIDE = "tests.parity.side"


class Verdict(NamedTuple):
    """What came of one script."""

    script: str
    disagreement: str | None
    """Where the two outcomes differ; None where they agree."""
    seconds: float
    """How long the slower side took."""


def compare(cluster: LocalCluster, names: Sequence[str] = tuple(SCRIPTS), bare: bool = True) -> Iterator[Verdict]:
    """Run scripts one after the other, each on both sides at once.

    Args:
        cluster: the pool: its workers are attached to natively, and driven through its gateway.
        names: of the scripts.
        bare: hide torchmonarch from the laptop's side, which must not need it.
    """
    native = CallerProcess("the native side", SIDE, ("native", *cluster.workers))
    loom = CallerProcess("Loom's side", SIDE, ("bare-loom" if bare else "loom", cluster.url, cluster.token))
    with native, loom, concurrent.futures.ThreadPoolExecutor(2) as both:
        list(both.map(CallerProcess.await_ready, (native, loom)))
        for name in names:
            start = time.perf_counter()
            outcomes = both.map(lambda side, name=name: side.ask("run", name=name), (native, loom))  # type: ignore[misc]
            yield Verdict(name, difference(*outcomes), time.perf_counter() - start)
