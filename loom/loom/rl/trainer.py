"""`Trainer`: a process of a replica group of `loom.train` that learns from rollouts; `Training`: all of a run's.

The trainers of a run are a job of `loom.train`, whose controller runs in a thread of the orchestrator's process.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

from loom import tracing
from loom.actor import concurrent_endpoint
from loom.driver_api import Session
from loom.errors import TrainingFailed
from loom.rl.engines.sparse_patches import Comparisons
from loom.rl.engines.weight_transfer import TransferTarget, WeightTransfer
from loom.rl.generation.interruptible_calls import LOOK_EVERY, begin
from loom.rl.generation.tensor_files import Final
from loom.rl.generation.weight_client import UpdateAnswer
from loom.rl.models import adapters, causal
from loom.rl.models.tokenizers import tokenizer_of
from loom.rl.rollouts import Rollout
from loom.rl.settings import TrainerRun, Trainers, Weights
from loom.train.checkpoints.files import numbered
from loom.train.checkpoints.store import CheckpointStore
from loom.train.controller.controller import Controller
from loom.train.controller.summaries import JobSummary
from loom.train.model import adamw, sgd
from loom.train.settings import Batch, Timeouts
from loom.train.spec import JobSpec
from loom.train.trainer import TrainerActor

CHECKPOINTS = "checkpoints"
NAME = "trainer"
"""The name of the job: ``trainer_0``, ``trainer_1``, … are its replicas."""
LARGE_MODEL = 120.0
"""Seconds in which the members of a group read a model of Hugging Face, or compute it, one later than the other."""
CLOSE_TIMEOUT = 30.0
"""Seconds in which the trainers' processes are told to end."""
ANSWER_TIMEOUT = 1.0
"""Seconds that a trainer waits for newer weights before it answers that there are none."""


def restored_step(folder: Path) -> int:
    """Return the step from which trainers would go on in a run's folder."""
    checkpoints = folder / CHECKPOINTS
    found = CheckpointStore(checkpoints).newest() if checkpoints.is_dir() else None
    return 0 if found is None else found.step


