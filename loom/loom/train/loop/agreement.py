"""Configuration that all replicas change at the same step.

Each replica group gets a change on its own, at a step boundary of its own. If each applied it there, their
parameters would differ from then on. So a change starts as a proposal: with the gradients of a step the groups
exchange a row of numbers each, and for each key all adopt the newest value of all rows, for that very step.

A proposal is decided when the groups adopt a value of its version or a newer one. It counts as applied, with the
step of the adoption, if the adopted value is the proposed one, whichever group proposed it. It is refused if the
groups adopted another value, or if a later change in the same group replaced it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from loom.errors import WrongArguments
from loom.threadlet import Deferred, Threadlet
from loom.train.settings import Averaging, LiveConfig


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

    def settle(self, rows: Sequence[Sequence[float]], step: int) -> dict[str, float]:
        """Adopt the newest values of the rows, the same in all groups, from a step on; return what has changed."""
        changed = {}
        for place, (key, adopted) in enumerate(list(self._adopted.items())):
            version, value = max((row[2 * place], row[2 * place + 1]) for row in rows)
            if value != adopted.value:
                changed[key] = value
            self._adopt(key, _Adopted(int(version), value, step if key in changed else adopted.step))
        return changed

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


class AgreedConfig(Agreement):
    """The live configuration of one group, in which a number stands for an optimizer: its place among the names."""

    def __init__(self, config: LiveConfig, averaging: Averaging, optimizers: Iterable[str]) -> None:
        self._averaging = averaging
        self._names = sorted(optimizers)
        numbers = {**asdict(config), "optimizer": self._names.index(config.optimizer)}
        super().__init__({key: float(value) for key, value in numbers.items()})

    @property
    def current(self) -> LiveConfig:
        return LiveConfig(
            learning_rate=self["learning_rate"],
            batch_size=int(self["batch_size"]),
            gradient_clipping=self["gradient_clipping"],
            sync_every=int(self["sync_every"]),
            optimizer=self._names[int(self["optimizer"])],
        )

    def register(self, threadlet: Threadlet) -> None:
        """Register a handler for each key, which proposes the value to the other groups."""

        @threadlet.handler("learning_rate")
        def set_learning_rate(value: float) -> Deferred:
            return self._propose("learning_rate", value, value > 0, "is larger than 0")

        @threadlet.handler("batch_size")
        def set_batch_size(value: int) -> Deferred:
            return self._propose("batch_size", value, value >= 1, "is 1 at least")

        @threadlet.handler("gradient_clipping")
        def set_gradient_clipping(value: float) -> Deferred:
            return self._propose("gradient_clipping", value, value >= 0, "is 0 (none) or larger")

        @threadlet.handler("sync_every")
        def set_sync_every(value: int) -> Deferred:
            if self._averaging is Averaging.GRADIENTS:
                return self._propose("sync_every", value, value == 1, "is 1: this job averages gradients")
            return self._propose("sync_every", value, value >= 1, "is 1 at least")

        @threadlet.handler("optimizer")
        def set_optimizer(value: str) -> Deferred:
            known = value in self._names
            number = self._names.index(value) if known else -1
            return self._propose("optimizer", number, known, f"is one of {', '.join(self._names)}, not {value}")

    def _propose(self, key: str, value: float, allowed: bool, rule: str) -> Deferred:
        if not allowed:
            raise WrongArguments(f"{key} {rule}")
        return self.propose(key, float(value))
