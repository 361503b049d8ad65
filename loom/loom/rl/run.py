"""`OrchestratorRun`: the loop of an orchestrator, step by step."""

from __future__ import annotations

import functools
import json
import logging
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from loom import tracing
from loom.errors import Conflict, LoomError, WrongArguments
from loom.rl.engines.engine import PauseMode
from loom.rl.generation.generator_pool import GeneratorPool, Inflight, PooledGenerator, PromptRequest
from loom.rl.generation.generator_requests import GeneratorRequests
from loom.rl.generation.interruptible_calls import ProcessGone
from loom.rl.generation.weight_client import WeightsVia
from loom.rl.generation.weight_orders import WeightOrders
from loom.rl.judging import Answer, Judge, Judged
from loom.rl.multi_turn import MultiTurn
from loom.rl.process_home import process_home
from loom.rl.prompts import Prompt
from loom.rl.rollouts import Rollout, RolloutStore, fresh, split
from loom.rl.samples import Sample
from loom.rl.settings import Options, RunSpec, RunSummary, StepRecord, TrainerRun, Weights
from loom.rl.task import Tokenizer, prompt_tokens
from loom.rl.trainer import Training, restored_step
from loom.terminal_text import fit_line
from loom.threadlet import Deferred, Threadlet

logger = logging.getLogger(__name__)


class StepRecords:
    """The records of all steps, in a file of JSON lines. Records that a full disk refuses follow later."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.all = [record for line in lines if (record := _read(line)) is not None]
        self._behind = False  # whether the file lacks some of them, or has one in part

    def keep_before(self, step: int) -> None:
        """Forget the steps that are made again."""
        self.all = [one for one in self.all if one.step < step]
        self._write_all()

    def _write_all(self) -> None:
        aside = self._path.with_suffix(".new")
        aside.write_text("".join(f"{json.dumps(asdict(one))}\n" for one in self.all))
        aside.replace(self._path)

    def add(self, record: StepRecord) -> None:
        self.all.append(record)
        try:
            if self._behind:
                self._write_all()
            else:
                with self._path.open("a") as file:
                    file.write(f"{json.dumps(asdict(record))}\n")
        except OSError as error:
            if not self._behind:
                logger.warning("the steps' records wait until %s has room: %s", self._path, error)
            self._behind = True
        else:
            self._behind = False


def _read(line: str) -> StepRecord | None:
    """Return the record of a line; None if its program was killed while it wrote it."""
    try:
        return StepRecord(**json.loads(line))
    except (ValueError, TypeError):
        return None


@dataclass
class AsyncBarrier:
    """The barrier of a step: ``step - ckpt_step > async_level``.

    With an ``async_level`` of 2 the policy of step 3 is good for step 5 (5 - 3 > 2 is false), and not for step 6.
    With 0, each step waits for the policy of the one before.
    """

    async_level: int
    ckpt_step: int | None = None
    """The step of the generators' policy; None while they have none."""

    def hit(self, step: int) -> bool:
        """Return whether a step has to wait for a newer policy."""
        return self.ckpt_step is None or step - self.ckpt_step > self.async_level

    def target(self, step: int) -> int:
        """Return the step of the policy that a step waits for: the oldest that is good for it."""
        return max(0, step - self.async_level)

    def staleness(self, step: int) -> int:
        """Return how many steps the policy is behind."""
        return step - (self.ckpt_step or 0)


_log = logging.getLogger("loom")

NAME = "orchestrator"
"""The replica of the orchestrator in the weaver, and the group of it."""
ATTEMPTS = 3
"""Times that a step is generated if none of its completions can be rewarded."""
SEEDS = 1_000_003
"""The distance of two steps' seeds."""


