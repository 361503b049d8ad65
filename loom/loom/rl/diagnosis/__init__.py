"""The times of an RL run, from its logs: statistics of every metric, and a diagnosis.

`loom.rl.diagnosis.analysis` reads logs and returns an `Analysis`; ``loom analyze`` writes it. The thresholds are in
`loom.rl.diagnosis.rules`.
"""

from __future__ import annotations

from loom.rl.diagnosis.analysis import analyze
from loom.rl.diagnosis.diagnosis import Finding
from loom.rl.diagnosis.result import Analysis
from loom.rl.diagnosis.statistics import Stats

__all__ = ["Analysis", "Finding", "Stats", "analyze"]
