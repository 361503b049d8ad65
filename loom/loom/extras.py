"""The dependencies of Loom's optional parts, and the error for missing ones."""

from __future__ import annotations

import importlib.util

from loom.errors import MissingDependency

WORKER_MODULES = {"monarch": "torchmonarch", "psutil": "psutil"}
"""Modules that a worker imports, and the distributions that bring them."""

GATEWAY_MODULES = {**WORKER_MODULES, "fastapi": "fastapi", "uvicorn": "uvicorn", "uvloop": "uvloop"}
"""Modules that a gateway or its drivers import, and the distributions that bring them."""


def require(modules: dict[str, str], what: str, extra: str = "gateway") -> None:
    """Check, without importing them, that all modules are installed.

    Args:
        modules: names of modules, each with the distribution that brings it.
        what: the part that needs them, for the error's text.
        extra: the extra of ``monarch-loom`` that installs them.

    Raises:
        MissingDependency: naming every missing distribution.
    """
    missing = [package for module, package in modules.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise MissingDependency(
            f"{what} needs {', '.join(missing)}, not installed here: pip install 'monarch-loom[{extra}]'"
        )
