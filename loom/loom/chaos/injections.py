"""The faults that the weaver injects into an injectable training process, by the place that carries them out."""

from __future__ import annotations

import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from loom.chaos import training_faults
from loom.chaos.host import agent
from loom.chaos.injected import Evidence, Injected
from loom.chaos.training_faults import EachStep, Strike
from loom.control.commands import Command, CommandKind
from loom.control.fault_kinds import FAULTS, FaultKind, Place, check_fault
from loom.errors import FaultRefused

MAX_WITHDRAWN = 256  # removals that are remembered for injections which come after them
MAX_REMOVED = 16  # removed faults that each new connection reports to the weaver again

Hook = Callable[
    [Mapping[str, Any]], Any
]  # carries out a fault in Loom's place; may return a function that removes it


@dataclass(frozen=True)
class RequestedFault:
    """A fault with checked parameters. ``report`` gets the evidence of its removal."""

    id: str
    kind: FaultKind
    params: Mapping[str, Any]
    duration: float | None
    report: Callable[[Evidence], None]


class Injector(ABC):
    """Carries out the faults of one place."""

    @abstractmethod
    def inject(self, fault: RequestedFault) -> Injected | Strike:
        """Inject a fault, or prepare a strike for after its report."""


class HostInjector(Injector):
    """Injects on the host, through an agent that outlives this process. SIGKILL needs none."""

    def inject(self, fault: RequestedFault) -> Injected | Strike:
        pid, kind = os.getpid(), fault.kind.name
        if kind == "sigkill":
            return Strike({"pid": pid}, lambda: os.kill(pid, signal.SIGKILL))
        evidence, begin = agent.keep(fault.id, kind, fault.params, fault.duration, pid, fault.report)
        return Injected(kind, evidence) if begin is None else Strike(evidence, begin)


class StepInjector(Injector):
    """Injects into this process, at a step boundary."""

    def __init__(self, each_step: EachStep) -> None:
        self._each_step = each_step

    def inject(self, fault: RequestedFault) -> Injected | Strike:
        if (strike := training_faults.STRIKES.get(fault.kind.name)) is not None:
            return strike(fault.params, fault.duration)
        return training_faults.begin(fault.kind.name, fault.params, fault.duration, self._each_step, fault.report)


class HookInjector(Injector):
    """Injects by a function of the training's own, `Threadlet.on_fault`."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook

    def inject(self, fault: RequestedFault) -> Injected:
        undo = self._hook(fault.params)
        evidence = {"pid": os.getpid(), "by": getattr(self._hook, "__name__", "a function of the training's")}
        remove = None if undo is None else lambda: undo() or {}
        return Injected(fault.kind.name, evidence, remove, fault.duration, fault.report)


class Injections:
    """The faults of one process. ``on_removal`` gets the id of a removed fault and the evidence of that."""

    def __init__(
        self, hooks: Mapping[str, Hook], each_step: EachStep, on_removal: Callable[[str, Evidence], None]
    ) -> None:
        self._hooks = hooks
        self._injectors = {Place.HOST: HostInjector(), Place.TRAINING: StepInjector(each_step)}
        self._on_removal = on_removal
        self._there: dict[str, Injected] = {}
        self.removed: dict[str, Evidence] = {}  # the last ones, perhaps unknown to the weaver
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
        report = self._removal_reporter(command.id)
        if command.id in self._withdrawn:
            report({"pid": os.getpid(), "injected": False})
            raise FaultRefused("it was removed before it was injected")
        fault = RequestedFault(command.id, kind, dict(checked), duration, report)
        injected = self._injector(kind).inject(fault)
        if isinstance(injected, Strike):
            return injected.evidence, injected
        if injected.removable:
            self._there[command.id] = injected
            if command.id in self._withdrawn:  # meanwhile, by the thread that takes commands
                injected.remove()
        return injected.evidence, None

    def _injector(self, kind: FaultKind) -> Injector:
        hook = self._hooks.get(kind.name) if kind.place is Place.TRAINING else None
        return self._injectors[kind.place] if hook is None else HookInjector(hook)

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