class OrchestratorRun:
    """A run that goes on, for the thread that called `Orchestrator.run`."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._options = self._wanted = spec.options
        self._changes: list[Deferred] = []  # for the next step
        self._weights = Weights(spec.weights)
        self._folder = folder = Path(spec.folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._store = RolloutStore(folder)
        self._records = StepRecords(folder / "steps.jsonl")
        self._barrier = AsyncBarrier(self._options.async_level)
        self._dropped = 0
        self._asked = 0  # prompts of requests that go on from step to step
        self._asked_prompts: dict[str, Prompt] = {}  # of those requests, by id
        self._judge = Judge(spec)
        self._turns: MultiTurn | None = None  # of a task that answers prompts by itself
        self._failed = 0
        self._evaluated: dict[str, float] = {}  # the newest evaluation
        self._seconds: dict[str, float] = {}

    def run(self) -> RunSummary:
        spec, options, began = self._spec.generators, self._options, time.monotonic()
        settings = TrainerRun(
            folder=str(self._folder),
            steps=self._spec.steps,
            weights=self._weights,
            temperature=spec.temperature,
            keep=options.async_level + (1 if self._weights is Weights.TRANSFER else 3),
            lines=self._spec.lines,
            colocated=spec.colocated,
        )
        session = process_home()
        first = self._first_step()
        tracing.configure(role=NAME, folder=_timing_folder(self._folder), lines=self._spec.lines or None)
        self._training = training = Training(session, self._spec.trainers, settings)
        model = None if spec.model is None else os.fspath(spec.model)
        pause = PauseMode(spec.options.get("pause", PauseMode.WAIT))
        requests = GeneratorRequests(spec.kind, model, pause, self._spec.connections)
        if self._weights is Weights.TRANSFER:
            spec = replace(spec, options={**spec.options, "transfer": True})
        self._orders = WeightOrders(training, requests, self._via, self._folder, self._weights, pause)
        self._pool = pool = GeneratorPool(
            session, spec, self._folder, requests, self._via, self._load, self._spec.lines
        )
        self._inflight = Inflight(pool)
        if self._spec.has_turns:
            self._turns = MultiTurn(self._spec.task, pool, self._tokenizer, self._spec.rollout_timeout)
        try:
            with Threadlet(
                NAME, group=NAME, weaver=session.weaver_address(), devices=(), config=self._config(options)
            ) as threadlet:
                _claim_name(threadlet)
                self._register(threadlet)
                if first < self._spec.steps:
                    self._judge.start()
                    if not spec.colocated:  # they start while the trainers do
                        pool.resize(options.generators)
                    self._barrier.ckpt_step = training.await_weights(self._barrier.target(first))
                    pool.resize(options.generators)
                    pool.await_all()
                for step in range(first, self._spec.steps):
                    with threadlet.step(step, max_step=self._spec.steps) as block:
                        block.metrics.update(self._step(step))
                    if threadlet.should_stop:
                        training.stop()
                        break
                pool.close()
                result = training.result()
                self._tidy()
        finally:
            pool.close()
            training.close()
            requests.close()
            self._judge.close()
        return RunSummary(
            steps=tuple(self._records.all),
            trained=int(result.metrics.get("rollouts/trained", 0)),
            dropped=self._dropped,
            lost_generators=pool.lost,
            training=result,
            seconds=time.monotonic() - began,
        )

    def _first_step(self) -> int:
        """Return the first step without rollouts; an earlier run's rollouts are trained on."""
        step = restored_step(self._folder)
        while self._store.has(step) and step < self._spec.steps:
            if len(fresh(self._store.read_all(step), step, self._bound)) < self._store.read(step, 0).count:
                break
            step += 1
        for later in self._store.steps():
            if later >= step:
                self._store.remove(later)
        self._records.keep_before(step)
        return step

    @property
    def _bound(self) -> int:
        """The largest staleness of rollouts to train on."""
        bound = self._spec.max_staleness
        return self._options.async_level if bound is None else bound

    def _via(self) -> WeightsVia:
        return self._options.weights_via

    def _config(self, options: Options) -> Mapping[str, object]:
        """Return what the weaver shows as the configuration: the options, and what does not change."""
        plain = {"weights_via": options.weights_via.value, "split": list(options.split)}
        plain["reward_weights"] = list(options.reward_weights)
        return {**asdict(options), **plain, "weights": self._weights.value}

    def _register(self, threadlet: Threadlet) -> None:
        for name in ("batch", "generators", "max_tokens", "async_level", "inflight"):
            threadlet.handler(name)(_handler(functools.partial(self._change, name), int))
        threadlet.handler("reward_weights")(_handler(self._change_reward_weights, list[float]))
        threadlet.handler("split")(_handler(self._change_split, list[float]))
        threadlet.handler("weights_via")(_handler(functools.partial(self._change, "weights_via"), WeightsVia))

    def _change(self, name: str, value: Any) -> Deferred:
        """Change an option from the next step on; an exception refuses the change."""
        if name == "inflight":
            self._spec.check_inflight(value)
        wanted = replace(self._wanted, **{name: value})
        wanted.check()
        self._spec.check_turns(wanted)
        self._wanted = wanted
        self._changes.append(change := Deferred())
        return change

    def _change_split(self, shares: list[float]) -> Deferred:
        if len(shares) not in (0, self._training.ranks()):
            raise WrongArguments(f"split has {len(shares)} shares, for {self._training.ranks()} trainer processes")
        return self._change("split", tuple(shares))

    def _change_reward_weights(self, weights: list[float]) -> Deferred:
        names = self._judge.names
        if len(weights) != len(names):
            raise WrongArguments(f"reward_weights has {len(weights)} values, for {', '.join(names)}")
        return self._change("reward_weights", tuple(weights))

    def _adopt_changes(self, step: int) -> None:
        if self._wanted.generators != self._options.generators:
            self._pool.resize(self._wanted.generators)
        self._options = self._wanted
        for change in self._changes:
            change.applied(step)
        self._changes.clear()

    def _step(self, step: int) -> Mapping[str, object]:
        """Make a step; return its metrics."""
        began, self._seconds = time.monotonic(), {}
        tracing.event("step.begin", step=step)
        self._adopt_changes(step)
        self._pool.admit()
        self._barrier.async_level = min(self._options.async_level, self._bound)
        if self._spec.lines:
            ckpt_step, level = self._barrier.ckpt_step, self._barrier.async_level
            line = f"progress.step={step}, ckpt_step={ckpt_step}, async_level={level}"
            print(fit_line(line), flush=True)  # noqa: T201 - a log line, as those of `loom.tracing`
        if self._barrier.hit(step) or self._pool.asleep:
            self._update_weights(step)
        every = self._spec.evaluate_every
        evaluation = self._evaluate() if every and step % every == 0 else None
        answers, judged, rollouts, dropped = self._generate(step)
        if self._spec.generators.colocated:
            with _timed(self._seconds, "sleep"):
                self._pool.sleep()  # before the trainers have something to do
        with _timed(self._seconds, "write_batch"):
            self._store.write(split(rollouts, step, self._training.ranks(), self._options.split))
            self._training.rollouts_written()
        self._tidy()
        cut = [one.truncated for _, _, group in answers for one in group]
        seconds = time.monotonic() - began
        record = StepRecord(
            step=step,
            reward=statistics.fmean(judged.rewards),
            staleness=self._barrier.staleness(step),
            trunc_pct=100 * sum(cut) / max(1, len(cut)),
            dropped=dropped,
            rollouts=len(rollouts),
            seconds=seconds,
            failed=judged.failed,
            flat=judged.flat,
            evaluation=evaluation,
        )
        self._failed += judged.failed
        tracing.event(
            "rollout",
            trunc_pct=record.trunc_pct,
            current_step=step,
            ckpt_step=self._barrier.ckpt_step,
            staleness=record.staleness,
        )
        tracing.event("step.complete", step=step, wall=seconds)
        self._records.add(record)
        if self._spec.on_step is not None:
            self._spec.on_step(record)
        return {**self._metrics(record), **{f"rewards/{name}": one for name, one in judged.means.items()}}

    def _metrics(self, record: StepRecord) -> Mapping[str, object]:
        own = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        return {
            **self._training.metrics(),
            **own,
            "time/step": record.seconds,
            "reward": record.reward,
            "staleness": record.staleness,
            "trunc_pct": record.trunc_pct,
            "rollouts/dropped": self._dropped,
            "rewards/failed": self._failed,
            "rewards/flat": record.flat,
            **{f"eval/{name}": one for name, one in self._evaluated.items()},
            "generators": len(self._pool.living),
            "trainers": self._training.running(),
        }

    def _update_weights(self, step: int) -> None:
        target = self._barrier.target(step)
        tracing.event(
            "barrier", step=step, ckpt_step=self._barrier.ckpt_step, async_level=self._barrier.async_level
        )
        tracing.event("ckpt.wait.start", target_step=target)
        with _timed(self._seconds, "wait_for_policy"):
            found = self._training.await_weights(target)
        wait_ms = 1000 * self._seconds["wait_for_policy"]
        tracing.event("ckpt.wait.done", target_step=target, wait_ms=wait_ms)
        if self._pool.asleep:
            with _timed(self._seconds, "wake"):
                self._pool.wake()
        with _timed(self._seconds, "broadcast_weights"):
            loaded = self._orders.load(self._pool.living, found)
        self._barrier.ckpt_step = loaded.step
        for one, reason in loaded.lost:
            self._pool.lose(one, reason)

    def _load(self, one: PooledGenerator) -> None:
        """Give a generator that has just started the current weights."""
        assert self._barrier.ckpt_step is not None
        loaded = self._orders.load([one], self._barrier.ckpt_step)
        if loaded.lost:
            raise ProcessGone(loaded.lost[0][1])

    def _evaluate(self) -> float | None:
        """Judge a completion of each prompt of the evaluation; return their mean reward."""
        prompts = [Prompt.of(one) for one in self._spec.task.evaluation()]
        if not prompts:
            return None
        with _timed(self._seconds, "evaluate"):
            samples = self._samples(prompts, 1, 0)
            answers = [(str(at), *one) for at, one in enumerate(zip(prompts, samples, strict=True))]
            judged = self._judge.judge(answers, self._options.reward_weights)
        reward = {"reward": statistics.fmean(judged.rewards)} if judged.rewards else {}
        self._evaluated = {**reward, **judged.means, "failed": judged.failed}
        return reward.get("reward")

    def _generate(self, step: int) -> tuple[list[Answer], Judged, list[Rollout], int]:
        """Return the completions of a step, their judgement, what to train on, and how many were too old."""
        options, dropped, attempt = self._options, 0, 0
        while True:
            inflight = max(options.batch, options.inflight, self._inflight.count * options.group)
            tracing.event("gen.batch.start", inflight=inflight, target_batch=options.batch)
            before = self._seconds.get("generate", 0.0)
            with _timed(self._seconds, "generate"):
                answers = self._answers(step)
            dur_ms = 1000 * (self._seconds["generate"] - before)
            tracing.event("gen.batch.done", completions=options.batch, dur_ms=dur_ms, inflight=inflight)
            with _timed(self._seconds, "rewards"):
                judged = self._judge.judge(answers, self._options.reward_weights)
            if judged.failed:
                count = sum(len(group) for _, _, group in answers)
                text = "%d of %d completions of step %d have no reward, and are left out: %s"
                _log.warning(text, judged.failed, count, step, judged.failure)
            kept = fresh(judged.rollouts, step, self._bound)
            old = len(judged.rollouts) - len(kept)
            dropped += old
            self._dropped += old
            if kept:
                return answers, judged, kept, dropped
            if not judged.rewards:
                attempt += 1
                if attempt == ATTEMPTS:
                    text = f"no completion of step {step} has a reward, in {ATTEMPTS} attempts: {judged.failure}"
                    raise LoomError(text)
            _log.warning("no rollout of step %d can be trained on: it is generated again", step)

    def _answers(self, step: int) -> list[Answer]:
        options = self._options
        wanted, seed = options.batch // options.group, SEEDS * step
        if options.inflight <= options.batch and not self._inflight.count:
            prompts = self._prompts(step, wanted)
            samples = self._samples(prompts, options.group, seed)
            return [(f"{step}.{n}", *one) for n, one in enumerate(zip(prompts, samples, strict=True))]
        missing = max(wanted, options.inflight // options.group) - self._inflight.count
        prompts = self._prompts(step, missing) if missing > 0 else []
        self._asked += len(prompts)
        first = self._asked - len(prompts)
        new = [
            PromptRequest(
                f"{step}.{first + n}", self._sent(prompt), options.group, options.max_tokens, seed + 31 * n
            )
            for n, prompt in enumerate(prompts)
        ]
        self._asked_prompts.update((one.id, prompt) for one, prompt in zip(new, prompts, strict=True))
        finished = self._inflight.next_finished(wanted, new)
        return [(one.id, self._asked_prompts.pop(one.id), [*map(Sample.of, found)]) for one, found in finished]

    def _samples(self, prompts: list[Prompt], n: int, seed: int) -> list[list[Sample]]:
        """Return ``n`` answers to each prompt."""
        if self._turns is not None:
            return self._turns.samples(prompts, n, self._options.max_tokens, seed)
        found = self._pool.generate([self._sent(one) for one in prompts], n, self._options.max_tokens, seed)
        return [[*map(Sample.of, group)] for group in found]

    def _prompts(self, step: int, count: int) -> list[Prompt]:
        prompts = [Prompt.of(one) for one in self._spec.task.prompts(step, count)]
        if len(prompts) != count:
            raise WrongArguments(f"the task gave {len(prompts)} prompts for step {step}, and not {count}")
        if prompts:
            self._judge.check(prompts[0])
        return prompts

    def _sent(self, prompt: Prompt) -> Any:
        """Return what generators get: a text, or the tokens of a chat."""
        if isinstance(prompt.content, str):
            return prompt.content
        return prompt_tokens(prompt, self._tokenizer)

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        """The tokenizer, which may be read from a folder."""
        return self._spec.generators.own_tokenizer

    def _tidy(self) -> None:
        """Remove rollouts and weights that nobody needs any more."""
        from loom.rl.generation import weight_files as weights

        self._store.remove_before(self._training.oldest_step())
        weights.prune(self._folder / "weights", self._options.async_level + 3)


class _timed:  # noqa: N801 - it reads as a function
    """A block whose seconds are added to a part of the step."""

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds = seconds
        self._name = name
        self._span = tracing.span(f"rl.{name}")

    def __enter__(self) -> None:
        self._at = time.monotonic()
        self._span.__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        self._span.__exit__(*exc_info)
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + time.monotonic() - self._at


def _timing_folder(folder: Path) -> Path | None:
    """Return where the events of a run go; None if the environment says where."""
    return None if os.environ.get("LOOM_TIMING_DIR") else folder / "timing"


def _claim_name(threadlet: Threadlet) -> None:
    """Raise `ReplicaTaken` if the user has a run in another session: the changes to one would reach the other."""
    try:
        threadlet.claim()
    except Conflict as error:
        text = f"another run of yours goes on already: end it first, as with stop({NAME!r}) ({error})"
        raise Conflict(text, code=error.code) from None


def _handler(change: Callable[[Any], Deferred], kind: type) -> Callable[[Any], Deferred]:
    """Return a handler for values of a type, to which the threadlet converts them."""

    def apply(value: Any) -> Deferred:
        return change(value)

    apply.__annotations__["value"] = kind
    return apply
