"""The pytest plugin of Loom: the fixture ``loom_chaos`` and the option ``--loom-chaos-seed``.

A project's tests carry plans of faults out with it::

    def test_training_survives_a_kill(loom_chaos, job):
        report = loom_chaos("kill_one.yaml", job)
        assert report.goodput > 0.8

pytest finds the plugin by its entry point ``loom_chaos``; ``-p no:loom_chaos`` leaves it out. The modules
that carry a plan out are imported when a test uses the fixture.
"""

from __future__ import annotations

import argparse
import os
import secrets
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from loom.chaos.plans import Plan
    from loom.chaos.runs.observer import RunWeaver
    from loom.chaos.runs.reports import HasWeaver, Report
    from loom.chaos.runs.run import PlanExecution


OPTION = "--loom-chaos-seed"
RANDOM = "random"

ENDED_WITHIN = 30.0
"""Seconds that the end of a test waits for runs on other threads to remove their faults."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for the seed."""
    parser.getgroup("loom", "Loom's plans of faults").addoption(
        OPTION,
        type=_seed,
        metavar="SEED",
        help=f"seed of every plan, in place of its own, to repeat a failure; '{RANDOM}' draws one for each run",
    )


def pytest_report_header(config: pytest.Config) -> str | None:
    """Show the seed, if one is given."""
    seed = config.getoption(OPTION)
    return None if seed is None else f"loom chaos: seed {seed}"


@pytest.fixture
def loom_chaos(request: pytest.FixtureRequest) -> Iterator[LoomChaos]:
    """Carry plans of faults out, and fail the test if one expects what does not hold."""
    chaos = LoomChaos(request.node, request.config.getoption(OPTION))
    yield chaos
    chaos.close()


class LoomChaos:
    """The fixture ``loom_chaos``. Call it to carry out a plan.

    The faults are removed when the call ends, also if an exception ends it, such as Ctrl-C; those of calls on other
    threads are removed when the test ends.
    """

    def __init__(self, node: pytest.Item, seed: int | str | None) -> None:
        self._node = node
        self._seed = seed
        self._runs: dict[PlanExecution, threading.Event] = {}
        """The current runs, each with the event of its faults' removal."""

    def __call__(
        self,
        plan: Plan | str | os.PathLike[str],
        weaver: RunWeaver | HasWeaver,
        *,
        seed: int | None = None,
    ) -> Report:
        """Carry a plan out and return the report.

        Args:
            plan: a plan, or the path of its file.
            weaver: ``job.weaver``, or the job.
            seed: a seed in place of the plan's own; ``--loom-chaos-seed`` comes before both.

        Raises:
            ExpectationsFailed: something did not hold that the plan expects.
            BadPlan: the plan makes no sense, or a fault has no target; nothing was touched.
        """
        __tracebackhide__ = True  # pytest then shows the line of the test
        from loom.chaos.runs.reports import Report, prepare
        from loom.errors import ExpectationsFailed

        lines: list[str] = []
        run = prepare(plan, weaver, self._chosen(seed), lines.append)
        again = f"repeat with {OPTION}={run.plan.seed}"
        lines.append(f"{run.plan.name} with seed {run.plan.seed}; {again}")
        ended = self._runs[run] = threading.Event()
        try:
            run.run()
        finally:
            del self._runs[run]
            ended.set()
            self._node.add_report_section("call", "loom chaos", "\n".join(lines))
        report = Report(run)
        if not report.ok:
            raise ExpectationsFailed(f"{report}\n{again}")
        return report

    def close(self) -> None:
        """Remove the faults of runs that go on."""
        going_on = dict(self._runs)
        for run in going_on:
            run.cancel("the test ended")
        late = [run.plan.name for run, ended in going_on.items() if not ended.wait(ENDED_WITHIN)]
        if late:
            pytest.fail(f"the faults of {', '.join(late)} were not removed within {ENDED_WITHIN:g} s")

    def _chosen(self, seed: int | None) -> int | None:
        if self._seed == RANDOM:
            return secrets.randbelow(1 << 32)
        return seed if self._seed is None else int(self._seed)


def _seed(text: str) -> int | str:
    if text != RANDOM and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"a seed is a whole number or {RANDOM!r}, not {text!r:.80}")
    return text if text == RANDOM else int(text)
