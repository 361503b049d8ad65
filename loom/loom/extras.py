"""The dependencies of Loom's optional parts, and the error for missing ones."""

from __future__ import annotations

import importlib.util

from loom.errors import MissingDependency

# Modules that a worker, and a gateway or its drivers, import, and the distributions that bring them.
WORKER_MODULES = {"monarch": "torchmonarch", "psutil": "psutil"}
GATEWAY_MODULES = {**WORKER_MODULES, "fastapi": "fastapi", "uvicorn": "uvicorn", "uvloop": "uvloop"}


def require(modules: dict[str, str], what: str, extra: str = "gateway") -> None:
    """Raise `MissingDependency` unless all modules, named with their distributions, are installed; import none."""
    missing = [package for module, package in modules.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise MissingDependency(
            f"{what} needs {', '.join(missing)}, not installed here: pip install 'monarch-loom[{extra}]'"
        )
