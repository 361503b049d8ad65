"""The faults that the weaver injects into a training process which is marked as injectable."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from loom.chaos import training
from loom.chaos.host import agent
from loom.chaos.injected import Evidence, Injected
from loom.chaos.training import Strike
from loom.control.commands import Command, CommandKind
from loom.control.faults import FAULTS, Place, check_fault
from loom.errors import FaultRefused

MAX_WITHDRAWN = 256  # removals that are remembered for injections which come after them
MAX_REMOVED = 16  # removed faults that each new connection reports to the weaver again

Hook = Callable[[dict[str, Any]], Any]  # carries out a fault in Loom's place; may return a function that removes it


class Injections:
    """The faults of one process. ``on_removal`` gets the id of a removed fault and the evidence of that."""

    def __init__(
        self, hooks: dict[str, Hook], each_step: training.EachStep, on_removal: Callable[[str, Evidence], None]
    ) -> None:
        self._hooks = hooks
        self._each_step = each_step
        self._on_removal = on_removal
        self._there: dict[str, Injected] = {}
        self.removed: dict[str, Evidence] = {}  # the last ones, of which the weaver may not have heard
        # Removals are carried out on arrival, and may overtake an injection that waits for a step boundary.
        self._withdrawn: dict[str, None] = {}

    @staticmethod
    def at_once(command: Command) -> bool:
        """Return whether a command is carried out on arrival, and not at a step boundary."""
        if command.kind is CommandKind.INJECT:
            kind = FAULTS.get(command.params.get("fault"))  # type: ignore[arg-type]
            return kind is not None and kind.place is Place.HOST
        return command.kind is CommandKind.REMOVE_FAULT

    def inject(self, command: Command) -> tuple[Evidence, Strike | None]:
        """Inject a fault, or remove one; return the evidence, and a strike for after its report.

        Call it in the training's thread, unless the command is carried out `at_once`.
        """
        params = command.params
        if command.kind is CommandKind.REMOVE_FAULT:
            return self._remove(str(params.get("injection"))), None
        kind, checked, duration = check_fault(params.get("fault"), params.get("params", {}), params.get("duration"))
        pid, report = os.getpid(), self._removal_reporter(command.id)
        if command.id in self._withdrawn:
            report({"pid": pid, "injected": False})
            raise FaultRefused("it was removed before it was injected")
        if kind.name == "sigkill":
            return {"pid": pid}, Strike({"pid": pid}, lambda: os.kill(pid, signal.SIGKILL))
        if kind.place is Place.HOST:
            evidence, begin = agent.keep(command.id, kind.name, checked, duration, pid, report)
            return evidence, None if begin is None else Strike(evidence, begin)
        if (hook := self._hooks.get(kind.name)) is not None:
            undo = hook(checked)
            evidence = {"pid": pid, "by": getattr(hook, "__name__", "a function of the training's")}
            remove = None if undo is None else lambda: undo() or {}
            injected = Injected(kind.name, evidence, remove, duration, report)
        elif kind.name in training.STRIKES:
            strike = training.STRIKES[kind.name](checked, duration)
            return strike.evidence, strike
        else:
            injected = training.begin(kind.name, checked, duration, self._each_step, report)
        if injected.removable:
            self._there[command.id] = injected
            if command.id in self._withdrawn:  # meanwhile, by the thread that takes commands
                injected.remove()
        return injected.evidence, None

    def _remove(self, injection: str) -> Evidence:
        self._withdrawn[injection] = None
        while len(self._withdrawn) > MAX_WITHDRAWN:
            del self._withdrawn[next(iter(self._withdrawn))]
        if (injected := self._there.get(injection)) is not None:
            return injected.remove()
        agent.remove(injection)
        return {"injection": injection, "there": False}

    def _removal_reporter(self, injection: str) -> Callable[[Evidence], None]:
        def tell(evidence: Evidence) -> None:
            self._there.pop(injection, None)
            self.removed[injection] = evidence
            while len(self.removed) > MAX_REMOVED:
                del self.removed[next(iter(self.removed))]
            self._on_removal(injection, evidence)

        return tell
