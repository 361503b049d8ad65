"""The scripts: each public function of these modules, ``def script(hosts, api)``, whatever its name.

``hosts`` is the host mesh of the side that runs it (two hosts), ``api`` its names; see `tests.parity.api`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tests.parity.scripts import (
    calls,
    classes,
    duck_types,
    failures,
    futures,
    inside,
    mistakes,
    ports,
    shapes,
    spawning,
    stopping,
    threads,
    values,
)

__all__ = ["MODULES", "SCRIPTS"]

MODULES: tuple[ModuleType, ...] = (
    shapes,
    values,
    calls,
    ports,
    failures,
    futures,
    inside,
    spawning,
    stopping,
    mistakes,
    duck_types,
    classes,
    threads,
)


def _scripts() -> dict[str, Callable[[Any, Any], Any]]:
    found = {}
    for module in MODULES:
        for name, function in vars(module).items():
            own = inspect.isfunction(function) and function.__module__ == module.__name__
            if (
                own
                and not name.startswith("_")
                and list(inspect.signature(function).parameters) == ["hosts", "api"]
            ):
                found[f"{module.__name__.rpartition('.')[2]}.{name}"] = function
    return found


SCRIPTS = _scripts()
"""Every script, by the name of its module and its own."""