class Training:
    """The trainers of a run. Only one thread uses it.

    Raises:
        MissingDependency: a Hugging Face model is to be trained, and transformers is not installed.
        WrongArguments: the model's folder has no causal model for the tokenizer, or is written in part.
    """

    def __init__(self, session: Session, spec: Trainers, run: TrainerRun) -> None:
        for path in (spec.model, spec.reference):
            if path is not None:
                causal.check(path, spec.tokenizer or tokenizer_of(spec.model or path))
        self._run = run
        self._checkpoints = Path(run.folder) / CHECKPOINTS
        self._weights = Path(run.folder) / "weights"
        self._job = JobSpec(
            **{
                "name": NAME,
                "trainer": spec.actor or (GpuTrainer if spec.gpus else Trainer),
                "args": (spec, run),
                "groups": spec.groups,
                "members": spec.members,
                "parallel": spec.parallel,
                "backend": "nccl" if spec.gpus else "gloo",
                "timeouts": Timeouts() if spec.model is None else Timeouts(collective=LARGE_MODEL),
                "steps": run.steps,
                "config": spec.config,
                "checkpoints": str(self._checkpoints),
                "checkpoint_every": spec.checkpoint_every,
                "evaluate_every": 0,
                "hash_every": 0,
                **spec.job,
            }
        )
        self._controller = Controller(self._job, session)
        self._ended: Future[JobSummary] = begin(self._controller.run)

    def oldest_step(self) -> int:
        """Return the oldest step from which the trainers may go on if all of them are lost."""
        found = numbered(self._checkpoints) if self._checkpoints.is_dir() else []
        # The newest ones may turn out to be broken.
        return min(step for _, step, _ in found) if len(found) >= self._job.keep_checkpoints else 0

    def metrics(self) -> dict[str, float]:
        """Return the newest metrics of the trainer with the most steps."""
        reports = [group.report for group in self._controller.status().groups]
        newest = max(reports, key=lambda report: report.step, default=None)
        return {} if newest is None else dict(newest.metrics)

    def ranks(self) -> int:
        """Return the number of processes that are to train."""
        return self._controller.wanted * self._job.members

    def running(self) -> int:
        """Return the number of processes that train."""
        return len(self._controller.trainers()) * self._job.members

    def await_weights(self, step: int) -> int:
        """Wait until there are weights of a step at least; return their step.

        Raises:
            TrainingFailed: no trainer is left, or they have ended before that step.
        """
        while (found := self._look_for_weights(step)) is None:
            if self._ended.done():
                self._ended.result()
                if (found := self._look_for_weights(step)) is None:
                    raise TrainingFailed(f"the trainers have ended before step {step}: they were told to stop")
                return found
        return found

    def _look_for_weights(self, step: int) -> int | None:
        """Return the step of weights in the folder, or that a trainer has or gets within `ANSWER_TIMEOUT`."""
        from loom.rl.generation import weight_files

        if self._run.weights is Weights.FILES:
            if weight_files.path_of(self._weights, step).is_dir():
                return step
            newest = weight_files.latest(self._weights)
            if newest is not None and newest >= step:
                return newest
        began = time.monotonic()
        found: int | None = self._first(self._trainers(), lambda one: one.await_weights, step, ANSWER_TIMEOUT)
        if found is None:  # none of them writes weights now
            time.sleep(max(0.0, began + LOOK_EVERY - time.monotonic()))
        return found

    def rollouts_written(self) -> None:
        """Wake the trainers that wait for a step's rollouts. Without the message they look again soon."""
        for trainers in self._controller.trainers():
            begin(trainers.rollouts_written.call().get, timeout=ANSWER_TIMEOUT)

    def ask(self, endpoint: Callable[[Any], Any], *args: Any) -> Any:
        """Return the answer of the first trainer that gives one; None if none does."""
        found = (self._first([one], endpoint, *args) for one in self._trainers())
        return next((answer for answer in found if answer is not None), None)

    def _trainers(self) -> list[Any]:
        """Return the groups that train; if there are none, wait a little."""
        found = self._controller.trainers()
        time.sleep(0 if found else LOOK_EVERY)
        return found

    def _first(self, groups: list[Any], endpoint: Callable[[Any], Any], *args: Any) -> Any:
        """Ask each group's first trainer at once; return the first answer that is not None, or None."""
        waiting = {begin(endpoint(one.slice(gpus=0)).call_one(*args).get) for one in groups}
        while waiting and not self._ended.done():
            done, waiting = wait(waiting, LOOK_EVERY, FIRST_COMPLETED)
            for answer in done:
                if answer.exception() is None and answer.result() is not None:
                    return answer.result()
        return None

    def result(self) -> JobSummary:
        """Wait for the end of the trainers; return their summary.

        Raises:
            TrainingFailed: no trainer is left.
        """
        while not self._ended.done():
            _wait(self._ended)
        return self._ended.result()

    def stop(self) -> None:
        """Let the trainers end, and wait for that."""
        self._controller.stop()
        while not self._ended.done():
            _wait(self._ended)

    def close(self) -> None:
        """Stop the trainers at once unless they have ended."""
        if not self._ended.done():
            self._controller.abort()
            wait([self._ended], CLOSE_TIMEOUT)


def _wait(future: Future[Any]) -> None:
    wait([future], LOOK_EVERY)


