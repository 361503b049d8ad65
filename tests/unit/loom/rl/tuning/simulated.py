"""A run that is simulated by the analysis's pipeline, and takes options as a real one does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from loom.control.commands import Acknowledgement, Change
from loom.errors import WaitTimeout
from loom.rl.diagnosis import analyze
from loom.rl.diagnosis.result import Analysis
from loom.rl.tuning.ledger import Measurement
from loom.rl.tuning.target import RunEnded, TunedRun
from loom.weaver.views import WeaverEvent
from tests.unit.loom.rl.diagnosis.pipeline import Pipeline, Times


class SimulatedRun(TunedRun):
    """A run whose steps take the time that its options make them take."""

    def __init__(self, folder: Path, times: Times, seed: int = 0, **config: Any) -> None:
        self._folder = folder
        self._times = times
        self._seed = seed
        self.command_ids = set()
        self.session = "simulated"
        self.options: dict[str, Any] = {
            "batch": 64, "group": 8, "generators": 1, "max_tokens": 64, "async_level": 1, "weights_via": "lane",
            "inflight": 0, "split": [], "groups": 2, **config,
        }  # fmt: skip
        self.first_options = dict(self.options)
        self.now = 40
        self.last_step = 10_000
        self.applied: list[tuple[int, str, Any]] = []
        self.refuses: dict[str, str] = {}
        self.silent = False
        self.others: list[WeaverEvent] = []
        self.interrupted = False
        self.reward = 0.8
        self.added_processes = True

    def config(self) -> dict[str, Any]:
        return dict(self.options)

    def step(self) -> int:
        if self.interrupted:
            raise KeyboardInterrupt
        return self.now

    def await_step(self, step: int) -> None:
        if step > self.last_step:
            raise RunEnded("the run is finished")
        self.now = max(self.now, step)

    def metric(self, name: str) -> float | None:
        options = self.options if self.added_processes else self.first_options
        return float({"generators": options["generators"], "trainers": options["groups"]}[name])

    def apply(self, option: str, value: Any, replica: str) -> Acknowledgement:
        if self.silent:
            raise WaitTimeout("no acknowledgement")
        if option in self.refuses:
            return Acknowledgement(False, self.now + 1, refused={option: self.refuses[option]})
        self.now += 1
        old, self.options[option] = self.options[option], value
        self.applied.append((self.now, option, value))
        return Acknowledgement(True, self.now, {option: Change(old, value)})

    def changes_by_others(self, after: int) -> tuple[list[WeaverEvent], int]:
        found, self.others = self.others, []
        return found, after + 1

    def newest_event(self) -> int:
        return 0

    def analyse(self, first: int, last: int) -> Analysis:
        folder = self._folder / f"{first}-{len(self.applied)}"
        level = self.options["async_level"]
        pipeline = Pipeline(self._now(), self._seed + first, last - first + 1, 2, level, starts_slowly=False)
        return analyze(pipeline.write(folder))

    def measure(self, first: int, last: int) -> tuple[Measurement, Analysis]:
        found = self.analyse(first, last)
        reward = self.reward * min(1.0, self.options["max_tokens"] / 32)
        return Measurement.of(first, last, found, [reward, reward + 0.01], [0.5]), found

    def _now(self) -> Times:
        times, options = self._times, self.options
        if options["weights_via"] != "shared":
            times = replace(times, queue=min(times.queue, 5.0))
        times = replace(times, batch=times.batch * self.first_options["generators"] / options["generators"])
        shares = options["split"] or [1.0, 1.0]
        part = [2 * share / sum(shares) for share in shares]
        groups = self.first_options["groups"] / options["groups"]
        if times.slow_rank is not None:
            slow, other = part[times.slow_rank], part[1 - times.slow_rank]
            train = times.train * other * groups
            times = replace(times, train=train, lead=max(0.0, (times.train + times.lead) * slow * groups - train))
        else:
            times = replace(times, train=times.train * groups)
        return replace(times, truncated=times.truncated * 64 / options["max_tokens"])
