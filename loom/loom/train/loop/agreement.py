"""Configuration that all replicas change at the same step.

Each replica group gets a change on its own, at a step boundary of its own. If each applied it there, their
parameters would differ from then on. So a change starts as a proposal: with the gradients of a step the groups
exchange a row of numbers each, and for each key all adopt the newest value of all rows, for that very step.

A proposal is decided when the groups adopt a value of its version or a newer one. It counts as applied, with the
step of the adoption, if the adopted value is the proposed one, whichever group proposed it. It is refused if the
groups adopted another value, or if a later change in the same group replaced it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from loom.errors import WrongArguments
from loom.threadlet import Deferred, Threadlet
from loom.train.settings import RULES, SCHEDULES, Averaging, LiveConfig


@dataclass(frozen=True)
class _Adopted:
    version: int
    value: float
    step: int  # the first step at which the value holds


@dataclass(frozen=True)
class _Proposal:
    version: int
    value: float
    change: Deferred


class Agreement:
    """One group's view of the configuration, from the first value of each key."""

    def __init__(self, values: Mapping[str, float]) -> None:
        self._adopted = {key: _Adopted(0, value, 0) for key, value in values.items()}
        self._proposed: dict[str, _Proposal] = {}

    def __getitem__(self, key: str) -> float:
        return self._adopted[key].value

    def propose(self, key: str, value: float) -> Deferred:
        """Propose a value for the next step that all groups take.

        The result is decided at once if they have adopted the value already, because another group proposed it.
        """
        change = Deferred()
        adopted, earlier = self._adopted[key], self._proposed.get(key)
        if earlier is not None:
            earlier.change.refuse("a later change took its place before the groups adopted it")
        elif adopted.value == value:
            change.applied(adopted.step)
            return change
        version = adopted.version if earlier is None else earlier.version
        self._proposed[key] = _Proposal(version + 1, value, change)
        return change

    def row(self) -> list[float]:
        """Return the row for the other groups: a version and a value for each key."""
        row: list[float] = []
        for key, adopted in self._adopted.items():
            known = self._proposed.get(key, adopted)
            row += [known.version, known.value]
        return row

    def settle(self, rows: Sequence[Sequence[float]], step: int, after: Collection[str] = ()) -> dict[str, float]:
        """Adopt the newest values of the rows, the same in all groups, from a step on; return what has changed.

        Args:
            rows: of all groups.
            step: the step of the exchange.
            after: keys whose values hold only after that step.
        """
        changed = {}
        for place, (key, adopted) in enumerate(list(self._adopted.items())):
            version, value = max((row[2 * place], row[2 * place + 1]) for row in rows)
            since = adopted.step
            if value != adopted.value:
                changed[key] = value
                since = step + (key in after)
            self._adopt(key, _Adopted(int(version), value, since))
        return changed

    def since(self, key: str) -> int:
        """Return the first step at which a key's value holds."""
        return self._adopted[key].step

    def _adopt(self, key: str, adopted: _Adopted) -> None:
        self._adopted[key] = adopted
        proposal = self._proposed.get(key)
        if proposal is None or proposal.version > adopted.version:
            return
        del self._proposed[key]
        if proposal.value == adopted.value:
            proposal.change.applied(adopted.step)
        else:
            proposal.change.refuse(f"the groups adopted another value for step {adopted.step}")

    def state(self) -> dict[str, list[float]]:
        """Return the adopted values, for a group that joins and for a checkpoint."""
        return {key: [adopted.version, adopted.value, adopted.step] for key, adopted in self._adopted.items()}

    def load(self, state: Mapping[str, Sequence[float]]) -> None:
        """Take over the adopted values of other groups. Newer proposals of this group stay."""
        for key, (version, value, *step) in state.items():  # checkpoints of older versions have no step
            self._adopt(key, _Adopted(int(version), float(value), int(step[0]) if step else 0))


OWN = -1.0
"""The number for None, which leaves a setting of the optimizer as it is."""
OF_BATCHES = frozenset({"batch_size", "accumulation"})
"""Settings that a gradient was computed with by the time it is exchanged: they change the next step."""


class AgreedConfig(Agreement):
    """The live configuration of one group, in which a number stands for a name: its place among the names."""

    def __init__(self, config: LiveConfig, averaging: Averaging, optimizers: Iterable[str]) -> None:
        self._averaging = averaging
        self._names = {"optimizer": sorted(optimizers), "schedule": list(SCHEDULES)}
        self.has_betas = True
        """True if the optimizer has Adam's betas."""
        super().__init__({key: self._number(key, value) for key, value in asdict(config).items()})

    @property
    def current(self) -> LiveConfig:
        return LiveConfig(**{key: self._value(key) for key in KINDS})

    def register(self, threadlet: Threadlet) -> None:
        """Register a handler for each key, which proposes the value to the other groups."""
        for key, kind in KINDS.items():
            threadlet.handler(key)(self._handler(key, kind))

    def _handler(self, key: str, kind: type) -> Callable[[Any], Deferred]:
        def propose(value: Any) -> Deferred:
            if rule := self._broken_rule(key, value):
                raise WrongArguments(f"{key} {rule}")
            return self.propose(key, self._number(key, value))

        propose.__annotations__["value"] = kind  # to which the threadlet converts values
        return propose

    def _broken_rule(self, key: str, value: Any) -> str | None:
        """Return what a value would have to be; None if it is that."""
        if key == "optimizer":
            return None if value in self._names[key] else f"is one of {', '.join(self._names[key])}, not {value}"
        if key == "sync_every" and self._averaging is Averaging.GRADIENTS:
            return None if value == 1 else "is 1: this job averages gradients"
        if key in ("beta1", "beta2") and not self.has_betas:
            return f"is for optimizers like Adam, and the optimizer is {self.current.optimizer}"
        fits, rule = RULES[key]
        return None if fits(value) else rule

    def _number(self, key: str, value: Any) -> float:
        if key in self._names:
            return float(self._names[key].index(value))
        return OWN if value is None else float(value)

    def _value(self, key: str) -> Any:
        if key in self._names:
            return self._names[key][int(self[key])]
        return None if key in OPTIONAL and self[key] == OWN else KINDS[key](self[key])


OPTIONAL = ("weight_decay", "beta1", "beta2")
KINDS: Mapping[str, type] = {
    "learning_rate": float,
    "batch_size": int,
    "gradient_clipping": float,
    "sync_every": int,
    "optimizer": str,
    "accumulation": int,
    "weight_decay": float,
    "beta1": float,
    "beta2": float,
    "schedule": str,
    "warmup_steps": int,
    "decay_to": float,
}
"""The types of the settings in `LiveConfig`."""
