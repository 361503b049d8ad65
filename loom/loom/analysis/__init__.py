"""Where the time of an RL run goes, from its logs: statistics of every metric, and a diagnosis.

`loom.analysis.run` reads logs and returns an `Analysis`; ``loom analyze`` writes it. `loom.analysis.rules` has
the thresholds.
"""

from __future__ import annotations

from loom.analysis.diagnosis import Finding
from loom.analysis.result import Analysis
from loom.analysis.run import analyze
from loom.analysis.statistics import Stats

__all__ = ["Analysis", "Finding", "Stats", "analyze"]
