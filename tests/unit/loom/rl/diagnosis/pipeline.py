"""A pipeline of an orchestrator, trainers and a generator, simulated; it writes the logs that a real one would.

The orchestrator's barrier is the seed's. Nothing is slow by itself: a bottleneck is a time that is made longer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path

from loom.tracing.lines import format_line

BOTTLENECKS = ("queue", "loading", "checkpoint", "truncation", "generator", "trainer", "straggler")


@dataclass(frozen=True)
class Times:
    """Mean milliseconds of each part of a step, and what rollouts are like."""

    queue: float = 4.0
    rpc: float = 150.0
    batch: float = 500.0
    train: float = 450.0
    write: float = 80.0
    slow_rank: int | None = None
    lead: float = 0.0
    """Milliseconds by which the slow rank takes longer."""
    truncated: float = 4.0
    """Per cent."""
    behind: int = 0
    """Steps by which the policy is older than the barrier allows."""
    peaks: float = 0.0
    """Share of the steps in which updates and generation are slow together."""


@dataclass
class Pipeline:
    """What is simulated."""

    times: Times
    seed: int = 0
    steps: int = 30
    ranks: int = 3
    async_level: int = 1
    starts_slowly: bool = True
    lines: dict[str, list[tuple[float, str]]] = field(default_factory=dict)

    def write(self, folder: Path) -> list[Path]:
        """Write the logs of the orchestrator, the server and the trainers."""
        folder.mkdir(parents=True, exist_ok=True)
        self._run()
        paths = []
        for role, lines in self.lines.items():
            paths.append(folder / f"{role}.log")
            text = "".join(f"{at:10.3f}  {role:<14}  {line}\n" for at, line in sorted(lines))
            paths[-1].write_text(text)
        return paths

    def _run(self) -> None:
        chance = random.Random(self.seed)
        times = self.times
        now, free = 0.0, 0.0
        written: dict[int, float] = {0: 0.0}
        policy = 0
        slow = chance.sample(range(2, self.steps), round(times.peaks * self.steps)) if times.peaks else []

        def around(mean: float) -> float:
            return max(0.1, mean * chance.gauss(1, 0.08))

        def say(role: str, at: float, name: str, trace: str | None = None, **fields: object) -> None:
            line = format_line(name, trace, fields)
            assert line is not None
            self.lines.setdefault(role, []).append((at, line))

        for step in range(self.steps):
            began = now
            start = 5.0 if self.starts_slowly and step == 0 else 1.0
            say("orchestrator", now, "step.begin", step=step)
            if step - policy > self.async_level:
                target = step - self.async_level
                say("orchestrator", now, "barrier", step=step, ckpt_step=policy, async_level=self.async_level)
                say("orchestrator", now, "ckpt.wait.start", target_step=target)
                wait = max(0.0, written[target] - now) + 0.001
                now += wait
                say("orchestrator", now, "ckpt.wait.done", target_step=target, wait_ms=1000 * wait)
                policy = target
                queue, rpc = around(times.queue) / 1000, around(times.rpc) / 1000
                if step in slow:
                    queue += chance.uniform(1.0, 3.0)
                trace = f"{chance.getrandbits(24):06x}"
                say("orchestrator", now, "weights.client.send", trace, path=f"step_{target}", t=now)
                say("server", now + queue, "weights.server.recv", trace, path="/update_weights", t=now + queue)
                say("server", now + queue, "weights.rpc.start", trace, op="update_weights", t=now + queue)
                now += queue + rpc
                say("server", now, "weights.rpc.done", trace, op="update_weights", t=now, rpc_ms=1000 * rpc)
                wall = 1000 * (queue + rpc)
                done = {"wall_ms": wall, "rpc_ms": 1000 * rpc, "queue_ms": 1000 * queue}
                say("orchestrator", now, "weights.client.done", trace, **done)
            batch = start * around(times.batch) / 1000 * (3.0 if step in slow else 1.0)
            say("orchestrator", now, "gen.batch.start", inflight=96, target_batch=64)
            now += batch
            say("orchestrator", now, "gen.batch.done", completions=64, dur_ms=1000 * batch, inflight=96)
            stale = min(step, step - policy + times.behind)
            truncated = min(100.0, around(times.truncated))
            rollout = {"current_step": step, "ckpt_step": step - stale, "staleness": stale}
            say("orchestrator", now, "rollout", trunc_pct=truncated, **rollout)
            now += 0.01
            say("orchestrator", now, "step.complete", step=step, wall=now - began)
            begins = max(free, now)
            ends = begins
            for rank in range(self.ranks):
                took = start * around(times.train) + (around(times.lead) if rank == times.slow_rank else 0.0)
                say("trainer", begins, "train.batch.wait", step=step, rank=rank, wait_ms=1000 * (begins - free))
                say("trainer", begins + took / 1000, "train.step.done", step=step, rank=rank, dur_ms=took)
                ends = max(ends, begins + took / 1000)
            write = around(times.write) / 1000
            free = ends + write
            written[step + 1] = free
            say("trainer", free, "ckpt.write.done", step=step + 1, write_ms=1000 * write)


def ordinary(seed: int) -> Pipeline:
    """Return a pipeline in which nothing is slow: its sides need about the same time."""
    chance = random.Random(f"ordinary {seed}")
    batch = chance.uniform(300, 700)
    times = Times(
        queue=chance.uniform(1, 20),
        rpc=chance.uniform(20, 200),
        batch=batch,
        train=batch * chance.uniform(0.7, 1.2),
        write=chance.uniform(20, 120),
        truncated=chance.uniform(0, 9),
    )
    return Pipeline(times, seed, chance.randint(20, 40), chance.choice((2, 3, 4)), chance.choice((0, 1, 2)))


def slowed(bottleneck: str, seed: int) -> Pipeline:
    """Return an ordinary pipeline in which one thing is slow."""
    pipeline = ordinary(seed)
    chance = random.Random(f"{bottleneck} {seed}")
    times = pipeline.times
    match bottleneck:
        case "queue":
            times = replace(times, queue=chance.uniform(1200, 30_000))
        case "loading":
            times = replace(times, rpc=chance.uniform(2500, 12_000))
        case "checkpoint":
            times = replace(times, write=chance.uniform(2500, 12_000))
        case "truncation":
            times = replace(times, truncated=chance.uniform(35, 95))
        case "generator":
            times = replace(times, batch=times.batch * 3 + chance.uniform(2000, 12_000))
        case "trainer":
            times = replace(times, train=times.train * 3 + chance.uniform(2000, 12_000))
        case "straggler":
            slow = chance.randrange(pipeline.ranks)
            times = replace(times, slow_rank=slow, lead=chance.uniform(2000, 8000))
        case "staleness":
            times = replace(times, behind=chance.randint(2, 5))
        case "contention":
            times = replace(times, peaks=0.2)
        case _:
            raise ValueError(bottleneck)
    pipeline.times = times
    return pipeline
