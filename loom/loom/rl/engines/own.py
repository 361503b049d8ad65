"""`OwnEngine`: Loom's own small engine, which draws tokens in a thread of the generator's process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from loom.rl.generation.completions import Completion, RequestLimits, Sampling, TextOrTokens
from loom.rl.generation.engine import Engine, EngineState
from loom.rl.generation.weight_client import UpdateAnswer
from loom.rl.generation.weight_files import WeightUpdates

if TYPE_CHECKING:
    from torch import Tensor, nn

    from loom.rl.generation.decoding import TextTokenizer


class OwnEngine:
    """The engine and the updates of its weights.

    Args:
        make_model: returns the model; see `loom.rl.Generator`.
        tokenizer: of the prompts.
        limits: of a request.
        seed: of what is drawn.
        folder: where weights are, as ``step_N`` or ``weights/step_N``.
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        tokenizer: TextTokenizer,
        *,
        limits: RequestLimits,
        seed: int,
        folder: Path | None,
    ) -> None:
        self.engine = Engine(make_model(), tokenizer, limits=limits, seed=seed)
        self.updates = WeightUpdates(self.engine, folder)

    async def start(self) -> None:
        """Do nothing: the engine's thread runs already."""

    async def complete(self, prompts: Sequence[TextOrTokens], n: int, sampling: Sampling) -> list[Completion]:
        return await self.engine.generate(prompts, n, sampling)

    async def pause(self) -> None:
        await asyncio.to_thread(self.engine.pause)

    async def resume(self) -> None:
        self.engine.resume()

    async def update_weights(
        self, step: int, path: str | None = None, state: Mapping[str, Tensor] | None = None
    ) -> UpdateAnswer:
        """Load weights between two steps; completions that are under way go on with them."""
        return await asyncio.to_thread(self.updates.update, step, path, state)

    async def step(self) -> int:
        return self.engine.step

    async def state(self) -> EngineState:
        return self.engine.state

    async def stop(self) -> None:
        await asyncio.to_thread(self.engine.close)
