"""Where the project's own folders are, for tests that run or read something of them."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The checkout."""

EXAMPLES = ROOT / "examples"
