"""`TransformersEngine`: ``generate`` of Hugging Face's transformers, in the generator's process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from loom.errors import LimitReached, OperationFailed, WrongArguments
from loom.rl.generation.completions import Completion, RequestLimits, Sampling, TextOrTokens
from loom.rl.generation.engine import EngineState, compare_weights
from loom.rl.generation.weight_client import UpdateAnswer
from loom.rl.generation.weight_files import WeightUpdates
from loom.rl.models import causal

if TYPE_CHECKING:
    from loom.rl.task import Tokenizer


class TransformersEngine:
    """A model of transformers. The completions of a request are generated together, requests one after the other.

    Weights change between two requests, so no completion has tokens of two policies.

    Args:
        model: the folder of the model, or its name on the hub.
        tokenizer: of the model.
        limits: of a request.
        seed: with the number of a request it decides what is drawn, unless the request has a seed of its own.
        folder: where weights are, as ``step_N`` or ``weights/step_N``.
        device: of the model, such as ``cuda:0``.
    """

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        *,
        limits: RequestLimits,
        seed: int,
        folder: Path | None,
        device: str = "cpu",
    ) -> None:
        causal.check(model, tokenizer)
        self._model = causal.load(model).to(device)
        self._tokenizer = tokenizer
        self._limits = limits
        self._seed = seed
        self._device = device
        self._updates = WeightUpdates(self, folder)
        self._lock = threading.Lock()
        """Held while the model generates, gets weights, or is paused."""
        self._paused = False
        self._step = self._count = self._inflight = self._waiting = self._drawn = 0

    async def start(self) -> None:
        """Do nothing: the model is loaded already."""

    async def complete(self, prompts: Sequence[TextOrTokens], n: int, sampling: Sampling) -> list[Completion]:
        """Return ``n`` completions of each prompt; see `InferenceEngine.complete`."""
        sampling = self._limits.checked(sampling)
        self._limits.check_count(len(prompts), n)
        encoded = [self._tokens_of(prompt) for prompt in prompts]
        count = len(prompts) * n
        if self._waiting + count > self._limits.queue:
            raise LimitReached(
                f"{self._waiting} completions wait already, and at most {self._limits.queue} may; ask again later"
            )
        self._waiting += count
        try:
            return await asyncio.to_thread(self._generate, prompts, encoded, n, sampling)
        finally:
            self._waiting -= count

    def _tokens_of(self, prompt: TextOrTokens) -> list[int]:
        try:
            tokens = self._tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        except Exception as error:
            raise WrongArguments(f"the tokenizer refuses the prompt {prompt!r:.80}: {error}") from error
        self._limits.check_prompt(len(tokens))
        size = int(self._model.get_input_embeddings().weight.shape[0])
        if wrong := [one for one in tokens if type(one) is not int or not 0 <= one < size]:
            raise WrongArguments(f"a token of a prompt is a whole number from 0 to {size - 1}, not {wrong[0]!r}")
        return tokens

    def _generate(
        self, prompts: Sequence[TextOrTokens], encoded: list[list[int]], n: int, sampling: Sampling
    ) -> list[Completion]:
        found: list[Completion] = []
        most = max(1, self._limits.concurrency // n)
        for start in range(0, len(prompts), most):
            with self._lock, torch.inference_mode():
                self._inflight = len(encoded[start : start + most]) * n
                try:
                    rows = self._rows(encoded[start : start + most], n, sampling, start)
                finally:
                    self._inflight = 0
                step = self._step
            for place, (tokens, logprobs) in enumerate(rows):
                at = start + place // n
                found.append(self._completion(prompts[at], encoded[at], tokens, logprobs, sampling, step))
        return found

    def _rows(
        self, encoded: list[list[int]], n: int, sampling: Sampling, start: int
    ) -> list[tuple[list[int], list[float]]]:
        """Return the tokens of each completion, those after its end too, and their logarithmic probabilities."""
        longest, pad = max(map(len, encoded)), self._tokenizer.pad
        tokens = torch.tensor([[pad] * (longest - len(one)) + one for one in encoded], device=self._device)
        seen = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in encoded], device=self._device)
        seed = self._seed + self._count if sampling.seed is None else sampling.seed
        self._count += 1
        torch.manual_seed(hash((seed, start)) % 2**63)
        try:
            answer = self._model.generate(input_ids=tokens, attention_mask=seen, **self._settings(n, sampling))
        except (ValueError, TypeError) as error:
            raise WrongArguments(f"transformers refuses the request: {error}") from error
        except Exception as error:
            raise OperationFailed(f"the model failed: {error!r}") from error
        written = answer.sequences[:, longest:]
        logprobs = torch.stack(
            [
                score.double().log_softmax(-1).gather(-1, written[:, at : at + 1])[:, 0]
                for at, score in enumerate(answer.scores)
            ],
            dim=1,
        )
        return list(zip(written.tolist(), logprobs.tolist(), strict=True))

    def _settings(self, n: int, sampling: Sampling) -> dict[str, Any]:
        found = {
            "max_new_tokens": sampling.max_tokens,
            "num_return_sequences": n,
            "do_sample": sampling.temperature > 0 or n > 1,
            "top_k": max(0, sampling.top_k),
            "top_p": sampling.top_p,
            "eos_token_id": self._tokenizer.eos,
            "pad_token_id": self._tokenizer.pad,
            "return_dict_in_generate": True,
            "output_scores": True,
            **sampling.others,
        }
        if sampling.temperature > 0:
            found["temperature"] = sampling.temperature
        elif n > 1:
            found["top_k"] = 1
        if sampling.min_p > 0:
            found["min_p"] = sampling.min_p
        return found

    def _completion(
        self,
        prompt: TextOrTokens,
        prompt_tokens: list[int],
        tokens: list[int],
        logprobs: list[float],
        sampling: Sampling,
        step: int,
    ) -> Completion:
        eos = self._tokenizer.eos
        ended = eos in tokens
        count = tokens.index(eos) + 1 if ended else len(tokens)
        text = self._tokenizer.decode(tokens[: count - ended])
        if stops := [place for one in sampling.stop if (place := text.find(one)) >= 0]:
            count = next(at for at in range(1, count + 1) if self._has_stop(tokens[:at], sampling.stop))
            ended, text = True, text[: min(stops)]
        self._drawn += count
        return Completion(
            prompt=prompt,
            text=text,
            tokens=tokens[:count],
            prompt_tokens=prompt_tokens,
            logprobs=logprobs[:count],
            truncated=not ended,
            weights_step=step,
        )

    def _has_stop(self, tokens: list[int], stop: tuple[str, ...]) -> bool:
        text = self._tokenizer.decode(tokens)
        return any(one in text for one in stop)

    async def pause(self) -> None:
        if not self._paused:
            self._paused = True
            await asyncio.to_thread(self._lock.acquire)

    async def resume(self) -> None:
        if self._paused:
            self._paused = False
            self._lock.release()

    async def update_weights(
        self, step: int, path: str | None = None, state: Mapping[str, torch.Tensor] | None = None
    ) -> UpdateAnswer:
        """Load weights between two requests; see `InferenceEngine.update_weights`."""
        return await asyncio.to_thread(self._updates.update, step, path, state)

    def swap(self, state: Mapping[str, torch.Tensor], step: int) -> None:
        """Give the model other weights, when no completion is under way. Blocks until it has them.

        Raises:
            WrongArguments: names or shapes are not the model's, which keeps its weights.
        """
        own = causal.weights_of(self._model)
        compare_weights(own, state)
        with self._lock, torch.inference_mode():
            for name, tensor in own.items():
                tensor.copy_(state[name])
            self._step = step

    async def step(self) -> int:
        return self._step

    async def state(self) -> EngineState:
        return EngineState(self._inflight, self._waiting - self._inflight, self._step, self._drawn)

    async def stop(self) -> None:
        """Do nothing: the engine is nothing but this object."""
