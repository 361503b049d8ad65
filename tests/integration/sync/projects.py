"""Project folders, and machines that share no cache."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import loom

WAIT = 30.0


class Machines(NamedTuple):
    """A gateway and two workers that share no cache, as if each were a machine of its own."""

    url: str
    token: str
    gateway_cache: Path
    host_caches: list[Path]


class Project:
    """A project folder that this process imports from, too."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def write(self, path: str, text: str | bytes) -> Path:
        place = self.folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(text.encode() if isinstance(text, str) else text)
        return place

    def load(self, name: str) -> ModuleType:
        """Import a module, or import it anew."""
        importlib.invalidate_caches()
        sys.modules.pop(name, None)
        return importlib.import_module(name)


def model(version: int) -> str:
    """A module with an actor that tells what it is imported as."""
    return f"""
import sys
from loom import Actor, endpoint

class Config:
    def __init__(self, text):
        self.text = text

class Model(Actor):
    @endpoint
    def version(self):
        return {version}
    @endpoint
    def imported(self):
        module = sys.modules[type(self).__module__]
        return type(self).__module__, module.__file__, module.Model is type(self)
    @endpoint
    def is_config(self, config):
        return isinstance(config, Config)
"""


def values(future: Any) -> list[Any]:
    return list(future.get(WAIT).values())


class Environment(loom.Actor):
    """Travels by value: this module is not in a synced folder."""

    @loom.endpoint
    def get(self, name: str) -> str | None:
        return os.environ.get(name)

    @loom.endpoint
    def version_of(self, module: str) -> Any:
        return importlib.import_module(module).VERSION

    @loom.endpoint
    def path(self) -> list[str]:
        return [*sys.path, os.getcwd()]

    @loom.endpoint
    def run(self, file: str, module: str) -> tuple[str, bool, str]:
        """What is in a file beside a module: its text, whether it may be run, and where it leads."""
        place = Path(importlib.import_module(module).__file__ or "").parent / file
        return place.read_text(), os.access(place, os.X_OK), os.readlink(place) if place.is_symlink() else ""
