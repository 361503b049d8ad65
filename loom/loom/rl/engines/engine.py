"""`InferenceEngine`: what a generator needs of the program that completes its prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from loom.rl.generation.completions import Completion, Sampling, TextOrTokens

if TYPE_CHECKING:
    from torch import Tensor

    from loom.rl.generation.engine import EngineState
    from loom.rl.generation.weight_client import UpdateAnswer


class EngineKind(str, Enum):
    """The engines that a generator may have."""

    LOOM = "loom"
    VLLM = "vllm"
    SGLANG = "sglang"
    TRANSFORMERS = "transformers"

    @property
    def in_process(self) -> bool:
        """True if the engine computes in the generator's process, so that it also takes weights as tensors."""
        return self in (EngineKind.LOOM, EngineKind.TRANSFORMERS)

    @property
    def has_http(self) -> bool:
        """True if completions and orders may also go to an HTTP server of the engine."""
        return self in (EngineKind.LOOM, EngineKind.VLLM)


class PauseMode(str, Enum):
    """The fate of completions that are under way when an engine pauses."""

    WAIT = "wait"
    """They end first, so that none has tokens of two policies."""
    KEEP = "keep"
    """They stand still, and go on with the new weights, which compute all keys and values again."""


class InferenceEngine(Protocol):
    """An engine with one model, whose weights change between completions. All methods work while others do."""

    async def start(self) -> None:
        """Start, and return when the engine takes requests.

        Raises:
            Unavailable: the engine ended, or is not reached. The text says why.
            WrongArguments: the engine has another model, or lacks what a generator needs.
        """

    async def complete(self, prompts: Sequence[TextOrTokens], n: int, sampling: Sampling) -> list[Completion]:
        """Return ``n`` completions of each prompt, those of the first one first.

        Raises:
            WrongArguments: the engine refuses the request.
            LimitReached: too many completions wait already. Nothing was begun.
            Unavailable: the engine is gone, or has other weights than it should.
        """

    async def pause(self) -> None:
        """Let no completion go on until `resume`; return when none does."""

    async def resume(self) -> None:
        """Let completions go on."""

    async def update_weights(
        self, step: int, path: str | None = None, state: Mapping[str, Tensor] | None = None
    ) -> UpdateAnswer:
        """Pause, load the weights of a step, and resume; return how long each part took.

        Args:
            step: the step of the weights.
            path: their folder; without it and ``state``, that of the step in the engine's own folder.
            state: the tensors themselves, for an engine in the generator's process.

        Raises:
            CheckpointBroken: the folder is not there, or not whole. The engine keeps its weights.
            WrongArguments: the weights are not this model's. The engine keeps its own.
            Unavailable: the engine may have loaded them in part, and must not be used any more.
        """

    async def step(self) -> int:
        """Return the step of the weights; 0 before the first."""

    async def state(self) -> EngineState:
        """Return how busy the engine is."""

    async def stop(self) -> None:
        """Stop the engine and all of its processes. A server that Loom has not started goes on."""
