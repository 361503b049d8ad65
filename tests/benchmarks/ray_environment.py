"""Where Ray Client is installed: an environment of its own, since its dependencies are not Loom's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.benchmarks.calls import PAYLOADS, Subject, SubjectName

__all__ = ["RayNotInstalled", "subject"]

VERSION_OF_RAY = "import ray, ray.util.client, grpc; print(ray.__version__)"
HAS_NUMPY = "import numpy"

ADVICE = "install 'ray[client]' and numpy in a virtual environment and name its interpreter with --ray-python"


class RayNotInstalled(Exception):
    """No interpreter with Ray Client; the text says what to do."""


def subject(python: Path | None) -> Subject:
    """Ray Client as a subject.

    Args:
        python: an interpreter that can import it; this one if None.

    Raises:
        RayNotInstalled: it cannot.
    """
    interpreter = str(python or sys.executable)
    version = _run(interpreter, VERSION_OF_RAY)
    if version is None:
        raise RayNotInstalled(f"{interpreter} has no ray[client]; {ADVICE}")
    payloads = PAYLOADS if _run(interpreter, HAS_NUMPY) is not None else ("bytes",)
    return Subject(
        SubjectName.RAY,
        f"Ray Client {version}",
        "tests.benchmarks.ray_caller",
        python=interpreter,
        payloads=payloads,
        pipelines=("one",),
    )


def _run(interpreter: str, code: str) -> str | None:
    try:
        done = subprocess.run(
            [interpreter, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
