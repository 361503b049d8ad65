"""Accelerate, in loops written by hand: what `Accelerator.log` gets, and how many batches make a step.

The steps are those of torch's optimizers, which `AcceleratedOptimizer` makes when all batches of a step are
accumulated. A Trainer that uses Accelerate inside has a hook of its own, and this one does nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import ref

from loom.instrument.postponed import Postponed
from loom.instrument.training import StepSource, guarded, log, training
from loom.threadlet.handlers import Deferred

NAME = "Accelerate"

KEY = "gradient_accumulation_steps"

_SAVES_ITSELF = (
    "an Accelerate loop saves by itself: only it knows when its scheduler, its data and its own counters agree. "
    "accelerator.save_state() in a function of @t.on_save offers it"
)


def hook(module: Any) -> None:
    """Hook ``accelerate.accelerator``."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    kind = module.Accelerator
    made, logged = kind.__init__, kind.log
    loops: list[AcceleratorLoop] = []

    @functools.wraps(made)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        loops[:] = [AcceleratorLoop(self)]

    @functools.wraps(logged)
    def note(self: Any, values: Any, *args: Any, **kwargs: Any) -> None:
        _log(values)
        logged(self, values, *args, **kwargs)

    kind.__init__, kind.log = make, note
    # Registered after the one of the step boundary, which is hooked when torch is imported: it runs after it.
    register_optimizer_step_post_hook(lambda *_: loops[-1].stepped() if loops else None)


@guarded(NAME)
def _log(values: Any) -> None:
    log({name: value for name, value in dict(values).items() if not isinstance(value, str)})


class AcceleratorLoop:
    """The loop that uses an accelerator."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator: Callable[[], Any] = ref(accelerator)
        self._postponed = Postponed()
        self._offered = False
        self._steps = 0

    @guarded(NAME)
    def stepped(self) -> None:
        """Note a step of an optimizer."""
        self._steps += 1
        if not self._offered:
            self._offered = True
            self._offer()
        self._postponed.look(self._steps)

    def _offer(self) -> None:
        here, accelerator = training(), self._accelerator()
        if here.owner > StepSource.ACCELERATE:
            return
        here.offer_action("save", lambda: None, lambda: _SAVES_ITSELF)
        if accelerator is not None and accelerator.distributed_type.value != "DEEPSPEED":  # whose engine does it
            here.offer(KEY, int, lambda: getattr(self._accelerator(), KEY, None), self._accumulate)

    def _accumulate(self, value: int) -> Deferred:
        if value < 1:
            raise ValueError(f"{KEY} is 1 or more, not {value}")
        accelerator = self._accelerator()
        # `accumulate` makes a step when the number of batches is a multiple of it.
        apply = functools.partial(setattr, accelerator, KEY, value)
        return self._postponed.change(KEY, lambda: accelerator.step % value == 0, apply)
