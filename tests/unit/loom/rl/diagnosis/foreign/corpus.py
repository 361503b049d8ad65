"""54 labelled runs of six frameworks, and 12 in which nothing is wrong."""

from __future__ import annotations

from dataclasses import dataclass

from tests.unit.loom.rl.diagnosis.foreign.simulation import CAUSES


@dataclass(frozen=True)
class LabelledRun:
    """A run of the corpus."""

    framework: str
    cause: str
    asynchronous: int
    seed: int

    @property
    def label(self) -> str:
        """The rule that is right about it."""
        return CAUSES[self.cause].label


_TURNS, _AHEAD = 0, 1
_CAUSES = {
    "prime-rl": (
        ("slow engines", _AHEAD), ("slow trainers", _AHEAD), ("slow transfer", _AHEAD), ("short limit", _AHEAD),
        ("small cache", _AHEAD), ("impatience", _AHEAD), ("deaf engine", _AHEAD), ("engines hang", _AHEAD),
        ("trainers hang", _AHEAD),
    ),
    "verl": (
        ("slow engines", _TURNS), ("slow trainers", _TURNS), ("slow transfer", _TURNS), ("slow storage", _TURNS),
        ("short limit", _TURNS), ("small cache", _TURNS), ("giant prompts", _TURNS), ("engines hang", _TURNS),
        ("trainers hang", _TURNS),
    ),
    "slime/miles": (
        ("slow engines", _AHEAD), ("slow trainers", _TURNS), ("slow transfer", _TURNS), ("short limit", _AHEAD),
        ("small cache", _TURNS), ("giant prompts", _TURNS), ("deaf engine", _AHEAD), ("engines hang", _TURNS),
        ("trainers hang", _AHEAD),
    ),
    "SkyRL": (
        ("slow engines", _AHEAD), ("slow trainers", _TURNS), ("slow transfer", _AHEAD), ("outages", _TURNS),
        ("small cache", _TURNS), ("giant prompts", _TURNS), ("deaf engine", _AHEAD), ("engines hang", _AHEAD),
        ("trainers hang", _TURNS),
    ),
    "TRL": (
        ("slow engines", _TURNS), ("slow engines", _AHEAD), ("slow trainers", _TURNS), ("slow transfer", _TURNS),
        ("short limit", _TURNS), ("small cache", _TURNS), ("giant prompts", _TURNS), ("outages", _TURNS),
        ("engines hang", _AHEAD),
    ),
    "OpenRLHF": (
        ("slow engines", _TURNS), ("slow engines", _AHEAD), ("slow trainers", _TURNS), ("slow trainers", _AHEAD),
        ("slow transfer", _TURNS), ("short limit", _AHEAD), ("small cache", _TURNS), ("engines hang", _TURNS),
        ("trainers hang", _AHEAD),
    ),
}  # fmt: skip
"""The causes of each framework's nine runs; those of which its logs have no trace at all are left out."""

LABELLED = [
    LabelledRun(framework, cause, asynchronous, seed)
    for framework, causes in _CAUSES.items()
    for seed, (cause, asynchronous) in enumerate(causes)
]
HEALTHY = [
    LabelledRun(framework, "healthy", asynchronous, 100 + asynchronous)
    for framework in _CAUSES
    for asynchronous in (
        (_AHEAD, 2) if framework == "prime-rl" else (_TURNS, 3) if framework == "verl" else (_TURNS, _AHEAD)
    )
]
