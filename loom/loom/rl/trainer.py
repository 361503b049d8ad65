"""`Trainer`: a process of a replica group of `loom.train` that learns from rollouts."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from loom import tracing
from loom.actor import concurrent_endpoint
from loom.rl.settings import TrainerRun, Weights
from loom.rl.task import Tokenizer
from loom.train.model import adamw, sgd
from loom.train.settings import Batch
from loom.train.trainer import TrainerActor

ATTEND_EVERY = 0.1  # seconds between two looks for commands, while a step waits for its rollouts


def adam(parameters: Iterable[Any], learning_rate: float) -> Any:
    """Return Adam that forgets old gradients sooner than torch's default, as policies change fast."""
    import torch

    return torch.optim.Adam(parameters, lr=learning_rate, betas=(0.9, 0.95))


class Trainer(TrainerActor):
    """A trainer that takes one optimizer step on the rollouts of each step of the orchestrator.

    Before its step N it publishes the weights of step N, which are those after N optimizer steps, and waits for the
    rollouts of step N. A subclass may override `loss_of`.
    """

    optimizers: Mapping[str, Callable[[Iterable[Any], float], Any]] = {"adam": adam, "adamw": adamw, "sgd": sgd}

    def __init__(self, make_model: Callable[[], Any], tokenizer: Tokenizer, run: TrainerRun) -> None:
        super().__init__()
        self._make_model = make_model
        self._tokenizer = tokenizer
        self._run = run
        self._trained = 0  # rollouts that the parameters have learned from
        self._parts: list[Any] = []  # of the step that is computed
        self._count = 0  # rollouts of that step, in all processes
        self._shard = 0
        self._published = -1  # the step of the weights that this process published last
        self._kept: dict[int, Mapping[str, Any]] = {}  # the newest weights, by step, for messages
        self._newest = -1  # the step of the weights that generators can have: kept, or written by this process
        self._changed = threading.Condition()  # notified when there are newer weights
        self._arrived = threading.Event()  # set when a step's rollouts were written
        self._clock = _TrainerClock()

    def warm_up(self) -> None:
        """Import what the first step needs."""
        import loom.rl.generation.weight_files
        import loom.rl.policy_gradient  # noqa: F401

    def build(self) -> Any:
        """Return the model."""
        own = None if os.environ.get("LOOM_TIMING_DIR") else Path(self._run.folder) / "timing"
        tracing.configure(role="trainer", folder=own, lines=self._run.lines or None)
        model = self._make_model()
        for parameter in (one for one in model.parameters() if one.requires_grad):
            parameter.register_post_accumulate_grad_hook(self._clock.saw_gradient)
        return model

    def loss(self, model: Any, batch: Batch) -> Any:
        """Publish the weights, wait for the rollouts of the step, and return their loss."""
        from loom.rl.rollouts import RolloutStore, parts_of

        self._shard = batch.shard
        if self._published != batch.step:
            self._publish(model, batch.step)
        store = RolloutStore(self._run.folder)
        began = time.monotonic()
        while True:
            self._arrived.clear()  # before the look, so that no step is missed
            if store.has(batch.step):
                break
            self.attend()
            store.check_not_passed(batch.step)
            self._arrived.wait(ATTEND_EVERY)
        waited = time.monotonic() - began
        self._clock.add("wait_for_batch", waited)
        tracing.event("train.batch.wait", step=batch.step, rank=batch.shard, wait_ms=1000 * waited)
        with self._clock.measured("load_batch"):
            first = store.read(batch.step, 0)
            self._count = first.count
            parts = parts_of(batch.shard, batch.shards, first.ranks)
            self._parts = [store.read(batch.step, rank) if rank else first for rank in parts]
        self._clock.begin()
        return self.loss_of(model, batch)

    def loss_of(self, model: Any, batch: Batch) -> Any:
        """Return the share of this process in the mean loss of the step's tokens, times the number of processes."""
        from loom.rl.policy_gradient import PolicyBatch, policy_loss, token_logprobs

        rollouts = [one for part in self._parts for one in part.rollouts]
        if not rollouts:  # more processes than parts
            return 0.0 * sum(parameter.sum() for parameter in model.parameters())
        tensors = PolicyBatch.of(rollouts, self._tokenizer.pad).to(self.device)
        logprobs = token_logprobs(model, tensors, self._run.temperature)
        return policy_loss(logprobs, tensors, self._run.clip) * batch.shards / self._parts[0].tokens

    def stepped(self, model: Any, step: int) -> dict[str, float]:
        """Publish the weights of the step, and return its times."""
        tracing.event("train.step.done", step=step - 1, rank=self._shard, dur_ms=1000 * self._clock.end())
        self._trained += self._count
        self._publish(model, step)
        return {**self._clock.collect(), "rollouts/trained": self._trained}

    def save(self) -> Mapping[str, Any]:
        """Return the number of rollouts behind the parameters."""
        return {"trained": self._trained}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue to count."""
        self._trained = state["trained"]

    def _publish(self, model: Any, step: int) -> None:
        """Make the weights of a step known: all processes call this, and the first one writes."""
        from loom.train.loop.training_state import whole

        run = self._run
        with self._clock.measured("write_checkpoint") as began:
            state = {name: whole(one.detach()).cpu().clone() for name, one in model.state_dict().items()}
            messages = run.weights is Weights.MESSAGES
            if messages:
                self._announce(step, state)
            if self._shard == 0 and (not messages or step == run.steps):
                self._write(model, state, step)
                tracing.event("ckpt.write.done", step=step, write_ms=1000 * (time.monotonic() - began))
                if not messages:
                    self._announce(step)
        self._published = step

    def _write(self, model: Any, state: Mapping[str, Any], step: int) -> None:
        from loom.rl.generation import weight_files as weights

        folder = Path(self._run.folder) / "weights"
        if not weights.path_of(folder, step).exists():  # the step may be made again, from a checkpoint
            config = {"model": type(model).__name__, **getattr(model, "config", {})}
            weights.save(state, config, folder, step)

    def _announce(self, step: int, state: Mapping[str, Any] | None = None) -> None:
        """Let `await_weights` return the step. Given weights are kept for messages."""
        with self._changed:
            self._newest = step
            if state is not None:
                self._kept[step] = state
            for old in sorted(self._kept)[: -self._run.keep]:
                del self._kept[old]
            self._changed.notify_all()

    @concurrent_endpoint
    async def rollouts_written(self) -> None:
        """Wake a step that waits for its rollouts."""
        self._arrived.set()

    @concurrent_endpoint
    async def await_weights(self, step: int, timeout: float) -> int | None:
        """Wait for the weights of a step, or newer ones; return their step, or None after ``timeout`` seconds.

        Return None at once if another process writes them.
        """
        return await asyncio.to_thread(self._await_weights, step, timeout)

    def _await_weights(self, step: int, timeout: float) -> int | None:
        if self._shard != 0 and self._run.weights is Weights.FILES:
            return None
        with self._changed:
            if not self._changed.wait_for(lambda: self._newest >= step, timeout):
                return None
            return step if step in self._kept else self._newest

    @concurrent_endpoint
    async def send_weights(self, step: int, generators: list[Any]) -> tuple[int, list[str | None]]:
        """Send the weights of a step, or the newest if these are gone, to generators.

        Returns:
            The step of the weights, and for each generator why it has not got them; None if it has.
        """
        with self._changed:
            sent = step if step in self._kept else max(self._kept)
            state = self._kept[sent]
        sending = [_send(generator, sent, state) for generator in generators]
        return sent, await asyncio.gather(*sending)


async def _send(generator: Any, step: int, state: Mapping[str, Any]) -> str | None:
    with tracing.trace() as trace:
        began = time.monotonic()
        tracing.event("weights.client.send", url="message", path=f"step_{step}")
        try:
            answer = await generator.update_weights.call_one(step, state=state, trace=trace)
        except Exception as error:  # noqa: BLE001 - the orchestrator starts another generator
            return str(error) or type(error).__name__
        wall_ms, rpc_ms = 1000 * (time.monotonic() - began), float(answer["rpc_ms"])
        tracing.event("weights.client.done", wall_ms=wall_ms, rpc_ms=rpc_ms, queue_ms=wall_ms - rpc_ms)
    return None


class _TrainerClock:
    """The times of a trainer's step, in seconds."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._step_began = self._began = self._gradient = time.monotonic()

    def add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def measured(self, name: str) -> _Measured:
        return _Measured(self, name)

    def begin(self) -> None:
        """Note that the loss is computed from here on."""
        self._began = self._gradient = time.monotonic()

    def saw_gradient(self, parameter: Any) -> None:
        """Note that a gradient is complete: the newest is the end of this process's own work in the step."""
        self._gradient = time.monotonic()

    def end(self) -> float:
        """Note that the step was applied; return the seconds of this process's own work in it."""
        self.add("train", time.monotonic() - self._began)
        return self._gradient - self._began

    def collect(self) -> dict[str, float]:
        """Return the seconds and the shares of the step's parts, under the names of the metrics."""
        now = time.monotonic()
        total, self._step_began = now - self._step_began, now
        seconds, self._seconds = self._seconds, {}
        shares = {name: one / total for name, one in seconds.items()}
        shares["unaccounted"] = max(0.0, 1.0 - sum(shares.values()))
        ratio = "perf/trainer/step_time_ratio"
        return {
            **{f"time/{name}": one for name, one in seconds.items()},
            **{f"{ratio}/{name}": one for name, one in shares.items()},
            "time/trainer_step": total,
        }


class _Measured:
    """A block whose time is added to a part of the step; its value is when it began."""

    def __init__(self, clock: _TrainerClock, name: str) -> None:
        self._clock = clock
        self._name = name

    def __enter__(self) -> float:
        self._at = time.monotonic()
        return self._at

    def __exit__(self, *exc_info: object) -> None:
        self._clock.add(self._name, time.monotonic() - self._at)
