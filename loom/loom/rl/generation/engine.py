"""`Engine`: completes many prompts at the same time with one model, whose weights change between steps."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType

import torch

from loom.errors import LimitReached, OperationFailed, WrongArguments, WrongState
from loom.process.threads import keep_going
from loom.rl.generation.completions import Completion, RequestLimits, Sampling, TextOrTokens
from loom.rl.generation.decoding import DecodingBatch, Row, TextTokenizer

_log = logging.getLogger("loom")


@dataclass(frozen=True)
class Piece:
    """One step's addition to a completion."""

    index: int
    """Of the completion: those of the first prompt come first."""
    tokens: list[int]
    logprobs: list[float]
    done: bool


@dataclass(frozen=True)
class EngineState:
    """The load of an engine."""

    inflight: int
    """Completions that are being generated."""
    waiting: int
    """Completions that wait for a place."""
    step: int
    """The step of the weights."""
    tokens: int
    """Tokens that were drawn since the engine began."""


class Engine:
    """A model in a thread that draws a token for each of its rows in every step.

    A completion joins when a row is free and leaves when it is done, whatever the others do. Between two steps the
    weights can be swapped: completions that are under way go on with the new weights and the keys and values that
    the old ones computed, as their log probabilities say, and keep the ``weights_step`` with which they began.

    Args:
        model: see `DecodingBatch`. If it has ``longest``, no text is longer than so many tokens.
        tokenizer: what turns prompts into tokens.
        limits: what a request may ask for, and how many rows and waiting completions there are.
        seed: with the number of a completion it decides what is drawn, unless the request has a seed of its own.
        step: the step of the model's weights.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: TextTokenizer,
        *,
        limits: RequestLimits | None = None,
        seed: int = 0,
        step: int = 0,
    ) -> None:
        self.tokenizer = tokenizer
        self.limits = limits or RequestLimits()
        self.step = step
        self._model = model.eval()
        self._batch = DecodingBatch(model, tokenizer.eos, tokenizer.pad)
        self._seed = seed
        self._count = 0
        self._drawn = 0
        self._queue: deque[tuple[Row, CompletionStream]] = deque()
        self._streams: dict[Row, CompletionStream] = {}
        self._closed = self._paused = False
        self._swaps = 0
        """Swaps that wait for the lock, and 1 if paused. The next step waits for them: none waits for two."""
        self._changed = threading.Condition()
        """Guards the queue, the streams and the number of swaps."""
        self._lock = threading.Lock()
        """Held while the model computes a step, or gets new weights."""
        self._thread = threading.Thread(target=self._run, name="loom-engine", daemon=True)
        self._thread.start()

    @property
    def state(self) -> EngineState:
        with self._changed:
            return EngineState(len(self._streams), len(self._queue), self.step, self._drawn)

    @property
    def alive(self) -> bool:
        """True if the engine still takes requests."""
        return self._thread.is_alive() and not self._closed

    def open(
        self,
        prompts: Sequence[TextOrTokens],
        n: int = 1,
        sampling: Sampling | None = None,
        *,
        whole: bool = False,
        shorten: bool = False,
    ) -> CompletionStream:
        """Begin ``n`` completions of each prompt; return what they are read from, in the running event loop.

        Args:
            sampling: how tokens are drawn.
            whole: whether only whole completions are wanted, and no pieces.
            shorten: whether ``max_tokens`` is a default, of which the model's length may leave less.

        Raises:
            WrongArguments: the request exceeds a limit; the text says which.
            LimitReached: too many completions wait already. Nothing was begun.
        """
        sampling = self.limits.checked(sampling or Sampling(self.limits.max_tokens))
        self.limits.check_count(len(prompts), n)
        if sampling.others:
            raise WrongArguments(
                f"Loom's own engine has no {', '.join(sorted(sampling.others))}; other engines may"
            )
        stops = self._stops(sampling.stop) if sampling.stop else None
        encoded = [
            self._encoded(prompt, 1 if shorten else sampling.max_tokens) for prompt in prompts for _ in range(n)
        ]
        longest = getattr(self._model, "longest", None) if shorten else None
        stream = CompletionStream(self, [prompt for prompt in prompts for _ in range(n)], whole)
        with self._changed:
            if self._closed:
                raise WrongState("the engine is closed")
            if len(self._queue) + len(encoded) > self.limits.queue:
                raise LimitReached(
                    f"{len(self._queue)} completions wait already, and at most {self.limits.queue} may, so "
                    f"{len(encoded)} more cannot; ask again later",
                )
            for index, tokens in enumerate(encoded):
                seed = f"{self._seed}+{self._count}" if sampling.seed is None else f"{sampling.seed}/{index}"
                self._count += 1
                most = sampling.max_tokens if longest is None else min(sampling.max_tokens, longest - len(tokens))
                row = Row(tokens, replace(sampling, max_tokens=most), random.Random(seed), stops)
                stream.rows.append(row)
                self._queue.append((row, stream))
            self._changed.notify_all()
        return stream

    async def generate(
        self, prompts: Sequence[TextOrTokens], n: int = 1, sampling: Sampling | None = None
    ) -> list[Completion]:
        """Return ``n`` completions of each prompt, those of the first one first; raise as `open` does."""
        async with self.open(prompts, n, sampling, whole=True) as stream:
            async for _ in stream:
                pass
            return stream.completions()

    def swap(self, state: Mapping[str, torch.Tensor], step: int) -> None:
        """Give the model other weights, between two steps. Blocks until it has them.

        Raises:
            WrongArguments: names or shapes are not the model's, which keeps its weights.
        """
        own = self._model.state_dict()
        compare_weights(own, state)
        with self._changed:
            self._swaps += 1
        try:
            with self._lock, torch.inference_mode():
                for name, tensor in own.items():
                    tensor.copy_(state[name])
                self.step = step
        finally:
            with self._changed:
                self._swaps -= 1
                self._changed.notify_all()

    def pause(self) -> None:
        """Draw no token until `resume`. Blocks until the step that is under way is over."""
        with self._changed:
            if not self._paused:
                self._paused = True
                self._swaps += 1
        with self._lock:
            pass

    def resume(self) -> None:
        """Draw tokens again after `pause`."""
        with self._changed:
            if self._paused:
                self._paused = False
                self._swaps -= 1
                self._changed.notify_all()

    def cancel(self, rows: Sequence[Row]) -> None:
        """Generate no more of these completions."""
        with self._changed:
            for row in rows:
                row.cancelled = True
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread; what was under way fails."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _stops(self, stop: tuple[str, ...]) -> Callable[[Sequence[int]], bool]:
        def stops(tokens: Sequence[int]) -> bool:
            text = self.tokenizer.decode(tokens)
            return any(one in text for one in stop)

        return stops

    def _encoded(self, prompt: TextOrTokens, max_tokens: int) -> list[int]:
        tokens = self._tokens_of(prompt)
        self.limits.check_prompt(len(tokens))
        if self.tokenizer.pad in tokens:
            raise WrongArguments(f"a prompt has no padding, which token {self.tokenizer.pad} is")
        longest = getattr(self._model, "longest", None)
        if longest is not None and len(tokens) + max_tokens > longest:
            raise WrongArguments(
                f"the model reads at most {longest} tokens, and {len(tokens)} of the prompt and max_tokens "
                f"{max_tokens} are more"
            )
        return tokens

    def _tokens_of(self, prompt: TextOrTokens) -> list[int]:
        if not isinstance(prompt, str):
            size = self.tokenizer.size
            if wrong := [one for one in prompt if type(one) is not int or not 0 <= one < size]:
                raise WrongArguments(
                    f"a token of a prompt is a whole number from 0 to {size - 1}, not {wrong[0]!r}"
                )
            return list(prompt)
        try:
            return self.tokenizer.encode(prompt)
        except Exception as error:
            raise WrongArguments(f"the tokenizer refuses the prompt {prompt!r:.80}: {error}") from error

    def _run(self) -> None:
        keep_going("generate", self._generate)
        self._end()

    def _generate(self) -> None:
        while (joining := self._await_work()) is not None:
            with self._lock:
                drew = self._step(joining)
            self._deliver(drew)

    def _await_work(self) -> list[Row] | None:
        """Wait for work, and until no swap waits; return the rows that join, or None when the engine is closed."""
        with self._changed:
            while True:
                while self._queue and self._queue[0][0].cancelled:
                    self._queue.popleft()
                for row in [row for row in self._streams if row.cancelled]:
                    del self._streams[row]
                if self._closed:
                    return None
                if not self._swaps and (self._queue or self._streams):
                    break
                self._changed.wait()
            joining = []
            while self._queue and len(self._streams) < self.limits.concurrency:
                row, stream = self._queue.popleft()
                if not row.cancelled:
                    self._streams[row] = stream
                    joining.append(row)
            return joining

    def _step(self, joining: list[Row]) -> list[Row]:
        for row in joining:
            row.weights_step = self.step
        try:
            drew = self._batch.step(joining)
            self._drawn += len(drew)
            return drew
        except Exception as error:  # noqa: BLE001 - the model is the user's
            _log.exception("the model failed; its completions end, and the engine goes on")
            self._batch.clear()
            failed = list(self._streams)
            for row in failed:
                row.error = f"the model failed: {error!r}"
            return failed

    def _deliver(self, drew: list[Row]) -> None:
        """Give what the rows drew to those who wait for it: one wake-up for each event loop."""
        news: dict[asyncio.AbstractEventLoop, list[tuple[CompletionStream, Row, bool]]] = defaultdict(list)
        with self._changed:
            for row in drew:
                stream = self._streams.get(row)
                if stream is None:
                    continue
                done = row.done
                if done:
                    del self._streams[row]
                if done or not stream.whole:
                    news[stream.loop].append((stream, row, done))
        for loop, items in news.items():
            try:
                loop.call_soon_threadsafe(_hand_over, items)
            except RuntimeError:  # the loop is closed: nobody waits any more
                self.cancel([row for _, row, _ in items])

    def _end(self) -> None:
        with self._changed:
            self._closed = True
            self._streams.update(dict(self._queue))
            self._queue.clear()
            rows = list(self._streams)
        for row in rows:
            row.error = row.error or "the engine was closed"
        self._deliver(rows)


class CompletionStream:
    """Completions that are being generated: ``async for pieces in stream``, in the event loop that opened it.

    Pieces that came meanwhile come together. Leaving the context cancels what is not done.
    """

    def __init__(self, engine: Engine, prompts: list[TextOrTokens], whole: bool) -> None:
        self.rows: list[Row] = []
        self.whole = whole
        self.loop = asyncio.get_running_loop()
        self._engine = engine
        self._prompts = prompts
        self._told: dict[Row, int] = {}
        self._pending: dict[Row, bool] = {}
        self._open = len(prompts)
        self._news = asyncio.Event()

    def hand_over(self, row: Row, done: bool) -> None:
        """Note that a row has more tokens."""
        self._pending[row] = done
        self._news.set()

    async def __aenter__(self) -> CompletionStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._engine.cancel([row for row in self.rows if not row.done])

    async def __aiter__(self) -> AsyncIterator[list[Piece]]:
        numbers = {row: number for number, row in enumerate(self.rows)}
        while self._open:
            await self._news.wait()
            self._news.clear()
            pending, self._pending = self._pending, {}
            pieces = []
            for row, done in pending.items():
                if row.error:
                    raise OperationFailed(row.error)
                self._open -= done
                start = self._told.get(row, 0)
                end = self._told[row] = len(row.tokens)
                pieces.append(Piece(numbers[row], row.tokens[start:end], row.logprobs[start:end], done))
            yield pieces

    def completions(self) -> list[Completion]:
        """Return the whole completions, when all are done."""
        return [self.completion(number) for number in range(len(self.rows))]

    def completion(self, index: int) -> Completion:
        """Return one completion, which is done."""
        row = self.rows[index]
        written = row.tokens[:-1] if row.ended else row.tokens
        text = self._engine.tokenizer.decode(written)
        ends = [place for one in row.sampling.stop if (place := text.find(one)) >= 0] if row.stopped else []
        return Completion(
            prompt=self._prompts[index],
            text=text[: min(ends, default=len(text))],
            tokens=row.tokens,
            prompt_tokens=row.prompt_tokens,
            logprobs=row.logprobs,
            truncated=not (row.ended or row.stopped),
            weights_step=row.weights_step,
        )


def _hand_over(items: list[tuple[CompletionStream, Row, bool]]) -> None:
    for stream, row, done in items:
        stream.hand_over(row, done)


def compare_weights(own: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    """Raise `WrongArguments` unless names and shapes are the same."""
    if own.keys() != other.keys():
        lacks, extra = sorted(own.keys() - other.keys()), sorted(other.keys() - own.keys())
        raise WrongArguments(f"these weights are not this model's: missing {lacks[:5]}, unknown {extra[:5]}")
    for name, tensor in own.items():
        if tensor.shape != other[name].shape:
            raise WrongArguments(
                f"these weights are not this model's: {name} has the shape {list(other[name].shape)}, "
                f"and the model's is {list(tensor.shape)}"
            )