NOTHING = Rollout("", [0], [0], [0.0], 0.0, advantage=0.0, weights_step=0)
"""A rollout from which nothing is learned."""
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

    def __init__(self, spec: Trainers, run: TrainerRun) -> None:
        super().__init__()
        self._spec = spec
        self._run = run
        self._reference: Any = None  # the model from which the policy is kept close
        self._sums: dict[str, float] = {}  # over this process's tokens of the step, by metric
        self._pad = 0  # the token that fills rollouts up, of which no model learns
        self._trained = 0  # rollouts that the parameters have learned from
        self._parts: list[Any] = []  # of the step that is computed
        self._count = 0  # rollouts of that step, in all processes
        self._tokens = 1  # of their completions
        self._shard = 0
        self._published = -1  # the step of the weights that this process published last
        self._kept: dict[int, Mapping[str, Any]] = {}  # the newest weights, by step, unless they are files
        self._sent = -1  # the newest step of the weights that generators asked for
        self._transfers: dict[str, WeightTransfer] = {}  # by the server's URL
        self._newest = -1  # the step of the weights that generators can have: kept, or written by this process
        self._changed = threading.Condition()  # notified when there are newer weights
        self._arrived = threading.Event()  # set when a step's rollouts were written
        self._clock = _TrainerClock()

    def warm_up(self) -> None:
        """Import what the first step needs."""
        import loom.rl.generation.weight_files
        import loom.rl.policy_gradient  # noqa: F401

        if self._spec.model is not None or self._spec.reference is not None:
            import transformers  # noqa: F401

    def build(self) -> Any:
        """Return the model."""
        own = None if os.environ.get("LOOM_TIMING_DIR") else Path(self._run.folder) / "timing"
        tracing.configure(role="trainer", folder=own, lines=self._run.lines or None)
        spec = self._spec
        if spec.make_model is not None:
            model = spec.make_model()
            assert spec.tokenizer is not None
            self._pad = spec.tokenizer.pad
        else:
            assert spec.model is not None
            model = self._read(spec.model)
            if spec.lora is not None:
                adapters.add_adapters(model, spec.lora)
            if spec.checkpoint_activations:
                causal.checkpoint_activations(model)
            if self.device.startswith("cuda"):
                causal.check_room(model, self.device, self._sharing)
        if spec.reference is not None:
            from loom.train.loop.training_state import placed

            reference = self._read(spec.reference).requires_grad_(False)
            if self._bfloat16:
                reference = reference.bfloat16()
            self._reference = placed(reference, self, self._sharing)
        return model

    @property
    def _sharing(self) -> int:
        """The number of processes that share the parameters of a model."""
        return self._spec.members if self._spec.parallel == "fsdp" else 1

    def _read(self, path: str | os.PathLike[str]) -> Any:
        """Return a model of transformers. Of the processes that share it, only the first one reads its weights."""
        return causal.load(path) if self._sharing == 1 else causal.load_for_group(path)

    def parts(self, model: Any) -> Sequence[Any]:
        """Return the layers of a model of transformers."""
        return causal.layers_of(model) if causal.is_causal(model) else ()

    def loss(self, model: Any, batch: Batch) -> Any:
        """Publish the weights, wait for the rollouts of the step, and return the loss of a part of them."""
        if batch.part == 0:
            self._await_rollouts(model, batch)
        return self.loss_of(model, batch)

    def _await_rollouts(self, model: Any, batch: Batch) -> None:
        """Publish the weights, and read the rollouts of the step when they are there."""
        from loom.rl.rollouts import RolloutStore, parts_of

        self._shard = batch.shard
        self._clock.watch(model)
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
        self._tokens, self._sums = first.tokens, {}
        self._clock.begin()

    def loss_of(self, model: Any, batch: Batch) -> Any:
        """Return the loss of a batch: the mean over the batches of all processes is that of the step's tokens."""
        import torch

        from loom.rl.policy_gradient import (
            PolicyBatch,
            completion_logits,
            divergence,
            logprobs_of,
            measured,
            policy_loss,
            token_logprobs,
        )

        spec, run = self._spec, self._run
        rollouts = [one for part in self._parts for one in part.rollouts][batch.part :: batch.parts]
        # Without rollouts of its own it computes something: the members of a group gather each layer together.
        tensors = PolicyBatch.of(rollouts or [NOTHING], self._pad).to(self.device)
        logits = completion_logits(model, tensors, run.temperature, bfloat16=self._bfloat16)
        logprobs = logprobs_of(logits, tensors)
        loss = policy_loss(logprobs, tensors, spec.clip)
        sums = measured(logits.detach(), logprobs.detach(), tensors, spec.clip)
        if self._reference is not None:
            with torch.no_grad():
                others = token_logprobs(self._reference, tensors, run.temperature, bfloat16=self._bfloat16)
            distance = divergence(logprobs, others)[tensors.mask].sum()
            sums["kl"] = float(distance.detach())
            loss = loss + spec.kl * distance
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + (value if rollouts else 0.0)
        return loss * batch.shards * batch.parts / self._tokens

    @property
    def _bfloat16(self) -> bool:
        """True if the model computes in bfloat16."""
        return self._spec.model is not None and self._spec.bfloat16 and self.device.startswith("cuda")

    def stepped(self, model: Any, step: int) -> dict[str, float]:
        """Publish the weights of the step, and return its times."""
        tracing.event("train.step.done", step=step - 1, rank=self._shard, dur_ms=1000 * self._clock.end())
        self._trained += self._count
        self._publish(model, step)
        return {**self._clock.collect(), **self._means(), "rollouts/trained": self._trained}

    def _means(self) -> dict[str, float]:
        """Return the means of the step's metrics over the tokens of all members of the group."""
        import torch
        from torch import distributed

        sums = torch.tensor(list(self._sums.values()), dtype=torch.float64, device=self.device)
        if self._sums and self._spec.members > 1:
            distributed.all_reduce(sums)
        found = dict(zip(self._sums, sums.tolist(), strict=True))
        tokens = found.pop("tokens", 0.0)
        return {name: value / tokens for name, value in found.items()} if tokens else {}

    def save(self) -> Mapping[str, Any]:
        """Return the number of rollouts behind the parameters."""
        return {"trained": self._trained}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue to count."""
        self._trained = state["trained"]

    def _publish(self, model: Any, step: int) -> None:
        """Make the weights of a step known: all processes call this, and the first one writes."""
        from loom.rl.generation import tensor_files

        run, members = self._run, self._spec.members
        if run.colocated:
            import torch

            torch.cuda.empty_cache()  # generators are next on this GPU
        with self._clock.measured("write_checkpoint") as began:
            final: Final = tensor_files.unchanged
            weights = model.state_dict()
            if causal.is_causal(model):
                weights = causal.weights_of(model)
            if self._spec.lora is not None:
                weights, final = adapters.without_adapters(weights), adapters.merged(model)
            files = run.weights is Weights.FILES
            if not files:
                self._keep(model, weights, step, final)
            if self._shard < members and (files or step == run.steps):
                self._write(model, weights, step, final)
                if self._shard == 0:
                    write_ms = 1000 * (time.monotonic() - began)
                    tracing.event("ckpt.write.done", step=step, write_ms=write_ms)
                    if files:
                        self._announce(step)
        self._published = step

    def _keep(self, model: Any, weights: Mapping[str, Any], step: int, final: Final) -> None:
        """Keep weights to send them: the first process of each group does, the others give it their parts."""
        from loom.rl.generation import tensor_files

        transfer = self._run.weights is Weights.TRANSFER
        dtype = "bfloat16" if transfer and self._bfloat16 else None
        if self._shard % self._spec.members:
            tensor_files.take_part(weights, dtype, final)
            return
        if transfer and causal.is_causal(model):  # vLLM knows the names of files
            weights, final = causal.with_names_of_files(model, weights, dtype, final)
        self._announce(step, tensor_files.copied(weights, dtype, final, self._kept.get(self._newest)))

    def _write(self, model: Any, weights: Mapping[str, Any], step: int, final: Final) -> None:
        """Write weights to their folder: the first process does, the others of its group give it their parts."""
        from loom.rl.generation import tensor_files, weight_files

        folder = Path(self._run.folder) / "weights"
        dtype = "bfloat16" if self._bfloat16 else None
        if self._shard != 0 or weight_files.path_of(folder, step).exists():  # the step is made again
            tensor_files.take_part(weights, dtype, final)
        elif causal.is_causal(model):
            config = causal.config_of(model, dtype or "float32")
            weights, final = causal.with_names_of_files(model, weights, dtype, final)
            weight_files.save(weights, config, folder, step, dtype=dtype, final=final)
        else:
            config = {"model": type(model).__name__, **_own_config(model)}
            weight_files.save(weights, config, folder, step)

    def _announce(self, step: int, state: Mapping[str, Any] | None = None) -> None:
        """Let `await_weights` return the step. Given weights are kept to be sent."""
        with self._changed:
            self._newest, self._sent = step, min(self._sent, step - 1)  # the step may be made again
            if state is not None:
                self._kept[step] = state
            self._forget()
            self._changed.notify_all()

    def _forget(self) -> None:
        """Forget weights that were asked for, and older ones. Generators that start again take the newest."""
        for step in sorted(self._kept.keys() - {self._newest}):
            if not self._sent < step < self._newest or len(self._kept) > self._run.keep:
                del self._kept[step]

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

        Args:
            step: the step of the weights.
            generators: their actors, or for `Weights.TRANSFER` the `TransferTarget` of each.

        Returns:
            The step of the weights, and for each generator why it has not got them; None if it has.
        """
        return await self._send_weights(step, generators)

    async def _send_weights(self, step: int, generators: list[Any]) -> tuple[int, list[str | None]]:
        with self._changed:
            sent = step if step in self._kept else max(self._kept)
            state = self._kept[sent]
        transfer = self._run.weights is Weights.TRANSFER
        by_transfer = functools.partial(self._transfer, Comparisons())
        shown, send = ("transfer", by_transfer) if transfer else ("message", _send)
        sending = [_sent(shown, sent, functools.partial(send, one, sent, state)) for one in generators]
        results = await asyncio.gather(*sending)
        for one in self._transfers.values():
            one.forget_other(state)
        with self._changed:
            self._sent = max(self._sent, sent)
            self._forget()
        return sent, results

    async def _transfer(
        self, comparisons: Comparisons, target: TransferTarget, step: int, state: Mapping[str, Any], trace: str
    ) -> UpdateAnswer:
        """Broadcast tensors, or what differs in them, to the workers of a vLLM server."""
        if target.url not in self._transfers:
            self._transfers[target.url] = WeightTransfer(target)
        try:
            return await self._transfers[target.url].send(step, state, comparisons)
        except Exception:
            del self._transfers[target.url]  # most likely its server is gone for ever
            raise


