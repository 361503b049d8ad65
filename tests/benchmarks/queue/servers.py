"""Measures orders beside streams on Loom's server and on vLLM's, under the same load, and has the logs analyzed."""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import loom
from loom import tracing
from loom.actor import concurrent_endpoint
from loom.rl.arithmetic_model import LONGEST, write_arithmetic_model
from loom.rl.diagnosis import analyze
from loom.rl.engines import vllm_server
from loom.rl.engines.engine import PauseMode
from loom.rl.generation import weight_files as weights
from loom.rl.generation.generator import Generator
from tests.benchmarks.queue.load import STEPS, Target, Window, measure_window
from tests.benchmarks.queue.plan import SERVER_SET_UPS, SERVER_WAYS, SERVERS, ServersPlan, SetUp
from tests.benchmarks.queue.waiting import SIZE, WaitingModel, WaitingTokenizer

STARTS_IN = 900.0
SLOWNESS = Path(__file__).with_name("slow_vllm")
MOST = "Most of it is "
"""The beginning of the sentence in which `loom analyze` names a place."""


class TimedGenerator(Generator):
    """A generator that records its events in a folder."""

    def __init__(self, *args: Any, events: Path, **kwargs: Any) -> None:
        tracing.configure(folder=events, role="generator")
        super().__init__(*args, **kwargs)

    @concurrent_endpoint
    async def flush(self) -> None:
        """Write all events."""
        tracing.flush()


@dataclass(frozen=True)
class Cell:
    """What was measured of a server with one way in one set-up, and what the logs of it say."""

    window: Window
    primary: str
    """The rule of the primary finding of `loom analyze`."""
    place: str
    """Where it says that orders waited."""
    parts: tuple[float, float, float]
    """Mean milliseconds in the client's pool, from there to the server's first line, and on the rest of the way."""


Cells = dict[str, dict[str, dict[str, list[Cell]]]]
"""What was measured: by server, by set-up, by way, of each round."""


def known_servers() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the servers that can be measured here, and the lines about the others."""
    from tests.support.real_vllm import FOLDER

    if (FOLDER / "bin" / "vllm").exists():
        accepts = "vLLM's server accepts every connection, so that no set-up here has a full accept queue"
        keeps = "vLLM's completions go on with the new weights (pause=keep), as those of Loom's own engine do"
        return tuple(SERVERS), (accepts, keeps)
    own = tuple(name for name, api_servers in SERVERS.items() if not api_servers)
    return own, (f"vLLM was not measured: there is none in {FOLDER}, which LOOM_VLLM may name",)


def measure_servers(plan: ServersPlan, say: Callable[[str], object]) -> Cells:
    """Measure the servers one after the other, in each all set-ups and ways."""
    found: Cells = {}
    with tempfile.TemporaryDirectory(prefix="loom-queue-") as folder, loom.local(hosts=1) as job:
        job.print_logs = False
        for server in plan.servers:
            found[server] = {}
            with _made(job, server, Path(folder), say) as make:
                for set_up in SERVER_SET_UPS:
                    found[server][set_up.name] = _measure(job, plan, server, set_up, make, say)
    return found


@dataclass
class _Made:
    """A target, and the folder of its server's events and logs."""

    target: Target
    folder: Path

    @property
    def logs(self) -> list[Path]:
        """The logs that there are: a generator that has no order has no events."""
        return [*self.folder.glob("*.log"), *self.folder.glob("*/events/*.jsonl")]


Make = Callable[[SetUp], _Made]


@contextmanager
def _made(job: loom.Job, server: str, folder: Path, say: Callable[[str], object]) -> Iterator[Make]:
    """Yield what makes a target for a set-up: a generator for each of Loom's, one server for all of vLLM's."""
    procs: list[Any] = []
    api_servers = SERVERS[server]
    own = folder / f"{len(list(folder.iterdir()))}"

    def generator(name: str, *args: Any, **kwargs: Any) -> Any:
        procs.append(job.hosts.spawn_procs(per_host={"gpus": 1}, name=f"generator_{own.name}_{name}"))
        events = own / name / "events"
        spawned = procs[-1].spawn("generator", TimedGenerator, *args, events=events, **kwargs)
        return spawned.slice(hosts=0, gpus=0)

    def of_loom(set_up: SetUp) -> _Made:
        name = f"{SERVER_SET_UPS.index(set_up)}"
        model = partial(WaitingModel, set_up.step_s)
        made = generator(name, model, WaitingTokenizer(set_up.decode_s), concurrency=64, folder=str(own))
        url = made.serve.call_one(connections=set_up.accepted).get()
        return _Made(Target(made, url, None, own), own)

    def of_vllm() -> _Made:
        model = write_arithmetic_model(own / "model")
        made = generator(
            "vllm",
            engine="vllm",
            model=str(model),
            concurrency=64,
            folder=str(own),
            dtype="float32",
            max_length=LONGEST,
            pause=PauseMode.KEEP.value,
            arguments=(
                "--enforce-eager",
                *("--api-server-count", str(api_servers)),
                *("--logits-processors", "slow_vllm:SlowSteps"),
                *("--middleware", "slow_vllm.SlowLoop"),
            ),
            environment={
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "PYTHONPATH": f"{vllm_server.PLUGIN}:{SLOWNESS}",
            },
        )
        url = made.serve.call_one().get(timeout=STARTS_IN)
        target = Target(made, url, None, own / "weights", vllm=True)
        return _Made(target, own)

    try:
        own.mkdir()
        if api_servers:
            say(f"{server} starts")
            vllm = of_vllm()
            state = _vllm_state(own / "model")
            for step in STEPS:
                weights.save(state, {}, own / "weights", step)
            yield lambda set_up: vllm
        else:
            for step in STEPS:
                weights.save({"weight": torch.zeros(SIZE)}, {}, own, step)
            yield of_loom
    finally:
        for one in procs:
            one.stop().get()


def _vllm_state(model: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return dict(load_file(model / weights.MODEL))


def _measure(
    job: loom.Job, plan: ServersPlan, server: str, set_up: SetUp, make: Make, say: Callable[[str], object]
) -> dict[str, list[Cell]]:
    made = make(set_up)
    found: dict[str, list[Cell]] = {way: [] for way in SERVER_WAYS}
    for number in range(plan.rounds):
        for way in random.Random(f"{set_up.name} {number}").sample(SERVER_WAYS, len(SERVER_WAYS)):
            say(f"{server}, {set_up.name}, round {number + 1} of {plan.rounds}: {way}")
            with tempfile.TemporaryDirectory(prefix="loom-queue-events-") as events:
                window = job.run(measure_window, made.target, set_up, plan, way, Path(events))
                made.target.generator.flush.call_one().get()
                found[way].append(_cell(window, [Path(events), *made.logs]))
    return found


def _cell(window: Window, logs: list[Path]) -> Cell:
    analysis = analyze(logs)
    ways = analysis.measured.ways
    parts = (ways.pool.mean, max(0.0, ways.accept.mean - ways.pool.mean), ways.handle.mean + ways.back.mean)
    details = (line for one in analysis.findings if one.over_bound for line in one.details)
    sentence = next((line.removeprefix(MOST) for line in details if line.startswith(MOST)), "")
    place = re.split(r"[(:,]", sentence)[0].strip()
    return Cell(window, analysis.primary, place, parts)
