"""`WeightUpdates`: gives an engine new weights, and measures how long that takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loom import tracing
from loom.errors import CheckpointBroken, Denied, WrongArguments
from loom.rl.generation import weights

if TYPE_CHECKING:
    from torch import Tensor

    from loom.rl.generation.engine import Engine


class WeightUpdates:
    """The updates of an engine's weights, one after the other.

    Args:
        engine: the engine.
        folder: where weights are, as ``step_N`` or ``weights/step_N``; None if they come by messages only.
    """

    def __init__(self, engine: Engine, folder: Path | None) -> None:
        self._engine = engine
        self._folder = folder
        self._lock = threading.Lock()

    def update(
        self, step: int, path: str | Path | None = None, state: Mapping[str, Tensor] | None = None
    ) -> dict[str, Any]:
        """Load weights, blocking; return the answer of the seed's servers, with the step.

        Raises:
            CheckpointBroken: the folder is not there, or not whole.
            WrongArguments: the weights are not this model's, or nothing says where they are.
        """
        if type(step) is not int or step < 0:
            raise WrongArguments(f"the step of weights is a whole number from 0, not {step!r:.40}")
        if path is None and state is None:
            path = weights.path_of(self._weights_folder(), step)
        return self._measured("update_weights", step, path, state)

    def reload(self) -> dict[str, Any]:
        """Load the newest whole weights of the folder, blocking.

        Raises:
            CheckpointBroken: there are none.
        """
        folder = self._weights_folder()
        step = weights.latest(folder)
        if step is None:
            raise CheckpointBroken(f"there are no whole weights in {folder}")
        return self._measured("reload_weights", step, weights.path_of(folder, step), None)

    def inside(self, path: str) -> Path:
        """Return the real path of weights that a stranger named; a relative one is in the weights' folder.

        Raises:
            Denied: the path is not inside of the generator's folder, also by links.
        """
        if self._folder is None:
            raise Denied("this generator has no folder, so that it loads no weights by path")
        root = self._folder.resolve()
        try:
            found = (self._weights_folder() / path).resolve()
        except (OSError, ValueError, RuntimeError):
            found = None
        if found is None or not found.is_relative_to(root) or found == root:
            raise Denied(f"{path!r:.200} is not in the folder of this generator")
        return found

    def _weights_folder(self) -> Path:
        if self._folder is None:
            raise WrongArguments("this generator has no folder: say the path of the weights, or send their state")
        inner = self._folder / "weights"
        return inner if inner.is_dir() else self._folder

    def _measured(
        self, op: str, step: int, path: str | Path | None, state: Mapping[str, Tensor] | None
    ) -> dict[str, Any]:
        began = time.monotonic()
        tracing.event("weights.rpc.start", op=op)
        with self._lock:
            if state is None:
                assert path is not None
                state, _ = weights.load(path)
            self._engine.swap(state, step)
        rpc_ms = round((time.monotonic() - began) * 1000, 3)
        tracing.event("weights.rpc.done", op=op, rpc_ms=rpc_ms)
        return {"status": "ok", "rpc_ms": rpc_ms, "step": step}