class GpuTrainer(Trainer):
    """A trainer with a GPU of its own."""

    device = "cuda"


def _own_config(model: Any) -> Mapping[str, Any]:
    """Return what a model says of itself for its files, in ``config``: only a mapping is taken."""
    config = getattr(model, "config", None)
    return config if isinstance(config, Mapping) else {}


async def _send(generator: Any, step: int, state: Mapping[str, Any], trace: str) -> UpdateAnswer:
    """Send tensors to a generator, over Monarch."""
    answer: UpdateAnswer = await generator.update_weights.call_one(step, state=state, trace=trace)
    return answer


async def _sent(url: str, step: int, send: Callable[[str], Awaitable[UpdateAnswer]]) -> str | None:
    """Send weights under a trace id; return why they have not arrived, or None."""
    with tracing.trace() as trace:
        began = time.monotonic()
        tracing.event("weights.client.send", url=url, path=f"step_{step}")
        try:
            answer = await send(trace)
        except Exception as error:  # noqa: BLE001 - the orchestrator starts another generator
            return str(error) or type(error).__name__
        wall_ms, rpc_ms = 1000 * (time.monotonic() - began), float(answer["rpc_ms"])
        tracing.event("weights.client.done", wall_ms=wall_ms, rpc_ms=rpc_ms, queue_ms=max(0.0, wall_ms - rpc_ms))
    return None


class _TrainerClock:
    """The times of a trainer's step, in seconds."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._step_began = self._began = self._gradient = time.monotonic()
        self._watched: Any = None

    def add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def measured(self, name: str) -> _Measured:
        return _Measured(self, name)

    def watch(self, model: Any) -> None:
        """Have the gradients of a model noted. Its members share the parameters by now, if they do so at all."""
        if self._watched is not model:
            self._watched = model
            for parameter in (one for one in model.parameters() if one.requires_grad):
                parameter.register_post_accumulate_grad_hook(self.saw_gradient)

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
