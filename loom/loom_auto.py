"""The start of a process whose trainings take part by themselves, and of the command ``loom``.

This module lies beside the package ``loom``, and imports it only with the first library that has a hook: a program
may have a module of that name, and finds it as without Loom.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import NoReturn


def start() -> None:
    """Wait for the libraries that have hooks, in a process that begins."""
    _load("loom.instrument.imports")
    _load("loom.instrument.bootstrap").begin()


def put_folder_last() -> None:
    """Let a process that Monarch starts by ``python -m`` import from the current folder last, instead of first."""
    with contextlib.suppress(FileNotFoundError):  # the folder is gone, and Python leaves it out
        if not getattr(sys.flags, "safe_path", False):
            sys.meta_path.insert(0, _FolderLast(os.getcwd()))


class _FolderLast:
    """A finder that finds nothing: when Python has begun to run the module, it puts the current folder last."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._before = sys.path.count(folder)  # ``PYTHONPATH`` may have it

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if sys.path[0] == self._folder and sys.path.count(self._folder) > self._before:
            sys.meta_path.remove(self)
            del sys.path[0]
            if not self._before:
                sys.path.append(self._folder)


def lightning_callbacks() -> list[object]:
    """Return the callbacks that Lightning adds to each Trainer, by its entry points: none without hooks here."""
    begun = sys.modules.get("loom.instrument.bootstrap")
    return begun.lightning_callbacks() if begun is not None else []


def main() -> NoReturn:
    """Run the command ``loom``, also where ``PYTHONPATH`` has a module of the user's with its name."""
    if not _load("loom.instrument.imports").finds_loom():
        sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from loom.cli import main

    main()


def _load(name: str) -> ModuleType:
    """Return a module of Loom, imported without the packages in which it lies."""
    if name not in sys.modules:
        path = os.path.join(os.path.dirname(os.path.abspath(__file__)), *name.split(".")) + ".py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


if __name__ == "__main__":
    main()
