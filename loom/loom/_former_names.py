"""Former names of modules of Loom, which can still be imported, with a `DeprecationWarning`.

A module of its own, since `loom` installs the finder before anything else is imported.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing `typing` or `importlib.abc` would take longer than everything else here
    from collections.abc import Sequence

FORMER_NAMES = {
    "loom.analysis": "loom.rl.diagnosis",
    "loom.beside": "loom.driver_api",
    "loom.bridge": "loom.nats",
    "loom.cells.records": "loom.notebook.displays",
    "loom.cells": "loom.notebook",
    "loom.rest": "loom.rest_client",
    "loom.rl.diagnosis.folder": "loom.rl.diagnosis.analysis",
    "loom.rl.diagnosis.run": "loom.rl.diagnosis.analysis",
    "loom.rl.generation.limits": "loom.rl.generation.completions",
    "loom.rl.generation.places": "loom.rl.generation.weight_client",
    "loom.rl.generation.urls": "loom.rl.generation.weight_client",
    "loom.rl.generation.ways": "loom.rl.generation.weight_client",
    "loom.rl.generation.weights": "loom.rl.generation.weight_files",
    "loom.session_life": "loom.session_alive",
    "loom.timing": "loom.tracing",
    "loom.tuning": "loom.rl.tuning",
    "loom.weaver.goodput.slots": "loom.weaver.goodput.plot",
    "loom.weaver.goodput_plot": "loom.weaver.goodput.plot",
    "loom_gateway.kubetorch": "loom_gateway.pod.loom_pod",
}
"""Today's name of each module or package that had another one, by its former name."""

_PREFIXES = tuple(FORMER_NAMES)


class FormerNames:
    """Imports the module of today's name for a former name, or for a module within a former package."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(_PREFIXES):
            return None
        if (todays := todays_name(name)) == name:
            return None
        _warn(f"{name} is now {todays}: import {todays}")
        return ModuleSpec(name, self)  # type: ignore[arg-type] # the machinery asks for these methods alone

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(todays_name(module.__name__))


def todays_name(name: str) -> str:
    """Return today's name of a module, or the name itself if it never had another one."""
    for former, todays in FORMER_NAMES.items():
        if name == former or name.startswith(f"{former}."):
            return todays + name[len(former) :]
    return name


def _warn(text: str) -> None:
    """Warn at the line that imports or reads the former name."""
    import warnings

    frame = sys._getframe(1)
    while frame.f_back is not None and ("importlib" in frame.f_code.co_filename or _own(frame.f_code.co_filename)):
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    module = frame.f_globals.get("__name__", "loom")
    warnings.warn_explicit(
        text, DeprecationWarning, frame.f_code.co_filename, frame.f_lineno, module=module, registry=registry
    )


def _own(file: str) -> bool:
    return file.endswith(("_former_names.py", "_lazy.py"))


def install() -> None:
    """Let the former names be imported, before the search for files, which finds a second copy of submodules."""
    sys.meta_path.insert(0, FormerNames())
